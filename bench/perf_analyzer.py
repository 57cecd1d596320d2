"""NVIDIA's perf_analyzer as the load generator: it takes a fraction of the processor time that Python's gRPC takes.

Lives here: its command line, reading its report. Must not: decide when to use it. For closed loops only: in an open
loop, it counts latencies from when it actually sent, and so leaves out how long a stall made requests wait;
paceline load doesn't.

It measures windows until three of them agree; here any three do (`-s`), because rounds show how stable the numbers are.
Only if one of them saw no answer at all, they don't: UnstableError, and longer windows may help. It measures from its
first request on, so a warm-up takes another run.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
import resource
import subprocess
import time
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

from bench import models
from bench.scenario import Side

__all__ = ["FailedError", "UnstableError", "arguments", "find", "input_data", "read", "run"]

_WINDOWS = 3
_SPARE_S = 30.0
_ANY = "1000000"  # per cent that windows may differ
_UNSTABLE = ("Failed to obtain stable measurement", "No valid requests recorded within time interval")
_COUNT = re.compile(r"Request count: (\d+)")
_PERCENTILES = ("p50", "p90", "p99")


class FailedError(Exception):
    """perf_analyzer ended with an error, or didn't end."""


class UnstableError(FailedError):
    """Answers came too seldom for its windows."""


def find(folder: Path) -> Path | None:
    """The program, in `folder` or where the environment variable PERF_ANALYZER says; None if it isn't there."""
    path = Path(os.environ.get("PERF_ANALYZER") or folder / "perf_analyzer")
    return path if path.is_file() and os.access(path, os.X_OK) else None


def arguments(target: str, side: Side, clients: int, seconds: float, data: Path, report: Path) -> list[str]:
    """Its command-line arguments. Windows shorter than 100 ms are rounded up."""
    window_ms = max(100, round(1_000 * seconds / _WINDOWS))
    command = ["-u", target, "-i", "grpc", "-m", side.model, "--async", "--concurrency-range", str(clients)]
    command += ["-p", str(window_ms), "-s", _ANY, "-r", str(_WINDOWS), "-f", str(report)]
    if len(side.shapes) > 1:
        command += ["--input-data", str(data)]
    else:
        command += ["--shape", f"{models.INPUT}:{','.join(map(str, side.shapes[0]))}"]
    if side.transport == "stream":
        command += ["--streaming"]
    elif side.transport == "shm":
        output_bytes = models.MODELS[side.model].output_bytes(4)
        command += ["--shared-memory", "system", "--output-shared-memory-size", str(output_bytes)]
    return command


def input_data(shapes: Sequence[Sequence[int]]) -> str:
    """The file that makes it send these shapes in turn. Values must not look like integers."""
    entries = [{models.INPUT: {"content": [0.5] * prod(shape), "shape": list(shape)}} for shape in shapes]
    return json.dumps({"data": entries})


def read(report: str, output: str) -> dict[str, Any]:
    """Rate, percentiles, and the number of answers in all, from the CSV that it wrote and what it printed."""
    rows = list(csv.DictReader(io.StringIO(report.strip())))
    counted = _COUNT.search(output)
    if len(rows) != 1 or counted is None:
        raise FailedError(f"perf_analyzer: expected one line of results, got {len(rows)}: {output[-500:]}")
    times = {f"{name}_ms": float(rows[0][f"{name} latency"]) / 1_000 for name in _PERCENTILES}
    return {"requests_per_s": float(rows[0]["Inferences/Second"]), **times, "answers": int(counted[1])}


def run(binary: Path, target: str, side: Side, clients: int, seconds: float, folder: Path) -> dict[str, Any]:
    """Load `target`; returns what `read` finds, and the cores that perf_analyzer took itself. Writes into `folder`."""
    data, report = folder / "input-data.json", folder / "perf_analyzer.csv"
    data.write_text(input_data(side.shapes))
    began_s, cpu_s = time.perf_counter(), _children_cpu_s()
    output = _call(binary, arguments(target, side, clients, seconds, data, report), seconds)
    cores = (_children_cpu_s() - cpu_s) / (time.perf_counter() - began_s)
    found = read(report.read_text(), output)
    # Those in flight when the last window ended were served as well.
    return {**found, "answers": found["answers"] + clients, "cores": cores}


def _call(binary: Path, command: Sequence[str], seconds: float) -> str:
    # Its libraries lie beside it.
    environment = {**os.environ, "LD_LIBRARY_PATH": str(binary.parent)}
    try:
        done = subprocess.run(
            [str(binary), *command],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=3 * seconds + _SPARE_S,
            process_group=0,
        )
    except subprocess.TimeoutExpired:
        raise FailedError(f"perf_analyzer did not end: {' '.join(command)}") from None
    if done.returncode and any(one in done.stdout for one in _UNSTABLE):
        raise UnstableError(f"perf_analyzer: no answer in some of {_WINDOWS} windows within {seconds:g} s")
    if done.returncode:
        raise FailedError(f"perf_analyzer ended with {done.returncode}: {done.stdout.strip()[-500:]}")
    return done.stdout


def _children_cpu_s() -> float:
    """Processor time of children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
