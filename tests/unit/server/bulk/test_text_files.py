"""Text, plain and compressed: units begin in its midst, memory is bounded, and files cut off are refused."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pyarrow as pa
import pytest

from paceline.server.bulk.sources import find_source
from paceline.server.bulk.values import BulkError, Unit
from tests.unit.server.bulk import reading

ROWS = 3000
SUFFIXES = ["", ".gz", ".bz2", ".zst", ".lz4"]


def write(path: Path, text: str) -> str:
    with pa.output_stream(path, compression="detect") as file:
        file.write(text.encode())
    return str(path)


def lines(rows: int = ROWS) -> str:
    return "".join(f'{{"n": {row}, "s": "{"é" * (row % 99)}"}}\n' for row in range(rows))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_units_begin_in_the_midst_of_text(tmp_path: Path, suffix: str) -> None:
    source = find_source([write(tmp_path / f"a.jsonl{suffix}", lines())])
    limits = reading.fixed(unit_rows=700, chunk_rows=64)
    in_order = [chunk.table for chunk in reading.chunks(source, limits)]
    assert [row for table in in_order for row in table["n"].to_pylist()] == list(range(ROWS))
    units = list(reading.units(source, 700))
    backwards = [[chunk.table for chunk in source.chunks(unit, ["n", "s"], limits)] for unit in reversed(units)]
    assert [table for tables in reversed(backwards) for table in tables] == in_order


def test_compressed_file_of_several_parts_is_whole(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "a.csv.gz", "n\n1\n2\n"))
    path.write_bytes(path.read_bytes() + Path(write(tmp_path / "b.csv.gz", "3\n4\n")).read_bytes())
    assert reading.rows(find_source([str(path)]), reading.fixed()) == [{"n": n} for n in (1, 2, 3, 4)]


def test_compressed_file_that_is_cut_off_is_refused(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "a.jsonl.gz", lines(100_000)))
    path.write_bytes(path.read_bytes()[:-100])
    source = find_source([str(path)])
    with pytest.raises(BulkError, match=r"a\.jsonl\.gz can't be read: Truncated"):
        source.index(source.files[0], 10)


def test_memory_of_huge_rows_is_bounded(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl.zst", "".join(f'{{"s": "{"x" * size}"}}\n' for size in (3, 80 << 20, 4)))
    source = find_source([path])
    limits = reading.fixed(chunk_bytes=1 << 20)
    (unit,) = reading.units(source, 10)
    tracemalloc.start()
    (chunk,) = source.chunks(unit, ["s"], limits)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert chunk.table.to_pydict() == {"s": ["xxx", "xxxx"]}
    assert [row.number for row in chunk.bad] == [1]
    assert chunk.bad[0].reason.startswith(f"the row has {(80 << 20) + 10} bytes of text, more than the {1 << 20}")
    assert most < 16 << 20


def test_file_with_fewer_rows_than_listed_is_refused(tmp_path: Path) -> None:
    source = find_source([write(tmp_path / "a.jsonl", lines(10))])
    unit = Unit(0, source.files[0], 5, 20, source.index(source.files[0], 5).offsets[1])
    with pytest.raises(BulkError, match=r"a\.jsonl has only 10 rows, but had 20 or more"):
        list(source.chunks(unit, ["n"], reading.fixed()))
