"""A bulk job that is killed again and again, anywhere, ends with the same bytes as one that nobody disturbed."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import models
from tests.harness import REPO
from tests.lengths import LONG
from tests.nursery import Forked

KILLS = (3, 1, 2, 4)
"""Of one job, at the most. The more there are, the sooner is each, so that the job isn't finished before the last."""


class Job:
    """Two files, of which some rows are at fault, in units of 16 rows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "in").mkdir()
        models.write(models.row_sums(2), folder / "sums.onnx")
        for name, rows in (("a", 100), ("b", 70)):
            values = [None if row % 23 == 5 else [row / 3, row] for row in range(rows)]
            table = pa.table({"id": range(rows), "x": pa.array(values, pa.list_(pa.float32()))})
            pq.write_table(table, folder / "in" / f"{name}.parquet")

    def start(self, out: Path, point: str) -> int:
        arguments = ["bulk", self.folder / "sums.onnx", "-i", self.folder / "in" / "*.parquet", "-o", out]
        options = "--map INPUT0=x --keep id --batch 8 --instances 1 --rows-per-part 16 --max-bad 100% --progress none"
        process = Forked("tests.fault.dying", [*map(str, (out, point, *arguments)), *options.split()], os.environ, REPO)
        with process.stderr as stderr:
            stderr.read()
        return process.wait(100)


def visible(out: Path) -> dict[str, bytes]:
    """All files that a job's folder has for others, and for its next start."""
    hidden = {out / "_paceline" / "locks", out / "_paceline" / "tmp"}
    files = (path for path in out.rglob("*") if path.is_file() and path.parent not in hidden)
    return {str(path.relative_to(out)): path.read_bytes() for path in files}


def inodes(out: Path) -> dict[Path, int]:
    """Each finished unit's mark and which file its part is: a part that is written again is another."""
    marks = (out / "_paceline" / "units").glob("*.json")
    return {mark: (out / f"part-{mark.stem}.parquet").stat().st_ino for mark in marks}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    return Job(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def undisturbed(job: Job) -> tuple[dict[str, bytes], int]:
    """What is in the folder, and how many changes of it there are."""
    assert job.start(job.folder / "undisturbed", f"count {job.folder / 'changes'}") == 0
    return visible(job.folder / "undisturbed"), (job.folder / "changes").stat().st_size


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(37 if LONG else 1))
def test_killed_job_ends_with_the_same_bytes(
    job: Job, undisturbed: tuple[dict[str, bytes], int], tmp_path: Path, seed: int
) -> None:
    expected, changes = undisturbed
    out, chance = tmp_path / "out", random.Random(seed)
    assert {"_SUCCESS", "_bad/part-00000.jsonl", "part-00011.parquet"} <= expected.keys()
    kills = KILLS[seed % len(KILLS)]
    smallest = min(len(content) for name, content in expected.items() if name.startswith("part-"))
    points = [f"change {chance.randint(1, changes // kills)}" for _ in range(kills)]
    if seed % len(KILLS) == 0:
        points.append(f"byte {chance.randint(0, smallest - 1)}")
    finished: dict[Path, int] = {}
    for point in points:
        assert job.start(out, point) in (-signal.SIGKILL, -signal.SIGXFSZ), point
        there = visible(out)
        assert {name: there[name] for name in there if there[name] != expected.get(name)} == {}, point
        assert inodes(out).items() >= finished.items(), point
        finished = inodes(out)
    assert job.start(out, f"count {os.devnull}") == 0
    assert visible(out) == expected
    assert inodes(out).items() >= finished.items()
    assert os.listdir(out / "_paceline" / "tmp") == []
