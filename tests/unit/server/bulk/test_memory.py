"""How much memory is left, by what Linux and containers say."""

from __future__ import annotations

import math
import resource
from pathlib import Path

import numpy as np
import pytest

from paceline.server.bulk.memory import memory_left, peak_bytes, resident_bytes

GIB = 2**30


def files(root: Path, **contents: str) -> None:
    for name, content in contents.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [(f"{3 * GIB}", f"{GIB}", 2 * GIB), ("max", f"{GIB}", 8 * GIB), (f"{GIB}", f"{3 * GIB}", 0)],
    ids=["limited", "no limit", "exceeded"],
)
def test_least_of_machine_and_container_is_left(tmp_path: Path, limit: str, used: str, expected: int) -> None:
    meminfo = f"MemTotal: {16 * 2**20} kB\nMemAvailable: {8 * 2**20} kB\n"
    files(tmp_path, proc__meminfo=meminfo)
    assert memory_left(tmp_path) == 8 * GIB
    folder = tmp_path / "sys" / "fs" / "cgroup"
    folder.mkdir(parents=True)
    (folder / "memory.max").write_text(limit)
    (folder / "memory.current").write_text(used)
    assert memory_left(tmp_path) == expected


def test_elsewhere_nothing_is_known_of_memory(tmp_path: Path) -> None:
    assert memory_left(tmp_path) == math.inf
    assert resident_bytes(tmp_path) == 0


def test_resident_memory_grows_with_what_is_held() -> None:
    before = resident_bytes()
    held = bytearray(b"x" * 2**26)
    assert resident_bytes() - before > 2**25
    assert len(held) == 2**26


def test_peak_memory_grows_with_what_is_held() -> None:
    before = peak_bytes()
    now = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    held = np.ones(before - now + (64 << 20), np.uint8)
    assert held.all()
    assert peak_bytes() > before + (32 << 20)
