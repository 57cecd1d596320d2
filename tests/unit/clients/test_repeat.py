"""The same call many times."""

from __future__ import annotations

import tracemalloc
from itertools import count

import pytest

from paceline.clients.report import run_repeated


def unheard(done: int, elapsed_ns: int) -> None:
    pass


def test_repeated_reports_all_calls_at_the_end() -> None:
    reports: list[tuple[int, int]] = []
    outcome = run_repeated(lambda: None, lambda *report: reports.append(report), repeat=100, concurrency=3)
    assert outcome.ok == reports[-1][0] == 100
    assert reports == sorted(reports)


def test_repeated_takes_no_memory_for_calls_still_to_come() -> None:
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise KeyError("enough")

    tracemalloc.start()
    try:
        with pytest.raises(KeyError, match="enough"):
            run_repeated(call, unheard, repeat=30_000, concurrency=1)
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert calls == 3


def test_repeated_ends_all_calls_when_one_raises() -> None:
    numbers = count()

    def call() -> None:
        if next(numbers) == 10:
            raise KeyError("enough")

    with pytest.raises(KeyError, match="enough"):
        run_repeated(call, unheard, repeat=10**12, concurrency=2)
