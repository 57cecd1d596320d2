"""A bulk job on a Ray cluster that loses actors and nodes ends with the same bytes as one in a single process.

The model waits at gates, one for each stage of the job, so it is known what is under way when something is killed.
"""

from __future__ import annotations

import fcntl
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import IO

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.lengths import LONG
from tests.polling import eventually
from tests.ray_cluster import RayCluster

pytestmark = [
    pytest.mark.skipif(not LONG, reason="Ray takes a minute or more to start on few CPUs: `make bulk-ray` runs it"),
    pytest.mark.timeout(1200),
]

NODES = 3
# In this order: the actor on the first node crashes, or another node is lost. The first node is left.
LOST = range(1, NODES)
UNIT_ROWS, STAGE_UNITS = 16, 6
UNITS_AT_ONCE = 3
"""Of an actor."""
STAGES = 1 + 2 * len(LOST) + 1

MODEL = """
import fcntl
import os

class Model:
    inputs = {{"x": ("FP32", [-1])}}
    outputs = {{"y": ("FP32", [-1])}}

    def execute(self, inputs):
        stage = int(inputs["x"].max()) // {rows}
        open(f"{folder}/waits-{{stage}}-{{os.getpid()}}", "w").close()
        with open(f"{folder}/gate-{{stage}}") as gate:
            fcntl.flock(gate, fcntl.LOCK_SH)
        return {{"y": inputs["x"] / 3}}
"""


class Gates:
    """Of the stages; open, unless closed by the test. Those that are closed open with the process, at the latest."""

    def __init__(self, folder: Path) -> None:
        self._paths = [folder / f"gate-{stage}" for stage in range(STAGES)]
        self._closed: dict[int, IO[str]] = {}
        for path in self._paths:
            path.touch()

    def close(self) -> None:
        """All but the first, whose rows show how large batches should be."""
        for stage, path in enumerate(self._paths[1:], 1):
            self._closed[stage] = path.open()
            fcntl.flock(self._closed[stage], fcntl.LOCK_EX)

    def open(self, stage: int) -> None:
        self._closed.pop(stage).close()

    def open_all(self) -> None:
        for stage in list(self._closed):
            self.open(stage)


class Job:
    def __init__(self, folder: Path) -> None:
        self.folder, self.gates = folder, Gates(folder)
        self.started: list[subprocess.Popen[str]] = []
        model = folder / "thirds" / "1" / "model.py"
        model.parent.mkdir(parents=True)
        model.write_text(MODEL.format(folder=folder, rows=UNIT_ROWS * STAGE_UNITS))
        (folder / "in").mkdir()
        rows = UNIT_ROWS * STAGE_UNITS * STAGES
        for number, (begin, end) in enumerate(((0, 5 * UNIT_ROWS), (5 * UNIT_ROWS, rows))):
            values = [None if row % 23 == 5 else row for row in range(begin, end)]
            table = pa.table({"id": range(begin, end), "x": pa.array(values, pa.float32())})
            pq.write_table(table, folder / "in" / f"{number}.parquet")

    def waits(self, pids: Collection[int], stage: int) -> bool:
        """Whether one of these processes is at the gate of this stage or a later one. Units of earlier ones may be
        behind it, as a model executes one batch at a time."""
        return any((self.folder / f"waits-{later}-{pid}").exists() for pid in pids for later in range(stage, STAGES))

    def start(self, out: Path, *more: str, cluster: RayCluster | None = None) -> subprocess.Popen[str]:
        options = f"--keep id --batch 8 --instances 1 --rows-per-part {UNIT_ROWS} --max-bad 100% --allow-python-models"
        command = [sys.executable, "-m", "paceline", "bulk", "thirds", "-i", "in/*.parquet", "-o", str(out)]
        command += [*options.split(), "--progress", "none", *more]
        if cluster is not None:
            command += ["--ray", cluster.address]
        environment = None if cluster is None else cluster.environment
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, cwd=self.folder, env=environment, stdout=pipe, stderr=pipe, text=True)
        self.started.append(process)
        return process


def marks(out: Path) -> dict[str, int]:
    """Of finished units, with which file their part is: one that is written again is another."""
    return {mark.stem: (out / f"part-{mark.stem}.parquet").stat().st_ino
            for mark in (out / "_paceline" / "units").glob("*.json")}  # fmt: skip


def written(out: Path) -> dict[str, bytes]:
    files = (path for path in out.rglob("*") if path.is_file() and "_paceline" not in path.parts)
    return {str(path.relative_to(out)): path.read_bytes() for path in files}


def await_in(process: subprocess.Popen[str], holds: Callable[[], bool], what: str) -> None:
    """Return as soon as `holds()`, or the job has ended, which is told by `ended`."""
    eventually(lambda: holds() or process.poll() is not None, what, 200)


def ended(process: subprocess.Popen[str], status: int = 0) -> str:
    """What the job has said, once it has ended with `status`."""
    out, err = process.communicate(timeout=200)
    assert process.returncode == status, out + err
    return out + err


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    job = Job(tmp_path_factory.mktemp("job"))
    yield job
    for process in job.started:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def expected(job: Job) -> dict[str, bytes]:
    """What one process writes without Ray."""
    ended(job.start(job.folder / "alone"))
    return written(job.folder / "alone")


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayCluster]:
    with RayCluster(*[1] * NODES) as cluster:
        yield cluster


def test_lost_actors_and_nodes_cost_only_time(job: Job, expected: dict[str, bytes], cluster: RayCluster) -> None:
    out = job.folder / "lost"
    job.gates.close()
    process = job.start(out, cluster=cluster)
    for stage in range(1, STAGES - 1):
        node = 0 if stage % 2 else LOST[stage // 2 - 1]
        await_in(process, lambda: job.waits(cluster.processes(node), stage), "a unit under way")  # noqa: B023
        before = marks(out)
        if node == 0:
            cluster.kill_actors(node)
        else:
            cluster.kill(node)
        job.gates.open(stage)
    job.gates.open_all()
    ended(process)
    # Whatever the last to end had finished without having told is done again.
    assert len(before.items() - marks(out).items()) <= UNITS_AT_ONCE
    assert written(out) == expected
    assert "_SUCCESS" in expected


def test_signal_ends_job_and_its_actors(job: Job, expected: dict[str, bytes], cluster: RayCluster) -> None:
    """On the node that is left; and started again, it goes on."""
    out = job.folder / "stopped"
    job.gates.close()
    process = job.start(out, cluster=cluster)
    await_in(process, lambda: job.waits(cluster.processes(0), 1), "a unit under way")
    before = marks(out)
    process.send_signal(signal.SIGTERM)
    assert "stopped: by SIGTERM" in ended(process, 128 + signal.SIGTERM)
    eventually(lambda: not any("Actor" in name for name in cluster.processes(0).values()), "no actors")
    job.gates.open_all()
    ended(job.start(out, cluster=cluster))
    assert before.items() <= marks(out).items()
    assert written(out) == expected


def test_actors_error_ends_the_job(job: Job, cluster: RayCluster) -> None:
    process = job.start(job.folder / "failed", "--on-bad-row", "fail", cluster=cluster)
    said = ended(process, 1)
    assert re.search(r"failed: in/\d.parquet, row \d+: column 'x'", said), said
    assert "Traceback" not in said
