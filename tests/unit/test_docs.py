"""What docs/behaviour.md promises has a test each, and the test exists."""

from __future__ import annotations

import ast
import re
from functools import cache

import pytest

from tests.harness import REPO

BEHAVIOUR = REPO / "docs" / "behaviour.md"
_REFERENCE = re.compile(r"`([\w/]+\.py)::(\w+)`")
_PROMISE = re.compile(r"^(- |\| (?!what|---))")


def promises() -> list[str]:
    """Every sentence of a list and every row of a table."""
    return [line for line in BEHAVIOUR.read_text(encoding="utf-8").splitlines() if _PROMISE.match(line)]


def references() -> list[tuple[str, str]]:
    return sorted(set(_REFERENCE.findall(BEHAVIOUR.read_text(encoding="utf-8"))))


@cache
def names_in(file: str) -> frozenset[str]:
    """The names of tests that a file below tests/ defines or assigns."""
    names: set[str] = set()
    for node in ast.parse((REPO / "tests" / file).read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
    return frozenset(name for name in names if name.lower().startswith("test"))


def test_behaviour_promises_enough_to_be_worth_reading() -> None:
    assert len(promises()) > 60


@pytest.mark.parametrize("promise", promises(), ids=lambda line: line[2:50])
def test_behaviour_every_promise_names_its_test(promise: str) -> None:
    assert _REFERENCE.search(promise), promise


@pytest.mark.parametrize(("file", "name"), references(), ids=lambda value: value)
def test_behaviour_every_test_that_is_named_exists(file: str, name: str) -> None:
    assert (REPO / "tests" / file).is_file(), f"docs/behaviour.md names tests/{file}, which isn't there"
    assert name in names_in(file), f"docs/behaviour.md names {name}, which tests/{file} doesn't have"
