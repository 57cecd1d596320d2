"""What a scraper reads after traffic that is known to the nanosecond, of which models."""

from __future__ import annotations

import re
import weakref
from collections import Counter
from dataclasses import replace

import pytest

from paceline.scheduler.errors import ExecutionFailed
from paceline.scheduler.observer import Drop
from paceline.scheduler.sequence import SequenceEnd
from paceline.server.errors import InvalidRequest
from paceline.server.rpc.model_rpcs import statistics_message
from paceline.server.telemetry.metrics import Metrics, VersionMetrics
from paceline.server.telemetry.model_statistics import VersionStatistics
from tests.unit.server.counting import US, Gauges, SequenceCounts, report, samples, version
from tests.unit.server.telemetry.shown import LABELS, metrics, model, value

__all__ = ["metrics", "model"]


def test_models_and_versions_are_counted_separately(metrics: Metrics, model: VersionMetrics) -> None:
    for shown, rows in ((version("m", "4"), 2), (version("n", "3"), 5)):
        metrics.add(shown)
        shown.statistics.on_batch(report(rows, [0]))
    read = [
        value(metrics, "nv_inference_count", f'model="{name}",version="{number}"')
        for name, number in (("m", "3"), ("m", "4"), ("n", "3"))
    ]
    assert read == [0, 2, 5]


def test_two_servers_in_one_process_count_separately(metrics: Metrics, model: VersionMetrics) -> None:
    other = version()
    Metrics().add(other)
    other.statistics.on_batch(report(1, [0]))
    assert value(metrics, "nv_inference_count") == 0


def test_removed_version_leaves_no_series_and_does_not_affect_others(metrics: Metrics, model: VersionMetrics) -> None:
    other = version("m", "4")
    metrics.add(other)
    metrics.remove(model)
    text = metrics.text().decode()
    assert 'version="3"' not in text
    assert 'nv_inference_count{model="m",version="4"} 0\n' in text
    metrics.remove(model)


def test_version_loaded_again_keeps_counting_with_what_the_old_one_still_answers(
    metrics: Metrics, model: VersionMetrics
) -> None:
    model.statistics.on_batch(report(5, [0]))
    anew = version()
    metrics.add(anew)
    assert value(metrics, "nv_inference_count") == 5
    model.statistics.on_batch(report(3, [0]))
    anew.statistics.on_batch(report(2, [0]))
    metrics.remove(model)
    # The last of its requests are counted after it was removed.
    model.statistics.on_success(1_000)
    model.statistics.on_failure(ExecutionFailed("broken"), 2_000)
    assert value(metrics, "nv_inference_count") == 10
    assert value(metrics, "nv_inference_exec_count") == 3
    assert value(metrics, "nv_inference_request_success") == 1
    assert value(metrics, "nv_inference_request_failure", 'model="m",reason="BACKEND",version="3"') == 1
    assert value(metrics, "paceline_batch_rows_count") == 3


def test_version_loaded_repeatedly_keeps_only_the_sum(metrics: Metrics) -> None:
    first = version()
    metrics.add(first)
    forgotten, shown = weakref.ref(first.statistics), first
    first.statistics.on_batch(report(1, [0]))
    for _ in range(5):
        anew = version()
        metrics.add(anew)
        anew.statistics.on_batch(report(1, [0]))
        metrics.remove(shown)
        shown = anew
    del first
    assert forgotten() is None
    assert value(metrics, "nv_inference_count") == 6


def test_version_unloaded_and_loaded_starts_at_zero_whatever_the_old_one_still_answers(
    metrics: Metrics, model: VersionMetrics
) -> None:
    anew = version()
    metrics.add(anew)
    metrics.remove(anew)
    assert 'version="3"' not in metrics.text().decode()
    metrics.add(version())
    model.statistics.on_batch(report(5, [0]))
    metrics.remove(model)
    assert value(metrics, "nv_inference_count") == 0


