"""Where batches stop to grow, by what rows cost in batches of different sizes."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from paceline.scheduler.batch_queue import BatchQueue
from paceline.scheduler.growth import Growth
from paceline.scheduler.policy import BatchPolicy
from paceline.scheduler.request import AnyRequest, Request

MS = 1_000_000
Cost = Callable[[int], float]


def cached(rows: int) -> float:
    """In ms: rows cost least in batches of eight, and a third more in batches of 32."""
    return rows * {1: 1.1, 2: 1.05, 4: 1.02, 8: 1.0, 16: 1.15, 32: 1.35}[1 << (rows - 1).bit_length()]


def flat(rows: int) -> float:
    return rows


def fixed(rows: int) -> float:
    return 10 + rows


def drive(queue: BatchQueue[AnyRequest], cost: Cost, batches: int, now_ns: int = 1, noise: float = 0.0) -> list[int]:
    """The rows of as many batches, while more than enough wait. They end one after the other."""
    rows, dice = [], random.Random(3)
    for _ in range(batches):
        while queue.waiting.rows < 64:
            queue.push([Request(None, 1, "k", now_ns)])
        (batch,) = queue.poll(now_ns, 1).batches
        took_ns = int(cost(batch.rows) * MS * (1 + noise * dice.uniform(-1, 1)))
        now_ns += took_ns
        queue.done(batch, now_ns, took_ns)
        rows.append(batch.rows)
    return rows


def queue_of(**policy: object) -> BatchQueue[AnyRequest]:
    return BatchQueue(BatchPolicy(**{"max_batch_rows": 32, "grows_always": False, **policy}))  # type: ignore[arg-type]


@pytest.mark.parametrize("noise", [0.0, 0.2])
def test_batches_stop_at_the_cheapest_size(noise: float) -> None:
    rows = drive(queue_of(), cached, 400, noise=noise)
    assert Counter(rows[200:]).most_common(1)[0][0] == 8


@pytest.mark.parametrize("cost", [flat, fixed])
@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_batches_grow_where_rows_cost_no_more(cost: Cost, noise: float) -> None:
    rows = drive(queue_of(), cost, 400, noise=noise)
    assert rows.count(32) > 380


def test_bound_goes_when_the_cost_changes() -> None:
    queue = queue_of()
    drive(queue, cached, 400)
    rows = drive(queue, fixed, 2_000, now_ns=10**12)
    assert Counter(rows[1_000:]).most_common(1)[0][0] == 32


def test_slow_models_are_not_measured_for_ever() -> None:
    rows = drive(queue_of(), lambda rows: 1_000 * fixed(rows), 200)
    assert rows.count(32) > 170  # else a quarter is smaller


def test_asked_for_growth_never_stops() -> None:
    assert set(drive(queue_of(grows_always=True), cached, 200)) == {32}


@pytest.mark.parametrize("field", ["preferred_batch_rows", "batch_sizes"])
def test_configured_sizes_are_what_batches_stop_at(field: str) -> None:
    rows = drive(queue_of(**{field: (12, 24, 32)}), cached, 400)
    assert set(rows) <= {12, 24, 32}
    assert Counter(rows[200:]).most_common(1)[0][0] == 12


def test_bounds_are_by_key() -> None:
    growth = Growth()
    for number in range(40):
        for rows in (16, 32):
            growth.observe("a", rows, rows * rows, number)
            growth.observe("b", rows, 100 + rows, number)
    assert growth.bounds == [16]
    assert growth.most("b", 40) == 0
    assert growth.most("never seen", 40) == 0
