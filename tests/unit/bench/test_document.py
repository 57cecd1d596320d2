from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from bench import figures
from bench.document import DOCUMENT, FIGURES, RESULTS, markdown
from bench.summary import dump, load
from tests.unit.bench.summaries import section, summary

FOUND = summary(section("a", ratio=0.5), section("b", plot=True))


def test_markdown_has_missed_bounds_before_reached_ones_before_those_not_measured() -> None:
    made = markdown(FOUND, "figures")
    places = [
        made.index(one)
        for one in (
            "**1 of 2** bounds",
            "## Missed",
            "| [a](#a) | 64 clients | requests/s / echo | 0.50 (0.50 - 0.99) | >= 0.9 |",
            "## Reached",
            "| [b](#b) | 64 clients | requests/s / echo | 0.95 (0.50 - 0.99) | >= 0.9 |",
            "## For comparison",
            "## Not measured",
            "| A tiny model | requests/s / a rival | not installed |",
            "### a",
            "| paceline | 64 clients | 950 | 5.00 | 9.00 | 9.90 | 32.0 |",
        )
    ]
    assert places == sorted(places)


def test_markdown_states_machine_and_conditions_and_a_date_only_if_given() -> None:
    made = markdown(FOUND, "figures")
    assert "- a processor, 2 cores, a system, load average before: 0.1" in made
    assert "3 rounds of 1 s each, 0.5 s of warm-up before, load from bench.load" in made
    assert "Measured:" not in made
    assert "- Measured: one day\n" in markdown(replace(FOUND, date="one day"), "figures")


def test_markdown_shows_figures_only_of_sections_with_a_plot() -> None:
    made = markdown(FOUND, "figures")
    assert "(figures/b.svg)" in made
    assert "(figures/a.svg)" not in made


def test_markdown_is_the_same_after_dump_and_load() -> None:
    assert markdown(load(dump(FOUND)), "figures") == markdown(FOUND, "figures")


def test_markdown_cells_hold_no_line_breaks() -> None:
    broken = section()
    broken = replace(broken, comparisons=(replace(broken.comparisons[1], reason="one\ntwo | three"),))
    assert "| A tiny model | requests/s / a rival | one two / three |" in markdown(summary(broken), "figures")


def test_draw_latency_of_equal_results_makes_equal_files(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in ("one.svg", "two.svg"):
        figures.draw_latency(section(plot=True), tmp_path / name)
    drawn = (tmp_path / "one.svg").read_text()
    assert "paceline, median" in drawn
    assert drawn == (tmp_path / "two.svg").read_text()


def test_committed_documents_match_the_committed_results() -> None:
    """One pair for each machine; neither may change without the other."""
    kept = sorted(RESULTS.parent.glob(f"{RESULTS.stem}*.json"))
    assert RESULTS in kept
    for results in kept:
        found = load(results.read_text(encoding="utf-8"))
        assert DOCUMENT.with_stem(results.stem).read_text(encoding="utf-8") == markdown(found, "figures")
        assert all((FIGURES / f"{one.name}.svg").exists() for one in found.sections if one.plot and one.measurements)
