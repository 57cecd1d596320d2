"""The numbers behind ModelStatistics and the metrics, after reports that are known to the nanosecond."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import pytest

from paceline.backends.errors import ExecutionError, InstanceError, OutOfMemory
from paceline.scheduler.errors import (
    BatcherClosed,
    DeadlineUnreachable,
    ExecutionFailed,
    NoInstance,
    QueueFull,
    QueueTimeout,
    RequestTooLarge,
)
from paceline.server.errors import AnswerTooLarge, InvalidRequest, ModelNotReady, NotSupported
from paceline.server.rpc.model_rpcs import statistics_message
from paceline.server.telemetry.model_statistics import (
    DURATION_BOUNDS_NS,
    DurationHistogram,
    FailureReason,
    VersionStatistics,
    reason_of,
)
from tests.unit.server.counting import US, report


@pytest.fixture
def statistics() -> VersionStatistics:
    return VersionStatistics()


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (QueueFull(1), "REJECTED"),
        (QueueTimeout(1), "REJECTED"),
        (DeadlineUnreachable(1, 2), "REJECTED"),
        (BatcherClosed(), "REJECTED"),
        (ModelNotReady("stopping"), "REJECTED"),
        (asyncio.CancelledError(), "CANCELED"),
        (ExecutionFailed("x"), "BACKEND"),
        (ExecutionError("x"), "BACKEND"),
        (InstanceError("x"), "BACKEND"),
        (NoInstance(), "BACKEND"),
        (AnswerTooLarge("m"), "BACKEND"),
        (InvalidRequest("x"), "OTHER"),
        (NotSupported("x"), "OTHER"),
        (RequestTooLarge(2, 1), "OTHER"),
        (KeyError("x"), "OTHER"),
        (KeyboardInterrupt(), "OTHER"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, BaseException) else "",
)
def test_failure_counts_under_the_reason_of_its_error_with_its_time(
    statistics: VersionStatistics, error: BaseException, reason: str
) -> None:
    assert reason_of(error).value == reason
    statistics.on_failure(error, 7)
    assert statistics.failures == {**dict.fromkeys(FailureReason, 0), FailureReason(reason): 1}
    assert (statistics.failed, statistics.failure_ns, statistics.requests.count) == (1, 7, 0)


@pytest.mark.parametrize("bound", range(len(DURATION_BOUNDS_NS)))
def test_duration_at_a_bound_is_in_its_bucket_and_beyond_it_in_the_next(bound: int) -> None:
    histogram = DurationHistogram()
    histogram.add(DURATION_BOUNDS_NS[bound])
    histogram.add_all([DURATION_BOUNDS_NS[bound] + 1, DURATION_BOUNDS_NS[bound] + 1])
    assert histogram.counts[bound : bound + 2] == [1, 2]
    assert histogram.count == 3
    assert histogram.total_ns == 3 * DURATION_BOUNDS_NS[bound] + 2


def test_failed_batch_counts_no_execution(statistics: VersionStatistics) -> None:
    statistics.on_batch(report(3, [], failed=3))
    assert (statistics.execution_count, statistics.rows, statistics.queue.count) == (0, 0, 0)
    assert statistics.last_inference_ms == 0


def test_batch_of_which_nothing_ran_counts_no_execution(statistics: VersionStatistics) -> None:
    whole = report(3, [])
    statistics.on_batch(whole._replace(execution=replace(whole.execution, ran=False)))
    assert (statistics.execution_count, statistics.rows, statistics.last_inference_ms) == (0, 0, 0)


@pytest.mark.parametrize(
    ("error", "shortages"), [(OutOfMemory("x"), 1), (MemoryError(), 1), (ExecutionError("x"), 0), (ValueError(), 0)]
)
def test_only_a_batch_that_ran_out_of_memory_counts_as_a_shortage(
    statistics: VersionStatistics, error: Exception, shortages: int
) -> None:
    statistics.on_batch(report(3, [], failed=3)._replace(error=error))
    assert statistics.shortages == shortages


def test_merge_adds_up_each_number() -> None:
    one, other = VersionStatistics(), VersionStatistics()
    numbers = [name for name, value in vars(one).items() if type(value) is int and name != "last_inference_ms"]
    for index, name in enumerate(numbers, 1):
        setattr(one, name, index)
        setattr(other, name, 100 * index)
    one.merge(other)
    assert [getattr(one, name) for name in numbers] == [101 * index for index in range(1, len(numbers) + 1)]


def test_batch_with_cancelled_requests_counts_their_rows_but_not_their_times(statistics: VersionStatistics) -> None:
    statistics.on_batch(report(5, [10], infer_us=3, cancelled=2))
    assert (statistics.execution_count, statistics.rows) == (1, 5)
    assert (statistics.queue.count, statistics.queue.total_ns, statistics.infer_ns) == (1, 10 * US, 3 * US)
    assert statistics.batches[5].infer_ns == 3 * US


def test_last_inference_is_the_wall_clock_time_of_the_last_batch(statistics: VersionStatistics) -> None:
    before_ms = time.time_ns() // 1_000_000
    statistics.on_batch(report(1, [0]))
    assert before_ms <= statistics.last_inference_ms <= time.time_ns() // 1_000_000


def test_message_of_a_new_version_has_only_zeros_and_no_batches(statistics: VersionStatistics) -> None:
    message = statistics_message("m", "3", statistics)
    assert (message.name, message.version, message.last_inference) == ("m", "3", 0)
    assert (message.inference_count, message.execution_count) == (0, 0)
    assert {field.name for field, _ in message.inference_stats.ListFields()} == {
        "success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss",
    }  # fmt: skip
    assert all((one.count, one.ns) == (0, 0) for _, one in message.inference_stats.ListFields())
    assert not message.batch_stats
    assert not message.response_stats
    assert not message.memory_usage


def test_message_counts_a_batchs_times_for_each_request_and_once_for_its_size(statistics: VersionStatistics) -> None:
    statistics.on_batch(report(8, [4, 5], input_us=1, infer_us=10, output_us=2))
    statistics.on_batch(report(2, [6], padded_rows=4, input_us=3, infer_us=20, output_us=5))
    statistics.on_batch(report(8, [0], input_us=1, infer_us=30, output_us=1))
    for duration_us in (17, 18, 40, 32):
        statistics.on_success(duration_us * US)
    statistics.on_failure(InvalidRequest("x"), 9 * US)
    message = statistics_message("m", "3", statistics)
    assert (message.inference_count, message.execution_count) == (18, 3)
    found = {field.name: (one.count, one.ns // US) for field, one in message.inference_stats.ListFields()}
    assert found == {
        "success": (4, 107),
        "fail": (1, 9),
        "queue": (4, 15),
        "compute_input": (4, 2 * 1 + 3 + 1),
        "compute_infer": (4, 2 * 10 + 20 + 30),
        "compute_output": (4, 2 * 2 + 5 + 1),
        "cache_hit": (0, 0),
        "cache_miss": (0, 0),
    }
    sizes = [
        (one.batch_size, one.compute_infer.count, one.compute_input.ns // US, one.compute_infer.ns // US)
        for one in message.batch_stats
    ]
    assert sizes == [(2, 1, 3, 20), (8, 2, 2, 40)]
    assert [(one.compute_output.count, one.compute_output.ns // US) for one in message.batch_stats] == [(1, 5), (2, 3)]
