"""Statistics against a recount of the whole history of reported events."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from paceline.backends.base import Execution
from paceline.scheduler.errors import ExecutionFailed, QueueFull
from paceline.scheduler.observer import BatchReport, Drop
from paceline.server.errors import InvalidRequest
from paceline.server.rpc.model_rpcs import statistics_message
from paceline.server.telemetry.metrics import Metrics, VersionMetrics
from paceline.server.telemetry.model_statistics import VersionStatistics
from tests.unit.server.counting import Gauges, samples

ERRORS = {
    "REJECTED": QueueFull(1),
    "CANCELED": asyncio.CancelledError(),
    "BACKEND": ExecutionFailed("x"),
    "OTHER": InvalidRequest("x"),
}


@dataclass(frozen=True)
class Success:
    ns: int


@dataclass(frozen=True)
class Failure:
    reason: str
    ns: int


Event = Success | Failure | Drop | BatchReport

durations = st.integers(0, 2 * 10**10)


@st.composite
def batches(draw: st.DrawFn) -> BatchReport:
    waits = draw(st.lists(durations, max_size=6))
    cancelled = draw(st.integers(0, 3))
    rows = max(1, len(waits) + cancelled) + draw(st.integers(0, 40))
    padded = rows + draw(st.integers(0, 8))
    started, took = draw(durations), draw(durations)
    if draw(st.booleans()):
        return BatchReport(rows, padded, [], started, started + took, None, ValueError("x"), len(waits), cancelled)
    execution = Execution([()] * len(waits), draw(durations), draw(durations), draw(durations))
    return BatchReport(rows, padded, waits, started, started + took, execution, None, 0, cancelled)


events: st.SearchStrategy[list[Event]] = st.lists(
    st.one_of(
        st.builds(Success, durations),
        st.builds(Failure, st.sampled_from(list(ERRORS)), durations),
        st.sampled_from(Drop),
        batches(),
    ),
    max_size=30,
)


def played(history: Sequence[Event]) -> VersionStatistics:
    statistics = VersionStatistics()
    for event in history:
        match event:
            case Success():
                statistics.on_success(event.ns)
            case Failure():
                statistics.on_failure(ERRORS[event.reason], event.ns)
            case Drop():
                statistics.on_drop(event)
            case _:
                statistics.on_batch(event)
    return statistics


def executed(history: Sequence[Event]) -> list[BatchReport]:
    return [event for event in history if isinstance(event, BatchReport) and event.error is None]


@given(events)
def test_statistics_message_equals_a_recount_of_the_history(history: list[Event]) -> None:
    message = statistics_message("m", "1", played(history))
    done = executed(history)
    waits = [wait for batch in done for wait in batch.waits_ns]
    successes = [event.ns for event in history if isinstance(event, Success)]
    failures = [event.ns for event in history if isinstance(event, Failure)]
    assert message.inference_count == sum(batch.rows for batch in done)
    assert message.execution_count == len(done)
    found = {field.name: (one.count, one.ns) for field, one in message.inference_stats.ListFields()}
    assert found == {
        "success": (len(successes), sum(successes)),
        "fail": (len(failures), sum(failures)),
        "queue": (len(waits), sum(waits)),
        "compute_input": (len(waits), sum(len(batch.waits_ns) * batch.execution.input_ns for batch in done)),
        "compute_infer": (len(waits), sum(len(batch.waits_ns) * batch.execution.infer_ns for batch in done)),
        "compute_output": (len(waits), sum(len(batch.waits_ns) * batch.execution.output_ns for batch in done)),
        "cache_hit": (0, 0),
        "cache_miss": (0, 0),
    }
    by_rows = [(one.batch_size, one.compute_infer.count, one.compute_infer.ns) for one in message.batch_stats]
    assert by_rows == [
        (rows, count, sum(batch.execution.infer_ns for batch in done if batch.rows == rows))
        for rows, count in sorted(Counter(batch.rows for batch in done).items())
    ]


@given(events)
def test_metrics_agree_with_the_message_and_the_history(history: list[Event]) -> None:
    statistics, metrics = played(history), Metrics()
    metrics.add(VersionMetrics("m", "1", statistics, Gauges()))
    found, message = samples(metrics), statistics_message("m", "1", statistics)

    def value(name: str, labels: str = 'model="m",version="1"') -> float:
        return found[f"{name}{{{labels}}}"]

    stats = message.inference_stats
    assert value("nv_inference_request_success") == stats.success.count
    assert value("nv_inference_request_duration_us") == stats.success.ns // 1_000
    assert value("nv_inference_count") == message.inference_count
    assert value("nv_inference_exec_count") == message.execution_count
    for name in ("queue", "compute_input", "compute_infer", "compute_output"):
        assert value(f"nv_inference_{name}_duration_us") == getattr(stats, name).ns // 1_000
    reasons = {one: value("nv_inference_request_failure", f'model="m",reason="{one}",version="1"') for one in ERRORS}
    told = Counter(event.reason for event in history if isinstance(event, Failure))
    assert reasons == {reason: told[reason] for reason in ERRORS}
    done = executed(history)
    assert value("paceline_padding_rows") == sum(batch.padded_rows - batch.rows for batch in done)
    for name, numbers, scale in (
        ("paceline_batch_rows", [batch.rows for batch in done], 1),
        ("paceline_queue_wait_us", [wait for batch in done for wait in batch.waits_ns], 1_000),
        ("paceline_request_duration_us", [event.ns for event in history if isinstance(event, Success)], 1_000),
    ):
        buckets = [key for key in found if key.startswith(f"{name}_bucket")]
        for key in buckets:
            bound = float(key.partition('le="')[2].partition('"')[0])
            assert found[key] == sum(number <= bound * scale for number in numbers)
        assert found[f'{name}_count{{model="m",version="1"}}'] == len(numbers)
    executions = sum(number for key, number in found.items() if key.startswith("paceline_execution_us_count"))
    assert executions == len(done)
