"""`paceline bulk` as a process: what it is given, how it ends, what it tells."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests import models
from tests.harness import REPO, run_command
from tests.integration.bulk_jobs import files_of, write_rows
from tests.nursery import Forked
from tests.polling import eventually

ROWS = 2_000
HELD = """
import pathlib, time


class Model:
    inputs = {"INPUT0": ("FP32", [-1, 1])}
    outputs = {"OUTPUT0": ("FP32", [-1, 1])}

    def execute(self, inputs):
        while inputs["INPUT0"].max() == %d and not pathlib.Path(%r).exists():
            time.sleep(0.01)
        return {"OUTPUT0": inputs["INPUT0"]}
"""
"""Returns its input, but waits at the last row until there is a file."""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Returns its input, FP32 [-1, 1]. Beside it are rows for it."""
    write_rows(tmp_path / "in" / "a.parquet", [float(row) for row in range(ROWS)])
    return models.write(models.identity("FP32", ("batch", 1)), tmp_path / "m.onnx")


def given(model: Path, out: Path, *more: str) -> list[str]:
    """A job with an execution for each row, so that it takes a while."""
    flags = ["--map", "INPUT0=a", "--batch", "1", "--instances", "1", "--rows-per-part", "200", "--progress", "json"]
    return ["bulk", str(model), "-i", str(model.parent / "in"), "-o", str(out), *flags, *more]


def test_a_job_that_a_signal_stops_goes_on_to_the_same_bytes(model: Path, tmp_path: Path) -> None:
    go, model = tmp_path / "go", tmp_path / "held"
    (model / "1").mkdir(parents=True)
    (model / "1" / "model.py").write_text(HELD % (ROWS - 1, str(go)))
    go.touch()
    small = ("--rows-per-part", "50", "--batch", "10", "--allow-python-models=true")
    undisturbed = run_command(*given(model, tmp_path / "whole", *small, "--summary", str(tmp_path / "summary.json")))
    assert undisturbed.returncode == 0, undisturbed.stdout
    assert json.loads((tmp_path / "summary.json").read_text())["rows_written"] == ROWS
    go.unlink()  # the last of forty parts isn't finished before the signal comes, however late that is
    out = tmp_path / "out"
    stopped = Forked("paceline", given(model, out, *small), os.environ, REPO)
    with stopped.stderr as lines:
        eventually(lambda: any((out / "_paceline" / "units").glob("*.json")), "the first unit finished")
        stopped.send_signal(signal.SIGTERM)
        lines.read()
    assert stopped.wait(60) == 128 + signal.SIGTERM
    assert not (out / "_SUCCESS").exists()
    go.touch()
    assert run_command(*given(model, out, *small)).returncode == 0
    assert files_of(out) == files_of(tmp_path / "whole")
    written = pa.concat_tables([pq.read_table(part) for part in sorted(out.glob("part-*.parquet"))])
    assert written["OUTPUT0"].to_pylist() == [[float(row)] for row in range(ROWS)]


def test_dry_run_prints_what_it_would_do(model: Path, tmp_path: Path) -> None:
    said = run_command(*given(model, tmp_path / "out", "--dry-run"))
    assert (said.returncode, f"10 parts of up to 200 rows, parquet, in {tmp_path / 'out'}" in said.stdout) == (
        0,
        True,
    )
    assert not (tmp_path / "out").exists()
    refused = run_command(*given(model, tmp_path / "out", "--dry-run", "--keep", "b"))
    assert (refused.returncode, refused.stdout, "column 'b'" in refused.stderr) == (2, "", True)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--map", "INPUT0"], "expected INPUT=COLUMN, got 'INPUT0'"),
        (["--map", "INPUT0=b"], "expected 'INPUT0' once, got it twice"),
        (["--memory", "much"], "expected bytes, such as 2GiB or 500MB, got 'much'"),
        (["--memory", "9" * 400], "expected bytes, such as 2GiB or 500MB, got '999"),
        (["--ray-actor-gpus", "nan"], "--ray-actor-gpus: expected a number, got nan"),
        (["--memory", "1KiB"], "expected 16MiB or more"),
        (["--keep", '"last, first"'], "column 'last, first': expected one of the input's"),
        (["--keep", '"a'], "expected names with commas between them, those with a comma in double quotes"),
        (["--output", "q=nope"], "--output q=nope: expected an output of the model (OUTPUT0), got 'nope'"),
        (["--max-bad", "101%"], "expected a share or a number of rows, such as 1% or 100, got '101%'"),
        (["--shard", "3/3"], "got '3/3'"),
        (["--batch", "0"], "0 is not in the range 1<=x"),
        (["--server", "http://x"], "--server"),
        (["-i", "nope.parquet"], "nope.parquet: there is no such file"),
        (["-i", ""], "expected the path or URL of a file or folder, or a glob, got ''"),
        (["-i", str(REPO / "README.md")], "README.md: its name tells no format"),
        (["-i", str(REPO / "tests")], "tests: no input file in there"),
        (["-o", str(REPO)], "has files and no job"),
        (["-o", "/dev/null"], "/dev/null: expected a folder to write to, found a file"),
        (["--summary", "/nowhere/s.json"], "--summary /nowhere/s.json: expected a file that can be written"),
    ],
)
def test_flags_that_cant_be_used_are_refused(model: Path, tmp_path: Path, more: list[str], words: str) -> None:
    refused = run_command(*given(model, tmp_path / "out", *more))
    assert (refused.returncode, words in refused.stderr) == (2, True), refused.stderr
    assert not (tmp_path / "out" / "_paceline" / "job.json").exists()


