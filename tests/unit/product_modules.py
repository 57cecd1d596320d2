"""The modules of the five packages, by their names inside `paceline`."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]
PACKAGES = ("protos", "scheduler", "backends", "clients", "server")


@cache
def tree(module: str) -> ast.Module:
    """What `module` consists of."""
    return ast.parse(modules()[module].read_text(encoding="utf-8"))


@cache
def modules() -> dict[str, Path]:
    """Every module of the five packages, by name."""
    found = {}
    for package in PACKAGES:
        for path in (REPO / package).rglob("*.py"):
            parts = path.relative_to(REPO).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found
