"""How `bench.gpu` and its load generators report failures."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from bench.gpu_plan import reason
from bench.gpu_processes import LoadGenerators
from bench.steps import BenchError


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("one\ntwo\nthree\nfour\n", "two / three / four"),
        ("", "BenchError"),
        (f"INTERNAL: {'x' * 5000}: at last", r"INTERNAL: x+ \[\.\.\.\] x+: at last"),
    ],
    ids=["long", "empty", "endless"],
)
def test_reason_is_the_last_lines_or_only_both_ends_if_they_are_long(text: str, told: str) -> None:
    told_reason = reason(BenchError(text))
    assert len(told_reason) < 1300
    assert re.fullmatch(told, told_reason)


def test_load_that_ends_before_it_begins_is_not_reported_as_late(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match=r"^bench\.load ended$"):
        LoadGenerators(1, 1, 1, False).send("127.0.0.1:1", tmp_path / "no request", 0.1, 0.1)
