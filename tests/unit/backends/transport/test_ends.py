from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.harness import REPO

PROGRAM = "tests.unit.backends.transport.descriptor_limits"


@pytest.fixture(scope="module")
def found() -> dict[str, list[tuple[str | None, int]]]:
    done = subprocess.run([sys.executable, "-m", PROGRAM], cwd=REPO, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.mark.parametrize("kind", ["blocking_link", "link"])
def test_ends_without_enough_descriptors_or_memory_leave_no_descriptor_open(
    found: dict[str, list[tuple[str | None, int]]], kind: str
) -> None:
    *by_count, too_large = found[kind]
    errors = [error for error, _ in by_count]
    few = errors.index(None)
    assert few > 5
    assert errors == ["Too many open files"] * few + [None] * (len(errors) - few)
    assert too_large[0] == "File too large"
    assert [left for error, left in found[kind] if error] == [0] * (few + 1)
