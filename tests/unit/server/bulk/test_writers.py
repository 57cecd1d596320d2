"""Output files: what was written is read back by others, and the same rows are the same bytes."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from paceline.server.bulk.values import BulkError
from paceline.server.bulk.writers import FORMATS, check_schema, open_writer

EMBEDDINGS = pa.schema([("id", pa.int64()), ("title", pa.string()), ("embedding", pa.list_(pa.float32(), 4))])
NUMBERS = pa.schema([("embedding", pa.list_(pa.list_(pa.float16(), 2), 3))])


HELD_BYTES = 1 << 30


def embeddings(begin: int, end: int) -> pa.RecordBatch:
    rows = range(begin, end)
    vectors = [[row / 3, row, -row, 0.5] for row in rows]
    return pa.record_batch([list(rows), [f"title {row % 3}" for row in rows], vectors], schema=EMBEDDINGS)


def written(output_format: str, chunks: Sequence[pa.RecordBatch], schema: pa.Schema = EMBEDDINGS) -> bytes:
    file = io.BytesIO()
    writer = open_writer(output_format, schema, file, HELD_BYTES)
    for chunk in chunks:
        writer.write(chunk)
    writer.finish()
    return file.getvalue()


CHUNKS = [embeddings(0, 3), embeddings(3, 3), embeddings(3, 10)]


def test_parquet_reads_back_in_order() -> None:
    assert pq.read_table(io.BytesIO(written("parquet", CHUNKS))).equals(pa.Table.from_batches(CHUNKS))


def test_json_lines_read_back_in_order() -> None:
    found = [json.loads(line) for line in written("jsonl", CHUNKS).splitlines()]
    assert [(row["id"], row["title"]) for row in found] == [(row, f"title {row % 3}") for row in range(10)]


def test_array_reads_back_in_order() -> None:
    whole = np.arange(60, dtype=np.float16).reshape(10, 3, 2)
    chunks = [
        pa.record_batch([pa.array(part.tolist(), NUMBERS.types[0])], schema=NUMBERS) for part in (whole[:4], whole[4:])
    ]
    found = np.load(io.BytesIO(written("npy", [*chunks, chunks[0].slice(2)], NUMBERS)))
    assert found.dtype == np.float16
    assert np.array_equal(found, np.concatenate([whole, whole[2:4]]))


@pytest.mark.parametrize(
    ("kind", "dtype"), [(pa.bool_(), np.bool_), (pa.uint8(), np.uint8), (pa.float64(), np.float64)]
)
def test_array_of_plain_numbers_has_one_axis(kind: pa.DataType, dtype: type) -> None:
    schema = pa.schema([("a", kind)])
    found = np.load(
        io.BytesIO(written("npy", [pa.record_batch([pa.array([1, 0, 1]).cast(kind)], schema=schema)], schema))
    )
    assert (found.dtype, found.tolist()) == (dtype, [1, 0, 1])


@pytest.mark.parametrize("output_format", FORMATS)
def test_file_without_rows_can_be_read(output_format: str) -> None:
    content = io.BytesIO(written(output_format, [], NUMBERS))
    if output_format == "parquet":
        assert pq.read_table(content).schema.equals(NUMBERS)
    elif output_format == "npy":
        assert np.load(content).shape == (0, 3, 2)
    else:
        assert content.getvalue() == b""


@pytest.mark.parametrize("output_format", FORMATS)
def test_same_rows_are_the_same_bytes(output_format: str) -> None:
    schema = NUMBERS if output_format == "npy" else EMBEDDINGS
    chunks = [pa.record_batch([[[[1, 2], [3, 4], [5, 6]]]], schema=NUMBERS)] if output_format == "npy" else CHUNKS
    copies = [
        pa.record_batch(pa.ipc.read_record_batch(chunk.serialize(), schema).columns, schema=schema) for chunk in chunks
    ]
    assert written(output_format, copies, schema) == written(output_format, chunks, schema)


@pytest.mark.parametrize(("held_bytes", "chunks"), [(HELD_BYTES, 5), (16_000_000, 2), (1, 1)])
def test_parquet_holds_one_row_group(tmp_path: Path, held_bytes: int, chunks: int) -> None:
    schema = pa.schema([("x", pa.float64())])
    rows = 1_000_000  # 8 MB
    before, most = pa.total_allocated_bytes(), 0
    with (tmp_path / "a.parquet").open("wb") as file:
        writer = open_writer("parquet", schema, file, held_bytes)
        for _ in range(20):
            writer.write(pa.record_batch([pc.random(rows)], schema=schema))
            most = max(most, pa.total_allocated_bytes() - before)
        writer.finish()
    groups = pq.read_metadata(tmp_path / "a.parquet")
    sizes = [groups.row_group(place).num_rows for place in range(groups.num_row_groups)]
    assert sizes == [chunks * rows] * (20 // chunks)
    assert most < (chunks + 2) * 8_000_000


@pytest.mark.parametrize("output_format", FORMATS)
def test_dropped_writer_leaves_a_closed_file_alone(output_format: str, tmp_path: Path) -> None:
    with (tmp_path / "a").open("wb") as file:
        writer = open_writer(output_format, NUMBERS, file, HELD_BYTES)
        writer.write(pa.record_batch([[[[1, 2], [3, 4], [5, 6]]]], schema=NUMBERS))
        writer.drop()
    del writer  # what goes wrong here would be a warning, which fails the test


@pytest.mark.parametrize(
    ("output_format", "schema", "reason"),
    [
        ("csv", NUMBERS, "output format csv: expected one of parquet, jsonl, npy"),
        ("npy", EMBEDDINGS, ".npy has one column, got id, title, embedding: keep none and name one output"),
        ("npy", pa.schema([("t", pa.string())]), ".npy has numbers of one shape for all rows, got t of string"),
        ("npy", pa.schema([("t", pa.list_(pa.int8()))]), "got t of list<item: int8>"),
        ("parquet", pa.schema([("t", pa.month_day_nano_interval())]), "parquet can't have these columns: .*interval"),
    ],
    ids=["unknown", "columns", "texts", "lists", "parquet"],
)
def test_impossible_columns_are_refused_at_start(output_format: str, schema: pa.Schema, reason: str) -> None:
    with pytest.raises(BulkError, match=reason):
        check_schema(output_format, schema)


@pytest.mark.parametrize("values", [[[1, 2], None], [[1, None], [2, 3]]])
def test_nulls_in_an_array_are_refused(values: list[object]) -> None:
    schema = pa.schema([("a", pa.list_(pa.int8(), 2))])
    with pytest.raises(BulkError, match="no nulls, got some in a"):
        written("npy", [pa.record_batch([pa.array(values, schema.types[0])], schema=schema)], schema)
