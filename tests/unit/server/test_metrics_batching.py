"""What the batcher reports, as a scraper reads it: each request in exactly one counter."""

from __future__ import annotations

import pytest

from backends.base import Execution
from scheduler.observer import BatchReport, Drop
from server.metrics import Metrics, ModelMetrics

LABELS = 'model="m",version="1"'
REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")


def samples(metrics: Metrics) -> dict[str, float]:
    lines = (line.rsplit(" ", 1) for line in metrics.text().decode().splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def observer(metrics: Metrics) -> ModelMetrics:
    return metrics.model("m", "1")


def report(
    rows: int = 3, padded_rows: int = 3, requests: int = 2, error: Exception | None = None, failed: int = 0
) -> BatchReport:
    execution = None if error else Execution([()] * requests, input_ns=1_000, infer_ns=2_000, output_ns=3_000)
    return BatchReport(rows, padded_rows, [5_000] * requests, 10_000, 20_000, execution, error, failed)


def test_metrics_of_a_new_model_are_all_there_and_zero(metrics: Metrics, observer: ModelMetrics) -> None:
    observer.watch(lambda: 0, lambda: 0)
    read = samples(metrics)
    for reason in REASONS:
        assert read[f'nv_inference_request_failure{{model="m",reason="{reason}",version="1"}}'] == 0
    for drop in Drop:
        assert read[f'paceline_dropped_requests{{model="m",reason="{drop.value}",version="1"}}'] == 0
    assert read[f"paceline_padding_rows{{{LABELS}}}"] == 0
    assert not any(value for name, value in read.items() if "_created" not in name)


@pytest.mark.parametrize(
    ("drop", "reason"),
    [
        (Drop.FULL_REQUESTS, "REJECTED"),
        (Drop.EXPIRED, "REJECTED"),
        (Drop.UNREACHABLE, "REJECTED"),
        (Drop.CANCELLED, "CANCELED"),
    ],
)
def test_dropped_request_is_counted_under_tritons_reason_and_under_its_own(
    metrics: Metrics, observer: ModelMetrics, drop: Drop, reason: str
) -> None:
    observer.on_drop(drop)
    read = samples(metrics)
    failures = {one: read[f'nv_inference_request_failure{{model="m",reason="{one}",version="1"}}'] for one in REASONS}
    assert failures == {**dict.fromkeys(REASONS, 0), reason: 1}
    drops = {one: read[f'paceline_dropped_requests{{model="m",reason="{one.value}",version="1"}}'] for one in Drop}
    assert drops == {**dict.fromkeys(Drop, 0), drop: 1}


def test_executed_batch_is_counted_in_rows_requests_and_time(metrics: Metrics, observer: ModelMetrics) -> None:
    observer.on_batch(report(rows=3, padded_rows=8, requests=2))
    read = samples(metrics)
    expected = {
        "nv_inference_request_success": 2,
        "nv_inference_count": 3,
        "nv_inference_exec_count": 1,
        "nv_inference_queue_duration_us": 10,
        "nv_inference_request_duration_us": 30,
        "nv_inference_compute_input_duration_us": 2,
        "nv_inference_compute_infer_duration_us": 4,
        "nv_inference_compute_output_duration_us": 6,
        "paceline_padding_rows": 5,
        "paceline_batch_rows_sum": 3,
        "paceline_batch_rows_count": 1,
        "paceline_queue_wait_us_count": 2,
    }
    assert {name: read[f"{name}{{{LABELS}}}"] for name in expected} == expected


@pytest.mark.parametrize("failed", [0, 2])
def test_failed_batch_counts_only_the_requests_that_failed_for_good(
    metrics: Metrics, observer: ModelMetrics, failed: int
) -> None:
    observer.on_batch(report(error=ValueError("x"), failed=failed))
    read = samples(metrics)
    assert read['nv_inference_request_failure{model="m",reason="BACKEND",version="1"}'] == failed
    assert read[f"nv_inference_exec_count{{{LABELS}}}"] == read[f"nv_inference_count{{{LABELS}}}"] == 0


def test_counters_are_typed_as_counters_and_gauges_as_gauges(metrics: Metrics, observer: ModelMetrics) -> None:
    text = metrics.text().decode()
    for name in ("paceline_dropped_requests", "paceline_padding_rows", "nv_inference_count"):
        assert f"# TYPE {name} counter\n" in text
    assert "# TYPE nv_inference_pending_request_count gauge\n" in text


def test_gauges_ask_the_batcher_when_somebody_asks_them(metrics: Metrics, observer: ModelMetrics) -> None:
    waiting = [0]
    observer.watch(lambda: waiting[0], lambda: 2)
    waiting[0] = 7
    read = samples(metrics)
    assert read[f"nv_inference_pending_request_count{{{LABELS}}}"] == 7
    assert read[f"paceline_lanes{{{LABELS}}}"] == 2
