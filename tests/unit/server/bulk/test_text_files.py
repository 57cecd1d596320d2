"""Text, plain and compressed: its rows are the same wherever a block of the file ends, also with stray quotes and ones
without end; units begin in its midst, memory is bounded, and files cut off are refused.
"""

from __future__ import annotations

import io
import tracemalloc
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.server.bulk.sources import find_source
from paceline.server.bulk.text_files import LineSplitter, QuoteSplitter, Splitter, text_rows
from paceline.server.bulk.values import BulkError, Unit
from tests.unit.server.bulk import reading

LONGEST = 12
PARTS = st.sampled_from([b'"', b'"', b'"', b",", b"\n", b"\r\n", b"\r", b"a", b"bcdef", b'""', b',"', b'",'])


def split(text: bytes, splitter: Splitter, block: int, most: int = 1 << 20) -> list[tuple[bytes, int, str | None]]:
    """The rows, their offsets and faults. A block of the file has so many bytes."""
    file = io.BytesIO(text)
    return [
        (line, offset, rows.faults.get(place))
        for rows in text_rows(lambda _: file.read(block), splitter, 0, most)
        for place, (line, offset) in enumerate(zip(rows.lines(), rows.offsets.tolist(), strict=True))
    ]


def split_slowly(text: bytes) -> list[tuple[bytes, int]]:
    """The rows and their offsets, byte by byte."""
    rows, begin, place = [], 0, 0
    may_open = True
    while place < len(text):
        byte = text[place : place + 1]
        other = text.find(b'"', place + 1)
        if byte == b'"' and may_open and 0 < other <= place + LONGEST:
            place = other + 1  # `may_open` stays: another quote right here is text of the same field
            may_open = text[place : place + 1] == b'"'
            continue
        may_open = byte in b",\r\n"
        place += 1
        if byte in b"\r\n":
            rows.append((text[begin:place], begin))
            begin = place
    rows.append((text[begin:], begin))
    return [row for row in rows if row[0].strip(b"\r\n")]


@given(st.lists(PARTS, max_size=30).map(b"".join), st.integers(1, LONGEST))
def test_quoted_rows_are_equal_for_any_blocks(text: bytes, block: int) -> None:
    found = split(text, QuoteSplitter(b",", LONGEST), block)
    assert [row[:2] for row in found] == split_slowly(text)


@given(st.lists(st.sampled_from([b"\n", b"\r\n", b"a", b"bc", b'"']), max_size=20).map(b"".join), st.integers(1, 9))
def test_lines_are_equal_for_any_blocks(text: bytes, block: int) -> None:
    lines = [line for line in text.splitlines(keepends=True) if line.strip(b"\r\n")]
    assert [row[0] for row in split(text, LineSplitter(), block)] == lines


@pytest.mark.parametrize("block", [1, 5, 100])
def test_huge_row_is_at_fault_and_counted(block: int) -> None:
    found = split(b"ab\n" + b"c" * 20 + b"\nd\n", LineSplitter(), block, most=10)
    assert [(offset, fault) for _, offset, fault in found] == [
        (0, None),
        (3, "the row has 21 bytes of text, more than the 10 that one row may have, a 16th of --memory"),
        (24, None),
    ]


@pytest.mark.parametrize("block", [1, 7])
def test_quote_without_end_is_fault_of_one_row(block: int) -> None:
    found = split(b'a,"b\n' + b"c,d\n" * 4, QuoteSplitter(b",", LONGEST), block)
    assert [(line, fault) for line, _, fault in found] == [
        (b'a,"b\n', "a quoted field begins that doesn't end"),
        *[(b"c,d\n", None)] * 4,
    ]


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
