"""What people are told of a job: numbers as they read them, what is said before it begins, and once it has ended."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from paceline.clients.description import Batching, ModelDescription
from paceline.clients.messages import TensorMetadata
from paceline.scheduler.testing import ManualClock
from paceline.server.bulk.report import Counted, DryRun, Outcome, Summary, amount, counted, duration, several, size
from paceline.server.bulk.settings import BulkSettings
from paceline.server.bulk.tally import Tally
from paceline.server.bulk.values import BadRow, Chunk, FileIndex, Fixed, InputFile, Unit


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.6, "1 min 0 s"), (62, "1 min 2 s"), (3_700, "1 h 1 min"), (90_000, "1 d 1 h")],
)
def test_durations_have_two_units_at_most(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [(0, "0 bytes"), (1023, "1,023 bytes"), (1536, "1.5 KiB"), (300 << 20, "300 MiB"), (5_000 << 40, "5,000 TiB")],
)
def test_sizes_have_three_digits_or_so(size_bytes: int, text: str) -> None:
    assert size(size_bytes) == text


def test_decimals_stand_where_they_say_something() -> None:
    assert [amount(number) for number in (0.25, 99.94, 100.4, 12_345.6)] == ["0.2", "99.9", "100", "12,346"]


def test_one_of_something_is_no_plural() -> None:
    assert [several(count, "part") for count in (0, 1, 1_000)] == ["0 parts", "1 part", "1,000 parts"]


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
        tried_rows=50,
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


def test_instances_that_are_not_chosen_are_as_configured() -> None:
    text = replace(dry_run(), fixed=replace(FIXED, instances=0)).text()
    assert "batches of up to 8 rows, instances as configured\n" in text


def test_time_that_nothing_tells_is_called_unknown() -> None:
    last = replace(dry_run(), rows_per_s=0.0).text().splitlines()[-1]
    assert last == "time:      unknown, as none of the first could be computed, for 280 rows"


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
    some = replace(dry_run(), bad=bad, tried_rows=20).text().splitlines()
    assert some[-3] == "at fault:  3 of the first 50 rows, of which 20 were tried"


def summary(**counts: float) -> Summary:
    """Of a job of 4 units with 1000 rows each, all planned, with `counts`."""
    tally = Tally(units=4, rows=4000, planned_share=1)
    counts = {"rows_executed": counts.get("rows_read", 0), **counts}
    for name, count in counts.items():
        setattr(tally, name, count)
    return Summary(Outcome.FINISHED, "", BulkSettings("magika", (), Path("out")), 90.0, 80.0, 300 << 20, tally)


def whole() -> Summary:
    return summary(
        units_done=4, rows_read=4000, rows_written=4000, executions=160, rows_executed=4000, elements=100,
        filled_elements=5,
    )  # fmt: skip


def test_finished_job_says_rows_speed_batches_and_place() -> None:
    assert whole().text().splitlines() == [
        "finished: 4,000 rows in 4 parts",
        "this time: 4,000 rows in 1 min 20 s, 50.0 rows/s, 25.0 rows/batch, 5.0 % padding",
        "in all: 1 min 30 s, 300 MiB of memory at most",
        "output: out",
    ]


def test_all_rows_at_fault_are_a_hundred_per_cent() -> None:
    one = summary(units_done=4, rows_read=10)
    one.tally.add_bad([BadRow(place, "no text") for place in range(10)])
    assert one.text().splitlines()[2] == "at fault: 10 rows (100 %)"


def test_rows_at_fault_come_with_their_commonest_reasons() -> None:
    one = summary(units_done=4, rows_read=4000)
    for letter, times in zip("abcdef", (1, 20, 3, 4, 5, 7), strict=True):
        one.tally.add_bad([BadRow(place, f"reason {letter}") for place in range(times)])
    lines = one.text().splitlines()
    assert lines[2] == "at fault: 40 rows (1 %)"
    assert [line.split(maxsplit=1) for line in lines[3:9]] == [
        ["20", "reason b"],
        ["7", "reason f"],
        ["5", "reason e"],
        ["4", "reason d"],
        ["3", "reason c"],
        ["1", "other reasons"],
    ]
    assert lines[10] == "output: out, rows at fault: out/_bad"
    assert "--retry-bad" in lines[11]


def test_second_run_of_finished_job_says_so() -> None:
    one = summary(units_before=4, rows_before=4000, rows_bad_before=2)
    lines = one.text().splitlines()
    assert lines[0] == "finished: 4,000 rows in 4 parts, all of them earlier: there was nothing to do"
    assert lines[1] == "at fault: 2 rows (0.05 %, 2 of them found earlier)"


def test_resumed_job_tells_its_own_speed() -> None:
    one = summary(units_before=3, rows_before=3000, units_done=1, rows_read=1000)
    assert one.text().splitlines()[:2] == [
        "finished: 4,000 rows in 4 parts",
        "this time: 1,000 rows in 1 min 20 s, 12.5 rows/s",
    ]


def test_stopped_job_says_how_to_go_on() -> None:
    one = replace(summary(units_done=1, rows_read=1700), outcome=Outcome.STOPPED, why="by SIGTERM")
    lines = one.text().splitlines()
    assert lines[0] == "stopped: by SIGTERM"
    assert lines[-1] == "next: start it again to go on; parts that are finished, 1 of 4, won't be computed again"


def test_stopped_job_counts_what_was_computed() -> None:
    one = replace(summary(rows_read=2492, rows_executed=1890, rows_bad=10), outcome=Outcome.STOPPED, why="by SIGINT")
    assert one.text().splitlines()[1:3] == [
        "this time: 1,900 rows in 1 min 20 s, 23.8 rows/s",
        "at fault: 10 rows (0.401 % of the 2,492 read)",
    ]
    assert json.loads(one.as_json())["rows_per_s"] == 1900 / 80


def test_job_that_failed_before_its_plan_names_no_total() -> None:
    one = replace(summary(planned_share=0.5, units_done=2), outcome=Outcome.FAILED, why="no room")
    assert one.text().splitlines()[0] == "failed: no room"
    assert "parts that are finished, 2, won't" in one.text()


def test_job_that_failed_at_once_advises_nothing() -> None:
    one = replace(summary(), outcome=Outcome.FAILED, why="no such file")
    assert [line.partition(":")[0] for line in one.text().splitlines()] == ["failed", "in all", "output"]


def test_finished_shard_says_that_others_are_left() -> None:
    settings = BulkSettings("magika", (), Path("out"), shard=(2, 8))
    one = replace(whole(), outcome=Outcome.SHARD_FINISHED, settings=settings)
    assert one.text().splitlines()[-1] == "next: this was shard 2 of 8; _SUCCESS appears with the last part"


def test_job_too_short_for_a_speed_claims_none() -> None:
    one = replace(whole(), computing_s=0.0)
    assert "too short to tell a speed" in one.text()
    assert json.loads(one.as_json())["rows_per_s"] is None


def test_json_has_all_numbers() -> None:
    one = whole()
    one.tally.add_bad([BadRow(3, "no text")])
    assert json.loads(one.as_json()) == {
        "outcome": "finished",
        "why": "",
        "model": "magika",
        "out": "out",
        "shard": 0,
        "shards": 1,
        "units": 4,
        "units_before": 0,
        "units_done": 4,
        "rows_before": 0,
        "rows_bad_before": 0,
        "rows_read": 4000,
        "rows_computed": 4000,
        "rows_written": 4000,
        "rows_bad": 1,
        "reasons": [{"reason": "no text", "rows": 1}],
        "executions": 160,
        "rows_per_batch": 25.0,
        "padding": 0.05,
        "rows_per_s": 50.0,
        "elapsed_s": 90.0,
        "computing_s": 80.0,
        "peak_memory_bytes": 300 << 20,
    }
