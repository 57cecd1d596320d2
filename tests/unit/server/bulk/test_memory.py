"""How memory is found, and how large batches, chunks and units are for it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.server.bulk.memory import Probed, fixed_sizes, memory_left, peak_bytes, resident_bytes, units_at_once

GIB = 2**30


@given(
    st.builds(
        Probed,
        batch_rows=st.integers(1, 1_024),
        rows_per_s=st.floats(0.001, 1e6),
        instances=st.integers(0, 64),
        intra_op_threads=st.just(1),
        input_row_bytes=st.floats(0, 1e9),
        output_row_bytes=st.floats(0, 1e9),
    ),
    st.integers(2**20, 2**40),
    st.integers(0, 10_000),
    st.booleans(),
)
def test_what_units_hold_together_fits_into_memory(
    probed: Probed, memory_bytes: int, unit_rows: int, by_length: bool
) -> None:
    fixed = fixed_sizes(probed, memory_bytes, unit_rows, by_length=by_length)
    at_once = units_at_once(fixed, memory_bytes)
    row_bytes = probed.input_row_bytes + probed.output_row_bytes
    assert 1 <= fixed.chunk_rows <= max(1, fixed.unit_rows)
    assert fixed.chunk_rows == 1 or 4 * at_once * fixed.chunk_rows * row_bytes <= memory_bytes
    assert 4 * at_once * fixed.chunk_bytes <= memory_bytes
    assert fixed.unit_rows == unit_rows or fixed.unit_rows % fixed.chunk_rows == 0
    assert fixed.chunk_rows <= fixed.batch_rows or fixed.chunk_rows % fixed.batch_rows == 0


@pytest.mark.parametrize(
    ("rows_per_s", "unit_rows"),
    [(1_000.0, 28_672), (100_000.0, 2**18), (0.1, 16 * 32)],
)
def test_a_unit_takes_a_while_but_not_long(rows_per_s: float, unit_rows: int) -> None:
    fixed = fixed_sizes(Probed(32, rows_per_s, 0, 0, 100.0, 100.0), 2 * GIB, 0)
    assert (fixed.unit_rows, fixed.batch_rows) == (unit_rows, 32)


def test_small_jobs_have_many_units_too() -> None:
    fixed = fixed_sizes(Probed(32, 1_000.0, 2, 1, 100.0, 100.0, job_rows=50_000.0), 2 * GIB, 0)
    assert fixed.unit_rows == 2_048


def test_units_with_large_pages_take_turns() -> None:
    fixed = fixed_sizes(Probed(32, 1_000.0, 1, 1, 100.0, 100.0), 2 * GIB, 0)
    assert [units_at_once(fixed, 2 * GIB, held_bytes) for held_bytes in (GIB // 8, GIB // 4, GIB)] == [3, 2, 1]


def test_less_memory_later_means_fewer_units_at_once() -> None:
    fixed = fixed_sizes(Probed(32, 1_000.0, 1, 1, 100.0, 100.0), 2 * GIB, 0)
    assert [units_at_once(fixed, memory_bytes) for memory_bytes in (2 * GIB, GIB, GIB // 8)] == [3, 1, 1]


def test_very_large_jobs_have_larger_units() -> None:
    fixed = fixed_sizes(Probed(1, 0.1, 1, 1, 100.0, 100.0, job_rows=9e8), 2 * GIB, 0)
    assert fixed.unit_rows * 99_999 >= 9e8


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
    before, held = resident_bytes(), list[np.ndarray]()
    # Allocators of earlier tests may give memory back meanwhile, but what is held is always there.
    while resident_bytes() <= before + (32 << 20):
        assert len(held) << 25 <= resident_bytes()
        held.append(np.ones(1 << 25, np.uint8))


def test_peak_memory_grows_with_what_is_held() -> None:
    before, held = peak_bytes(), list[np.ndarray]()
    # Allocators of earlier tests may give memory back meanwhile, but what is held can't be more than the peak.
    while peak_bytes() <= before + (32 << 20):
        assert len(held) << 25 <= before + (32 << 20)
        held.append(np.ones(1 << 25, np.uint8))
