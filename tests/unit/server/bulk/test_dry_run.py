"""What is said of a job before it begins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa

from paceline.clients.description import Batching, ModelDescription
from paceline.clients.messages import TensorMetadata
from paceline.scheduler.testing import ManualClock
from paceline.server.bulk.dry_run import Counted, DryRun, counted
from paceline.server.bulk.settings import BulkSettings
from paceline.server.bulk.values import BadRow, Chunk, FileIndex, Fixed, InputFile, Unit

FIXED = Fixed(unit_rows=100, chunk_rows=50, chunk_bytes=1 << 20, batch_rows=8, instances=2, intra_op_threads=1)


class Files:
    """A source of files with as many rows as `rows` says, of 10 bytes each; looking at one takes `takes_s`."""

    schema = pa.schema({"id": pa.int64(), "tokens": pa.list_(pa.int32()), "text": pa.string()})

    def __init__(self, rows: Sequence[int], takes_s: int = 0) -> None:
        self.files = [InputFile(place, f"{place}.parquet", 10 * count, 0) for place, count in enumerate(rows)]
        self.clock = ManualClock()
        self._rows, self._takes_ns = rows, takes_s * 1_000_000_000

    def index(self, file: InputFile, unit_rows: int) -> FileIndex:
        self.clock.advance(self._takes_ns)
        return FileIndex(self._rows[file.index])

    def held_bytes(self, columns: Sequence[str]) -> int:
        return 0

    def chunks(self, unit: Unit, columns: Sequence[str], fixed: Fixed) -> Iterator[Chunk]:
        raise NotImplementedError

    def place(self, file: InputFile, number: int) -> tuple[str, int]:
        raise NotImplementedError


def dry_run() -> DryRun:
    source = Files([250, 30])
    inputs = (TensorMetadata("ids", "INT32", (-1, -1)),)
    outputs = (TensorMetadata("vector", "FP32", (-1, 4)),)
    batching = Batching(8, True, (), 0, 0, 0, ())
    return DryRun(
        BulkSettings("models/words", ("in",), Path("out"), {"ids": "tokens"}, ("id",)),
        source,
        ModelDescription("words", ("1",), "onnxruntime_onnx", inputs, outputs, batching=batching),
        pa.schema({"id": pa.int64(), "vector": pa.list_(pa.float32(), 4)}),
        FIXED,
        counted(source, 100, source.clock.now_ns),
        sample_rows=50,
        bad=(),
        rows_per_s=2.0,
    )


def test_of_a_servers_model_nothing_is_said_as_of_ones_own() -> None:
    one = dry_run()
    text = replace(one, settings=replace(one.settings, server="host:1")).text()
    assert "batches of up to 8 rows, by host:1\n" in text
    assert " until now; up to 2.0 GiB more for rows" in text


def test_units_never_span_two_files() -> None:
    source = Files([250, 0, 100, 1])
    assert counted(source, 100, source.clock.now_ns) == Counted(351, 5, exact=True)


def test_rest_is_estimated_by_size_after_ten_seconds() -> None:
    source = Files([100, 200, 300, 600], takes_s=5)
    assert counted(source, 100, source.clock.now_ns) == Counted(1200, 12, exact=False)
    assert source.clock.now_ns() == 10_000_000_000


def test_one_slow_file_is_counted_whatever_it_takes() -> None:
    source = Files([100, 300], takes_s=60)
    assert counted(source, 100, source.clock.now_ns) == Counted(400, 4, exact=False)


def test_dry_run_says_model_columns_sizes_and_time() -> None:
    lines = dry_run().text().splitlines()
    memory = lines.pop(8)
    assert lines == [
        "model:     words; batches of up to 8 rows, 2 instances",
        "input:     2 files, 2.7 KiB, 280 rows",
        "  id      int64              kept",
        "  tokens  list<item: int32>  input ids, INT32 [any]",
        "  text    string             not read",
        "output:    4 parts of up to 100 rows, parquet, in out",
        "  id      int64",
        "  vector  fixed_size_list<item: float>[4]",
        "time:      about 2 min 20 s for 280 rows at 2.0 rows/s",
    ]
    assert memory.endswith("up to 2.0 GiB more for rows")


def test_estimates_are_called_so() -> None:
    text = replace(dry_run(), counted=Counted(1_000, 10, exact=False)).text()
    assert "about 1,000 rows" in text
    assert "output:    about 10 parts" in text


def test_shard_and_finished_parts_leave_less_to_do() -> None:
    one = dry_run()
    shard = replace(one, settings=replace(one.settings, shard=(1, 2)), counted=Counted(400, 4, True), units_before=2)
    assert "4 parts of up to 100 rows, parquet, in out; 2 are finished" in shard.text()
    assert shard.text().splitlines()[-1] == "time:      about 50 s for 100 rows at 2.0 rows/s, as shard 1 of 2"


def test_rows_at_fault_among_the_first_are_told() -> None:
    bad = [BadRow(3, "no text"), BadRow(5, "expected 3 values, got 4"), BadRow(6, "expected 3 values, got 5")]
    assert replace(dry_run(), bad=bad).text().splitlines()[-3:] == [
        "at fault:  3 of the first 50 rows",
        "           2  expected 3 values, got 4",
        "           1  no text",
    ]
