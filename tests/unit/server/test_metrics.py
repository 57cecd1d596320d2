"""What the metrics say after traffic that is known to the last nanosecond, under which names."""

from __future__ import annotations

import pytest

from backends.base import Execution
from scheduler.observer import BatchReport, Drop
from server.metrics import Metrics, ModelMetrics

# Written out once more, not taken from the code: dashboards and autoscaling queries spell them so.
TRITON_COUNTERS = {
    "nv_inference_request_success",
    "nv_inference_request_failure",
    "nv_inference_count",
    "nv_inference_exec_count",
    "nv_inference_request_duration_us",
    "nv_inference_queue_duration_us",
    "nv_inference_compute_input_duration_us",
    "nv_inference_compute_infer_duration_us",
    "nv_inference_compute_output_duration_us",
}
TRITON_GAUGES = {"nv_inference_pending_request_count"}
US = 1_000


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def model(metrics: Metrics) -> ModelMetrics:
    return metrics.model("m", "3")


def samples(metrics: Metrics) -> dict[str, float]:
    lines = (line.rsplit(" ", 1) for line in metrics.text().decode().splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}


def value(metrics: Metrics, name: str, labels: str = 'model="m",version="3"') -> float:
    return samples(metrics)[f"{name}{{{labels}}}"]


def types(metrics: Metrics) -> dict[str, str]:
    lines = metrics.text().decode().splitlines()
    return {line.split()[2]: line.split()[3] for line in lines if line.startswith("# TYPE")}


def report(
    rows: int, waits_us: list[int], *, input_us: int = 0, infer_us: int = 0, output_us: int = 0, error: bool = False
) -> BatchReport:
    total_ns = (input_us + infer_us + output_us) * US
    executed = None if error else Execution([()] * len(waits_us), input_us * US, infer_us * US, output_us * US)
    failure = RuntimeError("x") if error else None
    failed = len(waits_us) if error else 0
    return BatchReport(rows, rows, [wait * US for wait in waits_us], 5, 5 + total_ns, executed, failure, failed)


def test_names_of_triton_are_all_there_with_their_types(metrics: Metrics) -> None:
    found = types(metrics)
    counters = {name for name, kind in found.items() if kind == "counter"}
    assert {name for name in counters if name.startswith("nv_")} == TRITON_COUNTERS
    assert {name for name, kind in found.items() if kind == "gauge" and name.startswith("nv_")} == TRITON_GAUGES


def test_names_that_triton_lacks_begin_with_ours(metrics: Metrics) -> None:
    assert {name for name in types(metrics) if not name.startswith("paceline_")} == TRITON_COUNTERS | TRITON_GAUGES


def test_names_of_counters_have_no_suffix(metrics: Metrics, model: ModelMetrics) -> None:
    assert "_total" not in metrics.text().decode()


def test_labels_come_in_tritons_order(metrics: Metrics, model: ModelMetrics) -> None:
    text = metrics.text().decode()
    assert 'nv_inference_request_success{model="m",version="3"} 0' in text
    assert 'nv_inference_request_failure{model="m",reason="REJECTED",version="3"} 0' in text


def test_new_model_has_every_series_at_zero(metrics: Metrics, model: ModelMetrics) -> None:
    found = samples(metrics)
    for reason in ("REJECTED", "CANCELED", "BACKEND", "OTHER"):
        assert found[f'nv_inference_request_failure{{model="m",reason="{reason}",version="3"}}'] == 0
    for name in TRITON_COUNTERS - {"nv_inference_request_failure"} | TRITON_GAUGES:
        assert found[f'{name}{{model="m",version="3"}}'] == 0


