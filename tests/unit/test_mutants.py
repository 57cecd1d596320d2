"""The planted faults of `tests.mutants` can be planted: what they replace is still there, and so are their tests."""

from __future__ import annotations

from tests.mutants import MUTANTS, REPO


def test_each_fault_replaces_what_stands_there_once() -> None:
    wrong = {one.breaks: one.file for one in MUTANTS if (REPO / one.file).read_text().count(one.old) != 1}
    assert wrong == {}


def test_each_faults_tests_are_there() -> None:
    assert {test for one in MUTANTS for test in one.tests if not (REPO / test).exists()} == set()
