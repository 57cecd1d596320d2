from __future__ import annotations

import pytest

from bench.report import Absence, Result, absolute, facts, section_of, series_of, table, text
from bench.scenario import Closed, parse
from tests.unit.bench.summaries import MACHINE, section, summary

SCENARIO = parse(
    "mlp",
    {
        "title": "A perceptron",
        "clients": 64,
        "subject": {"server": "paceline", "model": "mlp"},
        "reference": [
            {"server": "onnxruntime", "rows": 64, "label": "session.run", "reach": ">= 0.8"},
            {"model": "mlp_unbatched", "label": "batching off", "measure": "p50_ms"},
            {"server": "kserve", "label": "a rival", "reach": ">= 1"},
        ],
    },
)
PACELINE, DIRECT, UNBATCHED, RIVAL = SCENARIO.sides
POINT = Closed(64)
ROUNDS = [
    {
        (PACELINE, POINT): {"requests_per_s": 900.0, "rows_per_batch": 30.0, "p50_ms": 40.0},
        (DIRECT, POINT): {"requests_per_s": 1_000.0},
        (UNBATCHED, POINT): {"requests_per_s": 100.0, "p50_ms": 400.0},
    },
    {
        (PACELINE, POINT): {"requests_per_s": 1_600.0, "rows_per_batch": 32.0, "p50_ms": 20.0},
        (DIRECT, POINT): {"requests_per_s": 2_000.0},
        (UNBATCHED, POINT): {"requests_per_s": 200.0, "p50_ms": 200.0},
    },
]
RESULT = Result(SCENARIO, (POINT,), "bench.load", series_of(ROUNDS), {RIVAL: Absence("not installed", failed=False)})


def test_series_turns_rounds_into_lists() -> None:
    assert series_of(ROUNDS)[DIRECT, POINT] == {"requests_per_s": [1_000.0, 2_000.0]}


def test_series_leaves_out_values_that_one_round_lacks() -> None:
    assert series_of([{"a": {"x": 1.0, "y": 2.0}}, {"a": {"x": 3.0}}]) == {"a": {"x": [1.0, 3.0]}}


def test_section_takes_ratios_within_rounds() -> None:
    found = section_of(RESULT, "2 rounds")
    ratios = {one.what: one.found.samples for one in found.comparisons if one.found}
    assert ratios == {
        "requests/s / session.run": (pytest.approx(0.9), pytest.approx(0.8)),
        "median latency / batching off": (pytest.approx(0.1), pytest.approx(0.1)),
    }
    assert [one.verdict for one in found.comparisons] == ["reached", "", "not measured"]
    assert {one.point for one in found.comparisons} == {"64 clients"}


def test_section_says_why_a_side_has_no_numbers() -> None:
    found = section_of(RESULT, "2 rounds")
    assert found.comparisons[2].reason == "not installed"
    assert found.absent == {"a rival": "not installed"}


def test_section_names_loads_only_of_sides_with_a_server() -> None:
    found = {one.who: one.point for one in section_of(RESULT, "2 rounds").measurements}
    assert found == {"paceline": "64 clients", "session.run": "", "batching off": "64 clients"}


def test_section_of_a_side_without_answers_has_no_ratio() -> None:
    rounds = [{(PACELINE, POINT): {"requests_per_s": 1.0}, (DIRECT, POINT): {"requests_per_s": 0.0}}]
    found = section_of(Result(SCENARIO, (POINT,), "", series_of(rounds), {}), "1 round")
    assert found.comparisons[0].found is None
    assert found.comparisons[0].reason == "no answers to compare"


def test_absolute_leaves_out_columns_without_values() -> None:
    head, *rows = absolute(section())
    assert head == ["who", "load", "requests/s", "p50 ms", "p90 ms", "p99 ms", "rows/batch"]
    assert rows[0][-1] == ""
    assert rows[1] == ["paceline", "64 clients", "950", "5.00", "9.00", "9.90", "32.0"]


def test_text_has_ratios_then_absent_sides_then_the_machine() -> None:
    said = text(summary())
    assert said.startswith("Ratios")
    places = [said.index(one) for one in ("0.95 (0.50 - 0.99)", "a rival: not installed", "a processor, 2 cores")]
    assert places == sorted(places)


def test_facts_include_the_speed_of_python_if_it_is_known() -> None:
    older = {key: value for key, value in MACHINE.items() if key != "python_step_ns"}
    assert "Python 3 (1.2 us per step), grpcio 1," in facts(MACHINE)[-1]
    assert "Python 3, grpcio 1," in facts(older)[-1]


def test_table_aligns_the_first_column_left_and_the_others_right() -> None:
    assert table([["a", "10"], ["long", "5"]]) == "  a     10\n  long   5"