def test_batch_adds_requests_rows_one_execution_and_times_per_request(metrics: Metrics, model: ModelMetrics) -> None:
    model.on_batch(report(5, [100, 50, 0], input_us=1, infer_us=20, output_us=2))
    model.on_batch(report(2, [10], input_us=3, infer_us=30, output_us=4))
    expected = {
        "nv_inference_request_success": 4,
        "nv_inference_count": 7,
        "nv_inference_exec_count": 2,
        "nv_inference_queue_duration_us": 160,
        "nv_inference_compute_input_duration_us": 3 * 1 + 3,
        "nv_inference_compute_infer_duration_us": 3 * 20 + 30,
        "nv_inference_compute_output_duration_us": 3 * 2 + 4,
        "nv_inference_request_duration_us": 150 + 3 * 23 + 10 + 37,
        "paceline_batch_rows_count": 2,
        "paceline_batch_rows_sum": 7,
        "paceline_queue_wait_us_count": 4,
        "paceline_queue_wait_us_sum": 160,
    }
    assert {name: value(metrics, name) for name in expected} == expected


@pytest.mark.parametrize(("rows", "bucket", "below"), [(1, "1.0", "+Inf"), (8, "8.0", "4.0"), (9, "16.0", "8.0")])
def test_batch_rows_fall_into_the_bucket_of_their_size(
    metrics: Metrics, model: ModelMetrics, rows: int, bucket: str, below: str
) -> None:
    model.on_batch(report(rows, [0]))
    assert value(metrics, "paceline_batch_rows_bucket", f'le="{bucket}",model="m",version="3"') == 1
    if below != "+Inf":
        assert value(metrics, "paceline_batch_rows_bucket", f'le="{below}",model="m",version="3"') == 0


def test_failed_batch_counts_its_requests_as_failed_by_the_backend_and_nothing_else(
    metrics: Metrics, model: ModelMetrics
) -> None:
    before = samples(metrics)
    model.on_batch(report(5, [1, 2, 3], error=True))
    failed = 'nv_inference_request_failure{model="m",reason="BACKEND",version="3"}'
    after = samples(metrics)
    assert after.pop(failed) - before.pop(failed) == 3
    assert after == before


@pytest.mark.parametrize(
    ("drop", "reason"), [(Drop.FULL_REQUESTS, "REJECTED"), (Drop.EXPIRED, "REJECTED"), (Drop.CANCELLED, "CANCELED")]
)
def test_dropped_request_counts_as_failed_with_tritons_reason(
    metrics: Metrics, model: ModelMetrics, drop: Drop, reason: str
) -> None:
    model.on_drop(drop)
    assert value(metrics, "nv_inference_request_failure", f'model="m",reason="{reason}",version="3"') == 1


def test_every_kind_of_drop_has_a_reason(metrics: Metrics, model: ModelMetrics) -> None:
    for drop in Drop:
        model.on_drop(drop)
    failures = [number for name, number in samples(metrics).items() if "request_failure" in name]
    assert sum(failures) == len(Drop)


def test_gauges_are_read_when_somebody_asks(metrics: Metrics, model: ModelMetrics) -> None:
    waiting = [3]
    model.watch(lambda: waiting[0], lambda: 2)
    assert value(metrics, "nv_inference_pending_request_count") == 3
    assert value(metrics, "paceline_lanes") == 2
    waiting[0] = 0
    assert value(metrics, "nv_inference_pending_request_count") == 0


def test_models_and_versions_are_counted_apart(metrics: Metrics, model: ModelMetrics) -> None:
    metrics.model("m", "4").on_batch(report(2, [0]))
    metrics.model("n", "3").on_batch(report(5, [0]))
    rows = [
        value(metrics, "nv_inference_count", f'model="{name}",version="{version}"')
        for name, version in (("m", "3"), ("m", "4"), ("n", "3"))
    ]
    assert rows == [0, 2, 5]


def test_label_values_are_escaped(metrics: Metrics) -> None:
    metrics.model('a"b\\c\nd', "1")
    assert 'nv_inference_count{model="a\\"b\\\\c\\nd",version="1"} 0' in metrics.text().decode()


def test_two_servers_in_one_process_count_apart(model: ModelMetrics, metrics: Metrics) -> None:
    other = Metrics()
    other.model("m", "3").on_batch(report(1, [0]))
    assert value(metrics, "nv_inference_count") == 0
