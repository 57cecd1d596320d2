"""Arrow files and streams: every row once whatever the record batches, and memory that doesn't grow with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from paceline.server.bulk.sources import find_source
from paceline.server.bulk.values import BulkError
from tests.unit.server.bulk import reading

TABLE = pa.table(
    {
        "id": pa.array(range(100), pa.int64()),
        "text": pa.array([f"row {row}" * (row % 7) for row in range(100)], pa.string_view()),
        "kind": pa.array([f"kind {row // 30}" for row in range(100)]).dictionary_encode(),
        "tokens": pa.array([[[row] * (row % 5), []] for row in range(100)], pa.large_list(pa.large_list(pa.int32()))),
    }
)
PLAIN = pa.schema(
    {"id": pa.int64(), "text": pa.string(), "kind": pa.string(), "tokens": pa.list_(pa.list_(pa.int32()))}
)


def write(
    path: Path, table: pa.Table = TABLE, rows: int = 9, kind: str = "file", compression: str | None = None
) -> str:
    new = pa.ipc.new_file if kind == "file" else pa.ipc.new_stream
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.OSFile(str(path), "wb") as file, new(file, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rows)
    return str(path)


@pytest.mark.parametrize("kind", ["file", "stream"])
@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("rows", [9, 100])
def test_units_give_each_row_once(tmp_path: Path, kind: str, compression: str | None, rows: int) -> None:
    source = find_source([write(tmp_path / "a.arrow", TABLE, rows, kind, compression)])
    assert source.schema == PLAIN
    for unit_rows in (1, 7, 9, 1000):
        assert reading.rows(source, reading.fixed(unit_rows)) == TABLE.to_pylist()


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_units_read_in_any_order_are_equal(tmp_path: Path, kind: str) -> None:
    source = find_source([write(tmp_path / "a.feather", rows=30, kind=kind)])
    limits = reading.fixed(unit_rows=7)
    units, names = list(reading.units(source, 7)), ["tokens", "id"]
    in_order = [[chunk.table for chunk in source.chunks(unit, names, limits)] for unit in units]
    for unit in reversed(units):
        assert [chunk.table for chunk in source.chunks(unit, names, limits)] == in_order[unit.number]


def test_dictionaries_may_differ_between_batches(tmp_path: Path) -> None:
    parts = [pa.array(["a", "b", "a"]).dictionary_encode(), pa.array(["c", "b", "c"]).dictionary_encode()]
    path = write(tmp_path / "a.arrow", pa.table({"x": pa.chunked_array(parts)}), 3, "stream")
    assert reading.rows(find_source([path]), reading.fixed()) == [{"x": x} for x in "abacbc"]


def test_batch_of_any_size_costs_no_memory(tmp_path: Path) -> None:
    rows = 400_000
    vectors = pa.FixedSizeListArray.from_arrays(np.zeros(rows * 64, np.float32), 64)
    source = find_source([write(tmp_path / "a.arrow", pa.table({"x": vectors}), rows)])
    del vectors
    (unit,) = reading.units(source, rows)
    before, most = pa.total_allocated_bytes(), 0
    for chunk in source.chunks(unit, ["x"], reading.fixed(rows, 10_000, 4 << 20)):
        most = max(most, pa.total_allocated_bytes() - before, resident_file_bytes())
        assert chunk.table.nbytes <= 4 << 20
    assert most < 16 << 20  # of 100 MB


def resident_file_bytes() -> int:
    """How much of `a.arrow` is mapped into memory."""
    smaps = Path("/proc/self/smaps").read_text()
    after = smaps.partition("a.arrow\n")[2]
    return int(after.partition("Rss:")[2].split()[0]) << 10 if after else 0


@pytest.mark.parametrize(
    ("content", "words"), [(b"", "it is empty"), (b"FEA1" + bytes(99), ""), (b"ARROW1\0\0" * 9, "")]
)
def test_damaged_file_is_refused_by_name(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "a.arrow").write_bytes(content)
    with pytest.raises(BulkError, match=rf"a\.arrow can't be read: {words}"):
        _ = find_source([str(tmp_path)]).schema


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_file_that_is_cut_off_is_refused(tmp_path: Path, kind: str) -> None:
    path = Path(write(tmp_path / "a.arrow", kind=kind))
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(BulkError, match=r"a\.arrow can't be read"):
        reading.rows(find_source([str(path)]), reading.fixed())


def test_file_with_other_schema_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a.arrow", pa.table({"x": [1]}))
    write(tmp_path / "b.arrow", pa.table({"x": [1.0]}), kind="stream")
    source = find_source([str(tmp_path)])
    with pytest.raises(BulkError, match=r"b\.arrow: column 'x': expected int64, as in the first file; got double"):
        source.index(source.files[1], 10)
