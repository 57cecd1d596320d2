"""Requests that differ in length, in batches of which only some numbers of rows are allowed or preferred."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.scheduler.lanes import Lane
from paceline.scheduler.latency import LatencyModel, cost_size
from paceline.scheduler.policy import BatchPolicy
from paceline.scheduler.request import AnyRequest, Request
from paceline.scheduler.sizing import Sizing

MS = 1_000_000


def own(size: int) -> int:
    return size


def sizing_of(policy: BatchPolicy) -> Sizing:
    """It knows: an execution takes 200 ms, and 1 ms for each element."""
    latency = LatencyModel(policy.max_batch_rows)
    for elements in (10, 1_000):
        for _ in range(9):
            latency.observe("k", cost_size(1, (elements,)), (200 + elements) * MS, 0)
    return Sizing(policy, latency)


def lane_of(sizes: Sequence[int]) -> Lane[AnyRequest]:
    lane: Lane[AnyRequest] = Lane("k")
    for number, size in enumerate(sizes):
        request: AnyRequest = Request(None, 1, "k", 1, sizes=(size,))
        request.order = number
        lane.add((request,))
    return lane


@pytest.mark.parametrize(("waiting", "rows"), [(5, 4), (7, 8)])
def test_allowed_size_is_where_a_row_costs_less(waiting: int, rows: int) -> None:
    sizing = sizing_of(BatchPolicy(8, lengths=(own,), batch_sizes=(1, 4, 8)))
    assert sizing.cut(lane_of([100] * waiting), waiting, 0).padded_rows == rows


def test_rows_of_padding_count_as_elements() -> None:
    sizing = sizing_of(BatchPolicy(8, lengths=(own,), batch_sizes=(1, 4, 8), max_batch_elements=700))
    cut = sizing.cut(lane_of([100] * 7), 7, 0)
    assert (cut.rows, cut.padded_rows, cut.sizes) == (4, 4, (100,))


def test_growth_stops_no_batch_below_preferred_rows() -> None:
    sizing = sizing_of(BatchPolicy(8, preferred_batch_rows=(4,), lengths=(own,), grows_always=False))
    for _ in range(40):
        for size, times in ((16, 1), (32, 2), (64, 3)):
            sizing.growth.observe("k", size, size * times * MS, 0)
    assert sizing.growth.bounds == [16]
    assert sizing.cut(lane_of([10] * 8), 8, 0).rows == 4
