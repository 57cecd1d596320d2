"""What a bulk job says beforehand: that it would do what it does then, and that it has changed nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline.backends.errors import ExecutionError
from paceline.server.bulk import computing, memory
from paceline.server.bulk.values import BulkError
from tests.integration.bulk_jobs import BulkJob, write_rows


@pytest.fixture
def job(tmp_path: Path) -> BulkJob:
    write_rows(tmp_path / "in" / "a.parquet", [*(10.0 + row for row in range(18)), None])
    write_rows(tmp_path / "in" / "b.parquet", [50.0, 51.0])
    return BulkJob(tmp_path)


async def test_dry_run_leaves_nothing_behind(job: BulkJob) -> None:
    found = await job.job().dry_run()
    assert (found.counted.rows, found.counted.units, found.counted.exact) == (21, 4, True)
    assert (found.fixed.batch_rows, found.fixed.unit_rows, found.sample_rows) == (4, 8, 19)
    assert [row.number for row in found.bad] == [18]
    assert found.rows_per_s > 0
    assert not job.out.exists()
    assert await job.run() == (4, 20, 1)


async def test_dry_run_tells_rows_that_the_model_fails_on(job: BulkJob) -> None:
    job.memory.faults.raise_when(lambda inputs: bool(np.isin(inputs[0], (12.0, 13.0)).any()), ExecutionError("no, no"))
    found = await job.job().dry_run()
    assert [row.number for row in sorted(found.bad)] == [2, 3, 18]
    assert "no, no" in found.text()
    assert found.tried_rows == found.sample_rows


async def test_dry_run_tells_how_many_rows_it_tried(job: BulkJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(computing, "_LONGEST_S", 0.0)
    found = await job.job().dry_run()
    assert (found.tried_rows, found.sample_rows, [row.number for row in found.bad]) == (1, 19, [18])


async def test_dry_run_counts_what_is_finished(job: BulkJob) -> None:
    await job.run()
    for name in ("_SUCCESS", "part-00002.parquet"):
        (job.out / name).unlink()
    found = await job.job().dry_run()
    assert (found.fixed.unit_rows, found.units_before, found.counted.units) == (8, 3, 4)


async def test_small_first_file_leaves_parts_as_large(job: BulkJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_UNIT_S", 1e9)  # however slow this machine is
    write_rows(job.root / "in" / "a.parquet", [1.0])
    write_rows(job.root / "in" / "b.parquet", [float(row) for row in range(24_000)])
    found = await job.job(unit_rows=0).dry_run()
    assert 900 < found.fixed.unit_rows < 1_100


async def test_dry_run_refuses_what_the_job_would(job: BulkJob) -> None:
    await job.run()
    with pytest.raises(BulkError, match="was begun"):
        await job.job(keep=()).dry_run()
    with pytest.raises(BulkError, match="'idd'"):
        await job.job(keep=("idd",), resumes=False).dry_run()
    assert (job.out / "_SUCCESS").exists()


async def test_dry_run_of_no_rows_says_so(job: BulkJob) -> None:
    for name in ("a", "b"):
        write_rows(job.root / "in" / f"{name}.parquet", [])
    with pytest.raises(BulkError, match="no rows that can be read"):
        await job.job().dry_run()
