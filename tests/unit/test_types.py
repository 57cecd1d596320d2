"""How much of the server and the scheduler isn't typed: a bound that only goes down."""

from __future__ import annotations

import ast

from tests.unit.product_modules import REPO

_MOST = 32


def test_few_values_are_of_any_type() -> None:
    found = [
        f"{path.relative_to(REPO)}:{node.lineno}"
        for package in ("server", "scheduler")
        for path in sorted((REPO / package).rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Name) and node.id == "Any"
    ]
    assert len(found) <= _MOST, found