def test_merged_statistics_include_all_that_they_count() -> None:
    """Checked by the series themselves, so that no number is left out."""
    one, total = version(), VersionStatistics()
    one.statistics.on_batch(report(2, [10, 20], padded_rows=4, input_us=3, infer_us=30, output_us=4))
    one.statistics.on_batch(report(5, [7]))
    one.statistics.on_success(5_000)
    one.statistics.on_failure(ExecutionFailed("broken"), 2_000)
    one.statistics.on_drop(Drop.CLOSED)
    one.statistics.hung_executions = 2
    total.merge(one.statistics)
    assert statistics_message("m", "3", total) == statistics_message("m", "3", one.statistics)
    alone, merged = Metrics(), Metrics()
    alone.add(one)
    merged.add(replace(one, statistics=total))
    expected = {name: count for name, count in samples(alone).items() if LABELS in name}
    assert {name: count for name, count in samples(merged).items() if LABELS in name} == expected


def test_batch_adds_rows_one_execution_and_times_per_request(metrics: Metrics, model: VersionMetrics) -> None:
    model.statistics.on_batch(report(5, [100, 50, 0], input_us=1, infer_us=20, output_us=2))
    model.statistics.on_batch(report(2, [10], padded_rows=4, input_us=3, infer_us=30, output_us=4))
    expected = {
        "nv_inference_count": 7,
        "nv_inference_exec_count": 2,
        "nv_inference_queue_duration_us": 160,
        "nv_inference_compute_input_duration_us": 3 * 1 + 3,
        "nv_inference_compute_infer_duration_us": 3 * 20 + 30,
        "nv_inference_compute_output_duration_us": 3 * 2 + 4,
        "nv_inference_request_success": 0,
        "paceline_padding_rows": 2,
        "paceline_padding_share": 2 / 9,
        "paceline_batch_rows_count": 2,
        "paceline_batch_rows_sum": 7,
        "paceline_queue_wait_us_count": 4,
        "paceline_queue_wait_us_sum": 160,
    }
    found = samples(metrics)
    assert {name: found[f"{name}{{{LABELS}}}"] for name in expected} == expected


def test_successful_request_adds_its_time(metrics: Metrics, model: VersionMetrics) -> None:
    for duration_us in (100, 101, 20_000_000):
        model.statistics.on_success(duration_us * US)
    assert value(metrics, "nv_inference_request_success") == 3
    assert value(metrics, "nv_inference_request_duration_us") == 20_000_201
    name = "paceline_request_duration_us_bucket"
    bounds = ("100.0", "250.0", "1e+07", "+Inf")
    assert [value(metrics, name, f'le="{bound}",{LABELS}') for bound in bounds] == [1, 2, 2, 3]


def test_failed_request_counts_only_under_its_reason(metrics: Metrics, model: VersionMetrics) -> None:
    before = samples(metrics)
    model.statistics.on_failure(InvalidRequest("x"), 5 * US)
    name = 'nv_inference_request_failure{model="m",reason="OTHER",version="3"}'
    after = samples(metrics)
    assert (before.pop(name), after.pop(name)) == (0, 1)
    assert {key for key in after if 'model="m"' in key and after[key] != before[key]} == set()


@pytest.mark.parametrize("drop", Drop)
def test_dropped_request_counts_under_its_reason(metrics: Metrics, model: VersionMetrics, drop: Drop) -> None:
    model.statistics.on_drop(drop)
    name = "paceline_dropped_requests"
    read = {one: value(metrics, name, f'model="m",reason="{one.value}",version="3"') for one in Drop}
    assert read == {**dict.fromkeys(Drop, 0), drop: 1}


@pytest.mark.parametrize(
    ("rows", "bucket", "below"),
    [(1, "1.0", None), (8, "8.0", "4.0"), (9, "16.0", "8.0"), (1024, "1024.0", "512.0"), (1025, "+Inf", "1024.0")],
)
def test_batch_rows_fall_into_the_bucket_of_their_size(
    metrics: Metrics, model: VersionMetrics, rows: int, bucket: str, below: str | None
) -> None:
    model.statistics.on_batch(report(rows, [0]))
    assert value(metrics, "paceline_batch_rows_bucket", f'le="{bucket}",{LABELS}') == 1
    assert below is None or value(metrics, "paceline_batch_rows_bucket", f'le="{below}",{LABELS}') == 0


@pytest.mark.parametrize(("padded_rows", "up_to"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (32, 32), (33, 64)])
def test_execution_time_is_grouped_by_the_power_of_two_that_covers_the_padded_rows(
    metrics: Metrics, model: VersionMetrics, padded_rows: int, up_to: int
) -> None:
    model.statistics.on_batch(report(1, [0], padded_rows=padded_rows, infer_us=90, other_us=20))
    series = f'model="m",up_to_rows="{up_to}",version="3"'
    assert value(metrics, "paceline_execution_us_sum", series) == 110
    assert value(metrics, "paceline_execution_us_bucket", f'le="100.0",{series}') == 0
    assert value(metrics, "paceline_execution_us_bucket", f'le="250.0",{series}') == 1
    assert len([name for name in samples(metrics) if name.startswith("paceline_execution_us_sum")]) == 1


