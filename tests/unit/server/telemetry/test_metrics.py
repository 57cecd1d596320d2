"""Which metrics there are, under which names, and in which form a scraper reads them."""

from __future__ import annotations

import re
from types import SimpleNamespace

from prometheus_client.parser import text_string_to_metric_families

from paceline.scheduler.observer import Drop
from paceline.server.fronts.pool import FRONT_METRICS
from paceline.server.telemetry.metrics import Families, Metrics, VersionMetrics
from tests.harness import REPO
from tests.unit.server.counting import US, report, samples, version
from tests.unit.server.telemetry.shown import LABELS, metrics, model, value

__all__ = ["metrics", "model"]

# Written out again and not taken from the code: dashboards and autoscaling queries spell them this way.
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
TRITON_CACHE_COUNTERS = {
    "nv_cache_num_hits_per_model",
    "nv_cache_num_misses_per_model",
    "nv_cache_hit_duration_per_model",
    "nv_cache_miss_duration_per_model",
}
TRITON_GAUGES = {
    "nv_inference_pending_request_count",
    "nv_model_load_duration_secs",
    "nv_cpu_utilization",
    "nv_cpu_memory_total_bytes",
    "nv_cpu_memory_used_bytes",
}
TRITON_HISTOGRAM = "nv_inference_first_response_histogram_ms"
OURS = {
    "paceline_ready": "gauge",
    "paceline_failed_models": "gauge",
    "paceline_lost_log_lines": "counter",
    "paceline_open_requests": "gauge",
    "paceline_dropped_requests": "counter",
    "paceline_pending_requests": "gauge",
    "paceline_hung_executions": "counter",
    "paceline_lost_instances": "counter",
    "paceline_out_of_memory": "counter",
    "paceline_allowed_batch_rows": "gauge",
    "paceline_batch_growth_bound": "gauge",
    "paceline_slots": "gauge",
    "paceline_lanes": "gauge",
    "paceline_sequences": "gauge",
    "paceline_ended_sequences": "counter",
    "paceline_padding_rows": "counter",
    "paceline_padding_share": "gauge",
    "paceline_elements": "counter",
    "paceline_padding_elements": "counter",
    "paceline_padded_size": "histogram",
    "paceline_batch_rows": "histogram",
    "paceline_request_duration_us": "histogram",
    "paceline_queue_wait_us": "histogram",
    "paceline_execution_us": "histogram",
}
OF_LIMITS = {
    "paceline_limit": "gauge",
    "paceline_limit_used": "gauge",
    "paceline_limit_refusals": "counter",
    "paceline_refused_rpcs": "counter",
}
OF_FRONTS = {
    "paceline_frontends": "gauge",
    "paceline_frontend_restarts": "counter",
    "paceline_frontend_requests": "gauge",
    "paceline_frontend_memory_bytes": "gauge",
}
REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")


def types(metrics: Metrics) -> dict[str, str]:
    lines = metrics.text().decode().splitlines()
    return {line.split()[2]: line.split()[3] for line in lines if line.startswith("# TYPE")}


def test_all_triton_metrics_are_exposed_with_their_types(metrics: Metrics) -> None:
    found = {name: kind for name, kind in types(metrics).items() if name.startswith("nv_")}
    counters, gauges = dict.fromkeys(TRITON_COUNTERS, "counter"), dict.fromkeys(TRITON_GAUGES, "gauge")
    counters |= dict.fromkeys(TRITON_CACHE_COUNTERS, "counter")
    assert found == {**counters, **gauges, TRITON_HISTOGRAM: "histogram"}


def test_all_our_metrics_are_exposed_with_their_types(metrics: Metrics) -> None:
    assert {name: kind for name, kind in types(metrics).items() if name.startswith("paceline_")} == OURS


def test_process_metrics_are_those_of_every_python_service(metrics: Metrics) -> None:
    found = types(metrics)
    assert {name for name in found if not name.startswith(("nv_", "paceline_", "process_", "python_"))} == set()
    assert found["process_cpu_seconds_total"] == "counter"
    assert found["process_resident_memory_bytes"] == found["python_info"] == "gauge"
    assert value(metrics, "python_gc_collections_total", 'generation="0"') > 0


def test_model_counters_have_no_suffix(metrics: Metrics, model: VersionMetrics) -> None:
    assert not re.search(r"(nv_inference|paceline)_\w*_(total|created)\b", metrics.text().decode())


def test_text_is_read_by_the_librarys_parser(metrics: Metrics, model: VersionMetrics) -> None:
    model.statistics.on_batch(report(3, [1, 2]))
    model.statistics.on_success(7_000_000 * US)
    families = {family.name: family for family in text_string_to_metric_families(metrics.text().decode())}
    assert {name: families[name].type for name in OURS} == OURS
    # The parser, too, assumes that counters end in `_total`.
    read = {
        (one.name, *sorted(one.labels.items())): one.value for family in families.values() for one in family.samples
    }
    labels = (("model", "m"), ("version", "3"))
    assert read["nv_inference_request_duration_us_total", *labels] == 7_000_000
    assert read["paceline_batch_rows_bucket", ("le", "4.0"), *labels] == 1
    assert all(families[name].documentation for name in (*OURS, *TRITON_COUNTERS, *TRITON_GAUGES))


