"""Bulk jobs: the rows of files through a model, whatever is wrong with some of them, and however often it is begun."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import numpy as np
import pytest

from paceline.backends.errors import ExecutionError
from paceline.server.bulk.job import Job
from paceline.server.bulk.settings import BulkSettings, MaxBad
from paceline.server.bulk.tally import Tally
from paceline.server.bulk.values import BulkError
from tests import models
from tests.integration.bulk_jobs import BulkJob, files_of, write_rows
from tests.polling import eventually_async


def has(*values: float) -> object:
    return lambda inputs: bool(np.isin(inputs[0], values).any())


@pytest.fixture
def job(tmp_path: Path) -> BulkJob:
    """21 rows in two files, of which the first has two units and a half."""
    write_rows(tmp_path / "in" / "a.parquet", [10.0 + row for row in range(19)])
    write_rows(tmp_path / "in" / "b.parquet", [50.0, 51.0])
    return BulkJob(tmp_path)


ROWS = [*((row, 10.0 + row) for row in range(19)), (0, 50.0), (1, 51.0)]


async def test_outputs_are_in_the_order_of_rows(job: BulkJob) -> None:
    assert await job.run() == (4, 21, 0)
    assert job.rows() == ROWS
    assert sorted(files_of(job.out)) == ["_SUCCESS", *(f"part-0000{unit}.parquet" for unit in range(4))]


async def test_units_never_span_two_input_files(job: BulkJob) -> None:
    await job.run()
    assert {*job.memory.batches} >= {(2,), (3,)}  # what is left of each; of all rows, only one would be


async def test_a_job_can_fail_on_its_first_bad_row(job: BulkJob) -> None:
    job.memory.faults.raise_when(has(51.0), ExecutionError("no such number"))
    with pytest.raises(BulkError, match=r"b\.parquet, row 1: .*no such number"):
        await job.run(fails_on_bad=True)
    assert [one[:2] for one in job.bad()] == [("b.parquet", 1)]


async def test_too_many_rows_at_fault_end_the_job(job: BulkJob) -> None:
    job.memory.faults.raise_when(has(10.0, 11.0, 12.0), ExecutionError("no such number"))
    with pytest.raises(BulkError, match=r"more rows are at fault than the 2 rows of --max-bad"):
        await job.run(max_bad=MaxBad(rows=2))


async def test_a_share_at_fault_ends_the_job_from_a_thousand_rows_on(job: BulkJob) -> None:
    write_rows(job.root / "in" / "a.parquet", [float(row) for row in range(3_000)])
    job.memory.faults.raise_when(has(10.0), ExecutionError("no such number"))
    with pytest.raises(BulkError, match=r"more rows are at fault than the 0 % of --max-bad; one of them, .*, row 10:"):
        await job.run(max_bad=MaxBad(share=0.0), unit_rows=2_000)


async def test_all_rows_are_judged_at_the_end(job: BulkJob) -> None:
    job.memory.faults.raise_when(has(10.0, 51.0), ExecutionError("no such number"))
    judged = r"of all 21 rows, 2 are at fault, more than the 9 % of --max-bad; every part is written"
    assert await job.run(max_bad=MaxBad(share=0.09), shard=(0, 2)) is None
    for shard in ((1, 2), (0, 2)):  # whoever finds that the others have finished
        with pytest.raises(BulkError, match=judged):
            await job.run(max_bad=MaxBad(share=0.09), shard=shard)
    assert "_SUCCESS" not in files_of(job.out)
    assert await job.run(max_bad=MaxBad(share=0.1)) == (4, 19, 2)
    assert job.tally.executions == 0


async def test_a_job_begins_whatever_its_first_rows_are(job: BulkJob) -> None:
    job.memory.faults.raise_when(has(*(10.0 + row for row in range(19))), ExecutionError("no such number"))
    assert await job.run() == (4, 2, 19)
    assert job.rows() == ROWS[19:]


async def test_a_job_whose_rows_all_fail_needs_leave(job: BulkJob) -> None:
    write_rows(job.root / "in" / "a.parquet", [1.0, 2.0, 3.0])
    (job.root / "in" / "b.parquet").unlink()
    job.memory.faults.raise_when(has(1.0, 2.0, 3.0), ExecutionError("no such number"))
    for max_bad in (MaxBad(), MaxBad(rows=2)):
        with pytest.raises(BulkError, match=r"none of the first 3 rows could be computed: .*no such number"):
            await job.run(max_bad=max_bad)
    assert not (job.out / "_paceline" / "job.json").exists()
    assert await job.run() == (1, 0, 3)


async def test_a_stopped_job_goes_on_to_the_same_bytes(job: BulkJob) -> None:
    job.memory.faults.raise_when(has(13.0), ExecutionError("no such number"))
    await job.run()
    undisturbed, all_batches = files_of(job.out), len(job.memory.batches)
    job.settings["out"] = "other"
    job.memory.gate.close()
    job.memory.gate.release(all_batches - 2)
    running = asyncio.create_task(job.run())
    await asyncio.to_thread(job.memory.gate.wait_entered, 2 * all_batches - 1)
    # Two executions are held, so that some units can't be finished; others are, each once it is on disk.
    await eventually_async(lambda: job.tally.units_done > 0, "a finished unit")
    running.cancel()
    job.memory.gate.open()
    await asyncio.gather(running, return_exceptions=True)
    assert "_SUCCESS" not in files_of(job.out)
    await job.run()
    assert 0 < job.tally.units_before < 4
    assert files_of(job.out) == undisturbed


async def test_a_finished_job_reads_no_input_again(job: BulkJob) -> None:
    totals = await job.run()
    for path in (job.root / "in").iterdir():
        times = path.stat()
        path.write_bytes(b"?" * times.st_size)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert await job.run() == totals
    assert (job.tally.units_before, job.tally.rows_read) == (4, 0)


async def test_another_job_isnt_taken_for_this_one(job: BulkJob) -> None:
    await job.run()
    before = files_of(job.out)
    with pytest.raises(BulkError, match=r"begun with --keep id, got none: .*--no-resume"):
        await job.run(keep=())
    (job.root / "m" / "1" / "more.bin").write_bytes(b"weights")
    with pytest.raises(BulkError, match=r"begun without the model's file 1/more\.bin"):
        await job.run()
    assert files_of(job.out) == before


async def test_a_copy_of_the_model_continues_the_job(job: BulkJob) -> None:
    totals = await job.run()
    (job.root / "m" / "config.pbtxt").touch()
    assert await job.run() == totals


async def test_shards_together_do_the_whole_job(job: BulkJob) -> None:
    assert await job.run(shard=(1, 3)) is None
    assert (job.tally.units, job.tally.units_done) == (1, 1)
    assert await job.run(shard=(0, 3)) is None
    assert await job.run(shard=(2, 3)) == (4, 21, 0)
    assert job.rows() == ROWS


async def test_parts_with_rows_at_fault_are_done_again_if_asked(job: BulkJob) -> None:
    job.memory.faults.raise_when(has(13.0), ExecutionError("no such number"))
    await job.run()
    job.memory.faults.clear()
    assert await job.run() == (4, 20, 1)
    assert await job.run(retries_bad=True) == (4, 21, 0)
    assert job.tally.units_done == 1
    assert (job.rows(), job.bad()) == (ROWS, [])


async def test_a_job_that_fails_later_keeps_what_is_finished(job: BulkJob) -> None:
    job.memory.faults.raise_when(has(51.0), ExecutionError("no such number"))
    with pytest.raises(BulkError):
        await job.run(fails_on_bad=True)
    job.memory.faults.clear()
    await job.run()
    assert job.tally.units_before == 3
    assert (job.rows(), job.bad()) == (ROWS, [])


async def test_a_batch_is_no_larger_than_the_model_takes(job: BulkJob) -> None:
    with pytest.raises(BulkError, match=r"batch.*expected at most 4, .*max_batch_size.*got 5"):
        await job.run(batch_rows=5)


async def test_rows_at_fault_are_told_and_nobody_elses(job: BulkJob) -> None:
    write_rows(job.root / "in" / "c.parquet", [1.0, None, 2.0, 3.0])
    job.memory.faults.raise_when(has(13.0, 51.0), ExecutionError("no such number"))
    assert await job.run() == (5, 22, 3)
    assert job.rows() == [*(row for row in ROWS if row[1] not in (13.0, 51.0)), (0, 1.0), (2, 2.0), (3, 3.0)]
    *failed, missing = job.bad()
    assert [(file, row) for file, row, _ in failed] == [("a.parquet", 3), ("b.parquet", 1)]
    assert all("no such number" in reason for _, _, reason in failed)
    assert missing[:2] == ("c.parquet", 1)
    assert "null" in missing[2]


async def test_a_mistake_in_columns_leaves_no_job_behind(job: BulkJob) -> None:
    with pytest.raises(BulkError, match=r"column 'idd': expected one of"):
        await job.run(keep=("idd",))
    await job.run()
    assert job.rows() == ROWS


async def test_files_of_text_without_rows_are_a_job_that_is_done(job: BulkJob) -> None:
    for text in ("", "a\n"):
        (job.root / "empty.csv").write_text(text)
        assert await job.run(inputs=(str(job.root / "empty.csv"),), keep=(), resumes=False) == (0, 0, 0)


async def test_input_without_rows_takes_any_batch(job: BulkJob) -> None:
    write_rows(job.root / "in" / "a.parquet", [])
    path = models.write(models.identity("FP32", ("batch", 1)), job.root / "m.onnx")
    settings = BulkSettings(str(path), (str(job.root / "in" / "a.parquet"),), job.out, {"INPUT0": "a"}, batch_rows=64)
    assert await Job(settings, Tally()).run() == (0, 0, 0)


async def test_a_job_goes_on_from_another_folder(job: BulkJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(job.root)
    totals = await job.run(inputs=("in",))
    monkeypatch.chdir(job.root / "in")
    assert await job.run(inputs=("../in",)) == totals