def test_gauges_are_read_at_each_scrape(metrics: Metrics) -> None:
    gauges = Gauges(3, 2)
    metrics.add(version(batcher=gauges, load_ns=1_500_000_000))
    assert value(metrics, "nv_inference_pending_request_count") == 3
    assert value(metrics, "paceline_lanes") == 2
    assert value(metrics, "nv_model_load_duration_secs") == 1.5
    gauges.waiting_requests = 0
    assert value(metrics, "nv_inference_pending_request_count") == 0


def waiting_by_level(metrics: Metrics) -> dict[str, float]:
    found = (re.search(r'pending_requests.*priority="(.*?)"', name) for name in samples(metrics))
    return {one[1]: samples(metrics)[one.string] for one in found if one}


def test_pending_requests_of_each_priority_level_are_shown_even_if_none_wait(metrics: Metrics) -> None:
    metrics.add(version(batcher=Gauges(5, 1, {1: 2, 3: 3}), priority_levels=3))
    assert waiting_by_level(metrics) == {"1": 2, "2": 0, "3": 3}


def test_pending_requests_without_levels_have_no_series_by_level(metrics: Metrics) -> None:
    metrics.add(version(batcher=Gauges(5, 1)))
    assert waiting_by_level(metrics) == {}


def test_pending_requests_of_2_to_the_64_levels_are_few_series(metrics: Metrics) -> None:
    levels = {1: 1, 16: 2, 17: 3, 2**63: 4}
    metrics.add(version(batcher=Gauges(10, 1, levels), priority_levels=2**64 - 1))
    found = waiting_by_level(metrics)
    assert {level: number for level, number in found.items() if number} == {"1": 1, "16": 2, "17+": 7}
    assert len(found) == 17


def test_padded_elements_and_sizes_are_shown_by_length(metrics: Metrics) -> None:
    shown, reloaded = version(lengths=("words", "frames")), version(lengths=("words", "frames"))
    metrics.add(shown)
    shown.statistics.on_batch(report(3, [1, 2], padded_rows=4, sizes=(33, 2), elements=100))
    metrics.add(reloaded)
    reloaded.statistics.on_batch(report(1, [1], sizes=(2**17, 4), elements=2**19))
    words = f'length="words",{LABELS}'
    found = samples(metrics)
    assert found[f"paceline_elements{{{LABELS}}}"] == 100 + 2**19
    assert found[f"paceline_padding_elements{{{LABELS}}}"] == 4 * 33 * 2 - 100
    buckets = [
        found[f'paceline_padded_size_bucket{{le="{bound}",length="words",{LABELS}}}']
        for bound in ("32.0", "64.0", "65536.0", "+Inf")
    ]
    assert buckets == [0, 1, 1, 2]
    assert found[f"paceline_padded_size_sum{{{words}}}"] == 33 + 2**17
    assert found[f'paceline_padded_size_sum{{length="frames",{LABELS}}}'] == 6


def test_models_whose_requests_do_not_differ_show_no_elements(metrics: Metrics, model: VersionMetrics) -> None:
    model.statistics.on_batch(report(3, [1, 2]))
    assert not [name for name in samples(metrics) if "element" in name or "padded_size" in name]


def test_sequences_are_shown_where_there_are_any(metrics: Metrics) -> None:
    with_some = version("with", batcher=Gauges(sequences=SequenceCounts(live=3, waiting=2)))
    with_some.statistics.ended_sequences = Counter({SequenceEnd.END: 4, SequenceEnd.IDLE: 0})
    for one in (with_some, version("without")):
        metrics.add(one)
    shown = {name: count for name, count in samples(metrics).items() if "sequences" in name}
    assert shown == {
        'paceline_sequences{model="with",state="live",version="3"}': 3,
        'paceline_sequences{model="with",state="waiting",version="3"}': 2,
        'paceline_ended_sequences{model="with",reason="end",version="3"}': 4,
        'paceline_ended_sequences{model="with",reason="idle",version="3"}': 0,
    }