def test_labels_are_in_tritons_order(metrics: Metrics, model: VersionMetrics) -> None:
    text = metrics.text().decode()
    assert 'nv_inference_request_success{model="m",version="3"} 0\n' in text
    assert 'nv_inference_request_failure{model="m",reason="REJECTED",version="3"} 0\n' in text


def test_counters_of_any_size_are_written_in_digits(metrics: Metrics, model: VersionMetrics) -> None:
    model.statistics.on_success(123_456_789_012 * US)
    assert 'nv_inference_request_duration_us{model="m",version="3"} 123456789012\n' in metrics.text().decode()


def test_label_values_are_escaped(metrics: Metrics) -> None:
    metrics.add(version('a"b\\c\nd', "1"))
    assert 'nv_inference_count{model="a\\"b\\\\c\\nd",version="1"} 0\n' in metrics.text().decode()


def test_tags_become_labels_and_models_with_other_tags_share_the_family(metrics: Metrics) -> None:
    metrics.add(version("m", "1", tags={"team": "blue", "0": "x"}))
    metrics.add(version("n", "1", tags={"site": "b"}))
    metrics.add(version("o", "1"))
    text = metrics.text().decode()
    assert 'nv_inference_count{_0="x",_team="blue",model="m",version="1"} 0\n' in text
    assert 'nv_inference_count{_site="b",model="n",version="1"} 0\n' in text
    assert 'nv_inference_count{model="o",version="1"} 0\n' in text
    assert 'paceline_batch_rows_bucket{_site="b",le="1.0",model="n",version="1"} 0\n' in text
    assert text.count("# TYPE nv_inference_count ") == 1
    series = [line for line in text.splitlines() if 'model="m"' in line]
    assert series
    assert all('_0="x",_team="blue",' in line for line in series)


OF_GPUS = {
    "nv_gpu_utilization",
    "nv_gpu_memory_total_bytes",
    "nv_gpu_memory_used_bytes",
    "nv_gpu_power_usage",
    "nv_gpu_power_limit",
    "nv_energy_consumption",
}


def test_docs_name_all_metrics_and_no_others(metrics: Metrics) -> None:
    told = set(re.findall(r"`((?:nv|paceline)_\w+)`", (REPO / "docs" / "metrics.md").read_text(encoding="utf-8")))
    triton = {*TRITON_COUNTERS, *TRITON_CACHE_COUNTERS, *TRITON_GAUGES, TRITON_HISTOGRAM}
    assert told == {*OURS, *OF_LIMITS, *OF_FRONTS, *OF_GPUS, *triton}


def test_metrics_of_fronts_are_exposed_where_there_are_fronts(metrics: Metrics) -> None:
    sessions = [
        SimpleNamespace(requests=each, link=SimpleNamespace(seen_bytes=each + 1, used_bytes=each + 3))
        for each in (2, 3)
    ]
    fronts = SimpleNamespace(running=2, restarts=3, sessions=sessions)
    metrics.add_collector(Families(FRONT_METRICS, lambda: [({}, fronts)]))
    found = {name: kind for name, kind in types(metrics).items() if name.startswith("paceline_")}
    assert found == {**OURS, **OF_FRONTS}
    seen = samples(metrics)
    assert [seen[f"paceline_frontend{name}"] for name in ("s", "_restarts", "_requests")] == [2, 3, 5]
    assert [value(metrics, "paceline_frontend_memory_bytes", f'direction="{way}"') for way in ("in", "out")] == [7, 11]


def test_new_model_has_every_series_at_zero(metrics: Metrics, model: VersionMetrics) -> None:
    found = samples(metrics)
    mine = {name: number for name, number in found.items() if 'model="m"' in name}
    for reason in REASONS:
        assert f'nv_inference_request_failure{{model="m",reason="{reason}",version="3"}}' in mine
    for drop in Drop:
        assert f'paceline_dropped_requests{{model="m",reason="{drop.value}",version="3"}}' in mine
    for name in TRITON_COUNTERS - {"nv_inference_request_failure"} | {"nv_inference_pending_request_count"}:
        assert f"{name}{{{LABELS}}}" in mine
    for name in ("hung_executions", "lost_instances", "out_of_memory", "padding_rows"):
        assert f"paceline_{name}{{{LABELS}}}" in mine
    for name in ("batch_rows", "request_duration_us", "queue_wait_us"):
        assert f"paceline_{name}_count{{{LABELS}}}" in mine
    assert set(mine.values()) == {0}
