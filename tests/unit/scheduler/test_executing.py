"""When an instance is likely to be free, judged by executions in progress and measured times."""

from __future__ import annotations

import pytest

from paceline.scheduler.latency import Executing, LatencyModel
from paceline.scheduler.request import AnyRequest, Batch

MS = 1_000_000


@pytest.fixture
def latency() -> LatencyModel:
    """Batches of 4 rows take 10 ms, those of 1 row 4 ms."""
    latency = LatencyModel(4)
    for rows, duration_ms in ((4, 10), (1, 4)) * 3:
        latency.observe("k", rows, duration_ms * MS, 0)
    return latency


def begin(executing: Executing, key: str, rows: int, now_ns: int) -> Batch[AnyRequest]:
    return executing.begin((AnyRequest(None, rows, key),), rows, rows, now_ns)


def test_batches_are_numbered_from_1(latency: LatencyModel) -> None:
    executing = Executing(latency, 1, 4)
    assert [begin(executing, "k", 1, 0).number for _ in range(3)] == [1, 2, 3]


def test_first_end_is_that_of_the_batch_expected_to_end_first(latency: LatencyModel) -> None:
    executing = Executing(latency, 2, 4)
    assert executing.first_end_ns(7) == 7
    begin(executing, "k", 4, 0)
    assert executing.first_end_ns(0) == 10 * MS
    short = begin(executing, "k", 1, 5 * MS)
    assert executing.first_end_ns(5 * MS) == 9 * MS
    executing.end(short)
    executing.end(short)
    assert executing.first_end_ns(5 * MS) == 10 * MS


def test_execution_of_unknown_length_may_end_at_any_time(latency: LatencyModel) -> None:
    executing = Executing(latency, 1, 4)
    begin(executing, "never seen", 4, 3)
    assert executing.first_end_ns(5) == 3
    assert executing.least_wait_ns("never seen", 100, 5) == 0


@pytest.mark.parametrize(
    ("instances", "rows_before", "wait_ms"), [(1, 0, 10), (1, 3, 10), (1, 4, 20), (1, 9, 30), (2, 0, 0), (2, 9, 10)]
)
def test_least_wait_is_that_for_a_free_instance_and_the_full_batches_ahead(
    latency: LatencyModel, instances: int, rows_before: int, wait_ms: int
) -> None:
    executing = Executing(latency, instances, 4)
    begin(executing, "k", 4, 0)
    assert executing.least_wait_ns("k", rows_before, 0) == wait_ms * MS
