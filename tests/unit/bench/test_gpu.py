"""How `bench.gpu` and its load generators report failures, and keep what was found."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.gpu import Results
from bench.gpu_plan import Found, brief, reason
from bench.gpu_processes import LoadGenerators
from bench.scenario import Reach
from bench.stats import spread
from bench.steps import BenchError
from bench.summary import Comparison, load

ENDLESS = f"INTERNAL: {'x' * 5000}: at last"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (BenchError("one\n  two\n\nthree\n"), "one / two / three"),
        (BenchError(""), "BenchError"),
        (BenchError(ENDLESS), ENDLESS),
        (KeyError("nv_inference_count"), "KeyError: 'nv_inference_count'"),
    ],
    ids=["lines", "empty", "endless", "other"],
)
def test_reason_is_all_that_the_error_says_in_a_line(error: Exception, told: str) -> None:
    assert reason(error) == told


def test_brief_is_both_ends_of_long_texts() -> None:
    assert brief("short") == "short"
    assert len(brief(ENDLESS)) < 420
    assert brief(ENDLESS).startswith("INTERNAL: xxx")
    assert brief(ENDLESS).endswith("xxx: at last")


def test_step_that_fails_is_absent_for_its_first_reason() -> None:
    found = Found()
    for why in ("first", "second"):
        with found.trying("p99"):
            raise BenchError(why)
    assert found.absent == {"p99": "first"}


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit])
def test_interrupt_is_no_failure_of_a_step(error: type[BaseException]) -> None:
    found = Found()
    with pytest.raises(error), found.trying("p99"):
        raise error
    assert not found.absent


def test_results_have_each_section_once_as_it_was_at_last(tmp_path: Path) -> None:
    out, found = tmp_path / "new" / "gpu.json", Found()
    results = Results(out)
    for rate in (1.0, 3.0):
        found.add("paceline", {"rows_per_s": rate})
        results.add(found.section("gpu-model", "a model", "how"))
    (section,) = load(out.read_text()).sections
    assert section.measurements[0].values["rows_per_s"].samples == (1.0, 3.0)
    assert [one.name for one in out.parent.iterdir()] == ["gpu.json"]


def test_results_keep_long_errors_and_print_their_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = Results(tmp_path / "gpu.json")
    results.add(Found(absent={"p99": ENDLESS}).section("gpu-model", "a model", "how"))
    results.show()
    assert load((tmp_path / "gpu.json").read_text()).sections[0].absent == {"p99": ENDLESS}
    printed = capsys.readouterr().out
    assert "at last" in printed
    assert "x" * 400 not in printed
    assert results.failures() == ["gpu-model: no p99"]


def test_wrong_answers_are_failures(tmp_path: Path) -> None:
    results = Results(tmp_path / "gpu.json")
    compared = (Comparison("", "deviation", spread([2.0]), Reach(False, 1.0)),)
    results.add(Found().section("gpu-correct", "answers", "how", compared))
    results.add(Found().section("gpu-model", "a model that is slow", "how", compared))
    assert results.failures() == ["wrong: deviation"]


def test_load_generators_tell_when_they_were_the_limit() -> None:
    four = LoadGenerators(4, 32, 16, False)
    assert four.limit([3.9, 1.0, 3.8]) == "; the load was the limit, with 3.8 of 4 cores"
    assert four.limit([2.0, 3.9, 2.0]) == four.limit([]) == ""
