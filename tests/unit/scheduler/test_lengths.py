"""Which requests of different sizes share a batch: by brute force over all ways to split what waits."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.scheduler.lengths import Bounds, common_sizes, sharing
from paceline.scheduler.request import AnyRequest, Request

ANY = Bounds(1000, 1000, sys.maxsize)


def own(size: int) -> int:
    return size


def upper_ten(size: int) -> int:
    return -(-size // 10) * 10


def request(*sizes: int, rows: int = 1) -> AnyRequest:
    return Request(None, rows, "k", 1, sizes=sizes)


def shared(sizes: Sequence[int], worth: float, most: Bounds = ANY) -> list[int]:
    return [one.sizes[0] for one in sharing([request(size) for size in sizes], (own,), most, worth)]


def splits(items: Sequence[AnyRequest]) -> Iterator[list[list[AnyRequest]]]:
    """All ways to split `items` into batches."""
    if not items:
        yield []
        return
    for rest in splits(items[1:]):
        yield [[items[0]], *rest]
        for place, batch in enumerate(rest):
            yield [*rest[:place], [items[0], *batch], *rest[place + 1 :]]


def cost(batch: Sequence[AnyRequest], worth: float) -> float:
    return worth + sum(one.rows for one in batch) * math.prod(common_sizes((own,) * len(batch[0].sizes), batch))


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 3)), min_size=1, max_size=7), st.integers(1, 60))
def test_batch_is_of_a_cheapest_split(waiting: list[tuple[int, int]], worth: int) -> None:
    requests = [request(size, rows=rows) for size, rows in waiting]
    batch = sharing(requests, (own,), ANY, worth)
    costs = [(sum(cost(one, worth) for one in split), split) for split in splits(requests)]
    least = min(total for total, _ in costs)
    assert any(batch in split for total, split in costs if total == least)


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 3)), min_size=1, max_size=20),
    st.integers(0, 60),
    st.builds(Bounds, st.integers(3, 8), st.integers(1, 8), st.integers(1, 200)),
)
def test_batch_holds_the_first_within_bounds(waiting: list[tuple[int, int]], worth: int, most: Bounds) -> None:
    requests = [request(size, rows=rows) for size, rows in waiting]
    batch = sharing(requests, (own,), most, worth)
    assert batch[0] is requests[0]
    assert [one for one in requests if one in batch] == batch
    rows = sum(one.rows for one in batch)
    assert len(batch) == 1 or rows <= most.rows
    assert len(batch) <= most.requests
    assert len(batch) == 1 or rows * max(one.sizes[0] for one in batch) <= most.elements
    # Of equal sizes, and with room for it, none is overtaken.
    for number, one in enumerate(requests):
        if one not in batch:
            later = [each for each in requests[number + 1 :] if each.sizes == one.sizes and each in batch]
            assert all(each.rows < one.rows for each in later)


def test_nothing_is_filled_up_without_worth() -> None:
    assert shared([7, 8, 7, 6, 7], worth=0) == [7, 7, 7]


def test_close_sizes_share_and_others_dont() -> None:
    assert shared([100, 98, 10, 99, 11, 12], worth=20) == [100, 98, 99]
    assert shared([10, 98, 100, 99, 11, 12], worth=20) == [10, 11, 12]


def test_everything_shares_if_worth_much() -> None:
    assert shared([100, 98, 10, 99, 11, 12], worth=1_000) == [100, 98, 10, 99, 11, 12]


def test_only_the_first_different_sizes_share() -> None:
    """Large batches of samples, say, all differ; the event loop must not think about them for seconds."""
    assert shared([*range(1, 1_000), 3], worth=10**9) == [*range(1, 129), 3]


def test_sizes_count_as_what_they_are_filled_up_to() -> None:
    requests = [request(size) for size in (11, 20, 21, 12)]
    assert [one.sizes for one in sharing(requests, (upper_ten,), ANY, 0)] == [(11,), (20,), (12,)]


def test_full_batch_takes_the_first_ones() -> None:
    requests = [request(5) for _ in range(5)]
    assert sharing(requests, (own,), Bounds(3, 1000, sys.maxsize), 100) == requests[:3]


@pytest.mark.parametrize("worth", [0, 1_000])
def test_one_above_the_bounds_goes_alone(worth: float) -> None:
    assert shared([50, 50, 4], worth, Bounds(8, 8, 40)) == [50]


def test_height_and_width_are_filled_up_each() -> None:
    requests = [request(10, 20), request(20, 10), request(11, 20), request(10, 19)]
    assert sharing(requests, (own, own), ANY, 50) == [requests[0], requests[2], requests[3]]
    assert common_sizes((own, own), requests) == (20, 20)
