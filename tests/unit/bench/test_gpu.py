"""What `bench.gpu` says of what fails."""

from __future__ import annotations

import re

import pytest

from bench.gpu import _reason
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
def test_reason_is_the_last_lines_and_both_ends_of_them(text: str, told: str) -> None:
    reason = _reason(BenchError(text))
    assert len(reason) < 1300
    assert re.fullmatch(told, reason)