def test_summary_that_cant_be_written_is_told(model: Path, tmp_path: Path) -> None:
    write_rows(tmp_path / "in" / "a.parquet", [1.0])
    done = run_command(*given(model, tmp_path / "out", "--summary", "/dev/full"))
    assert done.returncode == 1
    assert done.stdout.startswith("finished: 1 row in 1 part")
    assert done.stderr.splitlines()[-1].endswith("--summary /dev/full can't be written: No space left on device")


def test_a_job_that_fails_says_why_in_its_status(model: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    failed = run_command(*given(model, tmp_path / "out"))
    assert failed.returncode == 2, failed.stdout  # click looks before the job does
    write_rows(tmp_path / "in" / "a.parquet", [None])
    failed = run_command(*given(tmp_path / "none.onnx", tmp_path / "other"))
    assert (failed.returncode, "found nothing at" in failed.stderr) == (2, True)
    failed = run_command(*given(model, tmp_path / "other"))
    assert failed.returncode == 1
    assert "none of the first 1 rows could be computed" in failed.stderr


def test_variables_give_what_flags_dont(model: Path, tmp_path: Path) -> None:
    refused = run_command(*given(model, tmp_path / "out"), env={"PACELINE_BULK_MEMORY": "much"})
    assert (refused.returncode, "got 'much'" in refused.stderr) == (2, True), refused.stderr


def peak_bytes(tmp_path: Path, model: Path, rows: pa.Table, *flags: str) -> int:
    """The most memory that the process of a job of these rows has taken."""
    pq.write_table(rows, tmp_path / "rows.parquet")
    paths = ["bulk", str(model), "-i", str(tmp_path / "rows.parquet"), "-o", str(tmp_path / "out"), "--no-resume"]
    done = run_command(*paths, "--instances", "1", *flags, "--summary", str(tmp_path / "summary.json"))
    assert done.returncode == 0, done.stdout
    found: int = json.loads((tmp_path / "summary.json").read_text())["peak_memory_bytes"]
    return found


def test_pages_of_large_rows_stay_within_memory(tmp_path: Path) -> None:
    """Beyond what small rows take: what was asked for, and four times a page of a thousand rows."""
    model = models.write(models.identity("BYTES", ("batch", 1)), tmp_path / "m.onnx")
    rows, letters, peaks = 1_100, 40_000, list[int]()
    for size in (10, letters):
        texts = np.random.default_rng(0).bytes(rows * size // 2).hex()
        table = pa.table({"INPUT0": [texts[size * row : size * (row + 1)] for row in range(rows)]})
        flags = ["--memory", "64MiB", "--batch", "4", "--rows-per-part", "275"]
        peaks.append(peak_bytes(tmp_path, model, table, *flags))
    assert peaks[1] - peaks[0] < (64 << 20) + 4 * 1_024 * letters


def test_rows_that_become_large_stay_within_memory(tmp_path: Path) -> None:
    """Numbers of which 8,192 are made, 32 KiB."""
    model = models.write(models.mlp((1, 8_192)), tmp_path / "m.onnx")
    flags = ["--map", "INPUT0=a", "--memory", "64MiB", "--batch", "32", "--rows-per-part", "640"]
    peaks = [peak_bytes(tmp_path, model, pa.table({"a": np.ones(rows, np.float32)}), *flags) for rows in (1, 6_000)]
    assert peaks[1] - peaks[0] < 1.2 * (64 << 20)
