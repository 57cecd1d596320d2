"""Parquet: every row once whatever the row groups, in chunks that depend on the rows alone, and what is refused."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from paceline.server.bulk.sources import find_source
from paceline.server.bulk.values import BulkError, Chunk
from tests.unit.server.bulk import reading

TABLE = pa.table(
    {
        "id": pa.array(range(100), pa.int64()),
        "text": pa.array([f"row {row}" * (row % 7) for row in range(100)]).dictionary_encode(),
        "tokens": pa.array([[row] * (row % 5) for row in range(100)], pa.large_list(pa.int32())),
        "a.b": pa.array([None if row % 3 else row / 2 for row in range(100)], pa.float32()),
    }
)


def write(path: Path, table: pa.Table = TABLE, group: int = 9) -> str:
    pq.write_table(table, path, row_group_size=group)
    return str(path)


def cuts(found: list[Chunk]) -> list[list[int]]:
    return [chunk.numbers.tolist() for chunk in found]


@pytest.mark.parametrize("group", [1, 9, 1000])
@pytest.mark.parametrize("unit_rows", [1, 7, 9, 1000])
def test_units_give_each_row_once(tmp_path: Path, group: int, unit_rows: int) -> None:
    source = find_source([write(tmp_path / "a.parquet", group=group)])
    assert reading.rows(source, reading.fixed(unit_rows)) == TABLE.to_pylist()


def test_units_read_in_any_order_are_equal(tmp_path: Path) -> None:
    source = find_source([write(tmp_path / "a.parquet", group=30)])
    limits = reading.fixed(unit_rows=7)
    units = list(reading.units(source, 7))
    names = ["id", "text"]
    in_order = [[chunk.table for chunk in source.chunks(unit, names, limits)] for unit in units]
    for unit in reversed(units):
        assert [chunk.table for chunk in source.chunks(unit, names, limits)] == in_order[unit.number]


def test_chunks_are_equal_for_any_row_groups(tmp_path: Path) -> None:
    limits = reading.fixed(unit_rows=50, chunk_rows=6, chunk_bytes=300)
    found = [
        cuts(reading.chunks(find_source([write(tmp_path / f"{group}.parquet", group=group)]), limits))
        for group in (1, 4, 100)
    ]
    assert found[0] == found[1] == found[2]
    assert max(map(len, found[0])) == 6  # full by rows, and others by bytes
    assert min(map(len, found[0])) < 5


def test_columns_come_as_asked(tmp_path: Path) -> None:
    source = find_source([write(tmp_path / "a.parquet")])
    (first, *_) = reading.chunks(source, reading.fixed(), ["a.b", "id"])
    assert first.table.schema == pa.schema({"a.b": pa.float32(), "id": pa.int64()})


def test_schema_has_plain_types(tmp_path: Path) -> None:
    source = find_source([write(tmp_path / "a.parquet")])
    plain = {"id": pa.int64(), "text": pa.string(), "tokens": pa.list_(pa.int32()), "a.b": pa.float32()}
    assert source.schema == pa.schema(plain)


def test_huge_row_is_bad_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "a.parquet", pa.table({"text": ["a", "b" * 5000, "c"]}))
    (chunk,) = reading.chunks(find_source([path]), reading.fixed(chunk_bytes=1000))
    assert chunk.table.to_pydict() == {"text": ["a", "c"]}
    assert chunk.numbers.tolist() == [0, 2]
    assert [(row.number, row.reason) for row in chunk.bad] == [
        (1, "the row has 5004 bytes, more than the 1000 that one row may have, a 16th of --memory")
    ]


def test_file_without_rows_has_no_units(tmp_path: Path) -> None:
    source = find_source([write(tmp_path / "a.parquet", TABLE.slice(0, 0)), write(tmp_path / "b.parquet")])
    assert [source.index(file, 50).rows for file in source.files] == [0, 100]
    assert len(reading.rows(source, reading.fixed())) == 100


def test_memory_of_huge_row_group_is_bounded(tmp_path: Path) -> None:
    sizes = np.where(np.arange(20_000) % 2_000 < 1_990, 100, 2_000_000)  # 20 MB in each 2,000 rows, after small ones
    text = pa.array(["x" * size for size in sizes.tolist()])
    path = write(tmp_path / "a.parquet", pa.table({"text": text}), group=20_000)
    del text
    source = find_source([path])
    before, most = pa.total_allocated_bytes(), 0
    (unit,) = reading.units(source, 20_000)
    for chunk in source.chunks(unit, ["text"], reading.fixed(20_000, 1000, 4 << 20)):
        most = max(most, pa.total_allocated_bytes() - before)
        assert chunk.table.nbytes < 5 << 20
    assert most < 64 << 20  # of 200 MB


@pytest.mark.parametrize("damage", ["cut", "noise"])
def test_damaged_file_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    path = Path(write(tmp_path / "a.parquet"))
    whole = path.read_bytes()
    path.write_bytes(whole[:200] if damage == "cut" else b"no parquet at all")
    source = find_source([str(path)])
    with pytest.raises(BulkError, match=r"a\.parquet can't be read"):
        _ = source.schema


def test_page_that_is_not_what_was_written_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(TABLE, path, write_page_checksum=True, compression="none", use_dictionary=False)
    path.write_bytes(path.read_bytes().replace(b"row 50", b"row 51"))
    source = find_source([str(path)])
    with pytest.raises(BulkError, match=r"a\.parquet can't be read: .*CRC"):
        reading.rows(source, reading.fixed())


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"id": [1]}, "b.parquet: column 'x' is missing: expected int64, as in the first file; got columns 'id'"),
        ({"x": ["1"]}, "b.parquet: column 'x': expected int64, as in the first file; got string"),
    ],
)
def test_file_with_other_schema_is_refused(tmp_path: Path, other: dict[str, list[object]], words: str) -> None:
    write(tmp_path / "a.parquet", pa.table({"x": [1]}))
    write(tmp_path / "b.parquet", pa.table(other))
    source = find_source([str(tmp_path)])
    source.index(source.files[0], 10)
    with pytest.raises(BulkError, match=words):
        source.index(source.files[1], 10)


def test_column_that_comes_twice_is_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array([1]), pa.array([2])], names=["x", "x"])
    source = find_source([write(tmp_path / "a.parquet", table)])
    with pytest.raises(BulkError, match="several columns 'x'"):
        _ = source.schema


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_changed_file_is_refused(tmp_path: Path, when: str) -> None:
    path = write(tmp_path / "a.parquet")
    source = find_source([path])
    (unit,) = reading.units(source, 100)
    found = source.chunks(unit, ["id"], reading.fixed())
    if when == "meanwhile":
        next(found)
    os.utime(path, ns=(0, 0))
    with pytest.raises(BulkError, match=r"a\.parquet has changed since the job began"):
        list(found)


def test_file_that_is_gone_is_refused(tmp_path: Path) -> None:
    source = find_source([write(tmp_path / "a.parquet")])
    (tmp_path / "a.parquet").unlink()
    with pytest.raises(BulkError, match=r"a\.parquet: there is no such file"):
        source.index(source.files[0], 10)


def test_pages_of_large_rows_are_foretold(tmp_path: Path) -> None:
    texts = pa.array([f"{row:05d}" * 1_000 for row in range(1_500)])
    source = find_source([write(tmp_path / "a.parquet", pa.table({"id": np.arange(1_500), "text": texts}), 1_500)])
    assert source.held_bytes(["text"]) == pytest.approx(2 * 1_024 * 5_000, rel=0.1)
    assert source.held_bytes(["id"]) < 50_000
