from __future__ import annotations

import json
from dataclasses import replace

import pytest

from bench.scenario import parse_reach
from bench.stats import spread
from bench.summary import Comparison, Summary, SummaryError, dump, load, merge
from tests.unit.bench.summaries import MACHINE, section, summary


@pytest.mark.parametrize(
    ("ratio", "reach", "verdict"),
    [(0.9, ">= 0.9", "reached"), (0.89, ">= 0.9", "missed"), (1.4, "<= 1.3", "missed"), (0.1, None, "")],
)
def test_verdict_goes_by_the_median(ratio: float, reach: str | None, verdict: str) -> None:
    samples = spread([ratio, 0.0, 9.9])
    assert Comparison("", "a / b", samples, parse_reach(reach) if reach else None).verdict == verdict


def test_verdict_without_a_measurement_is_not_measured() -> None:
    assert Comparison("", "a / b", None, parse_reach(">= 1"), "not installed").verdict == "not measured"


def test_load_of_a_dump_is_the_same_summary() -> None:
    found = replace(summary(section(), section("other", plot=True)), date="one day")
    assert load(dump(found)) == found


def test_dump_has_medians_and_verdicts_for_readers() -> None:
    unary = json.loads(dump(summary()))["scenarios"]["unary"]
    assert [one["verdict"] for one in unary["ratios"]] == ["reached", "not measured", ""]
    assert unary["ratios"][0]["ratio"] == {"median": 0.95, "low": 0.5, "high": 0.99, "samples": [0.95, 0.5, 0.99]}
    assert unary["measurements"][1]["values"]["rows_per_batch"]["median"] == 32


def test_dump_of_long_numbers_is_the_same_after_loading() -> None:
    once = dump(summary(section(ratio=2 / 3)))
    assert "0.666667" in once
    assert dump(load(once)) == once


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 1}', '{"format": 2, "scenarios": {}}'])
def test_load_of_other_text_is_refused(text: str) -> None:
    with pytest.raises(SummaryError):
        load(text)


def test_merge_keeps_the_last_result_of_a_scenario_and_orders_by_name() -> None:
    old = replace(summary(section("b", ratio=0.1), section("c")), date="one day")
    new = summary(section("a"), section("b", ratio=0.7))
    merged = merge([old, new])
    assert merged.sections == (section("a"), section("b", ratio=0.7), section("c"))
    assert merged.date == "one day"


def test_merge_of_results_of_different_machines_is_refused() -> None:
    busy = Summary({**MACHINE, "load_before": 3.0, "python_step_ns": 2_345}, ())
    assert merge([summary(), busy]).machine == busy.machine
    with pytest.raises(SummaryError, match="expected results of one machine"):
        merge([summary(), Summary({**MACHINE, "cores": 16}, ())])
