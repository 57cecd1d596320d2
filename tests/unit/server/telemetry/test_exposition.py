"""The text that scrapers get, character by character, and how the library's parser reads it."""

from __future__ import annotations

import math

import pytest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, Sample
from prometheus_client.parser import text_string_to_metric_families

from paceline.server.telemetry.metrics import exposition


def family(value: float, labels: dict[str, str] | None = None) -> Metric:
    metric = Metric("a_b", "What it is", "gauge")
    metric.samples.append(Sample("a_b", labels or {}, value))
    return metric


def test_no_families_give_an_empty_text() -> None:
    assert exposition([]) == ""


def test_family_without_samples_has_only_a_head() -> None:
    assert exposition([Metric("a", "B c", "histogram")]) == "# HELP a B c\n# TYPE a histogram\n"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (7.0, "7"),
        (10**17, "100000000000000000"),
        (1e16, "10000000000000000"),
        (0.25, "0.25"),
        (-3.5, "-3.5"),
        (1e-7, "1e-07"),
        (math.inf, "+Inf"),
        (-math.inf, "-Inf"),
        (math.nan, "NaN"),
    ],
)
def test_whole_numbers_are_digits_and_all_numbers_are_read_back_unchanged(value: float, text: str) -> None:
    written = exposition([family(value)])
    assert written == f"# HELP a_b What it is\n# TYPE a_b gauge\na_b {text}\n"
    ((read,),) = (one.samples for one in text_string_to_metric_families(written))
    assert read.value == value or math.isnan(value)


@pytest.mark.parametrize("label", ["", "plain", 'a"b', "a\\b", "a\nb", "\\n", 'grün {x="y"} 日', " , = "])
def test_labels_of_any_text_are_read_back_unchanged(label: str) -> None:
    written = exposition([family(1, {"b": "2", "a": label})])
    ((read,),) = (one.samples for one in text_string_to_metric_families(written))
    assert read.labels == {"a": label, "b": "2"}
    assert written.splitlines()[2].startswith('a_b{a="')


def test_help_of_several_lines_is_one_line() -> None:
    written = exposition([Metric("a", "one\ntwo \\ three", "gauge")])
    assert written.splitlines()[0] == r"# HELP a one\ntwo \\ three"


def test_counters_keep_the_names_of_their_samples() -> None:
    ours = Metric("hits", "x", "counter")
    ours.samples.append(Sample("hits", {}, 3))
    text = exposition([ours, CounterMetricFamily("seconds_total", "x", 4)])
    assert text == "# HELP hits x\n# TYPE hits counter\nhits 3\n" + (
        "# HELP seconds_total x\n# TYPE seconds_total counter\nseconds_total 4\n"
    )


def test_families_keep_their_order() -> None:
    text = exposition([GaugeMetricFamily("b", "x", 1), GaugeMetricFamily("a", "x", 2)])
    assert [line for line in text.splitlines() if line[0] != "#"] == ["b 1", "a 2"]
