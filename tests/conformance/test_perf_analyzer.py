"""perf_analyzer, NVIDIA's own load generator, measures our server as it would Triton, in each of its sending modes,
with and without sequences.

It asks for metadata and configuration, registers shared memory, sends, and asks for statistics before and after each of
its windows. What it reports about the server has to agree with the server's own numbers for the whole run, of which its
windows are a part. How fast it was doesn't matter here. `make witness` fetches it.
"""

from __future__ import annotations

import csv
import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc

from tests import models, state_models
from tests.cuda import stand_in
from tests.harness import REPO, ServerProcess

PROGRAM = Path(os.environ.get("PACELINE_PERF_ANALYZER", REPO / ".witness" / "perf_analyzer" / "perf_analyzer"))
pytestmark = pytest.mark.skipif(not PROGRAM.is_file(), reason=f"no {PROGRAM}: make witness, or PACELINE_PERF_ANALYZER")

# The first three windows of 200 ms in a row that have requests count, however much they differ: on a busy machine some
# have none.
BRIEF = ("-p", "200", "-r", "200", "-s", "1000000000")
PARTS = {
    "Server Queue": "queue",
    "Server Compute Input": "compute_input",
    "Server Compute Infer": "compute_infer",
    "Server Compute Output": "compute_output",
}
"""Its columns, and our fields."""

_SERVER = re.compile(
    r"^Request (?:concurrency|Rate): (\d+).*?Server: \n"
    r"\s+Inference count: (\d+)\n\s+Execution count: (\d+)\n\s+Successful request count: (\d+)\n"
    r"\s+Avg request latency: (\d+) usec \(overhead (\d+) usec \+ queue (\d+) usec \+ compute input (\d+) usec"
    r" \+ compute infer (\d+) usec \+ compute output (\d+) usec\)",
    re.DOTALL | re.MULTILINE,
)
_ONE_THREAD = (
    'instance_group { kind: KIND_CPU } parameters { key: "intra_op_thread_count" value { string_value: "1" } }'
)


@dataclass(frozen=True, slots=True)
class Level:
    """Its report on one concurrency or rate: the row of its table, and the server's part of its output."""

    row: Mapping[str, str]
    rows: int
    executions: int
    requests: int
    latency_us: int
    overhead_us: int
    parts_us: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Case:
    """How it is started, and what it has to report: levels, rows per request."""

    args: tuple[str, ...]
    levels: tuple[str, ...] = ("1",)
    model: str = "mlp"
    rows: int = 1
    column: str = "Concurrency"


SEQUENCES = ("--sequence-length", "5", "--shape", "INPUT0:1")
TEXTS = ("--shape", "INPUT0:3", "--string-length", "10")
SYSTEM = ("--shared-memory", "system")
CASES = {
    "unary": Case(("--concurrency-range", "1:4:3"), ("1", "4")),
    "asynchronous": Case(("--async", "--concurrency-range", "4"), ("4",)),
    "compressed": Case(("--grpc-compression-algorithm", "gzip")),
    "stream": Case(("--streaming", "--async", "--concurrency-range", "4"), ("4",)),
    "eight rows a request": Case(("-b", "8", "-x", "1", "--input-data", "zero"), rows=8),
    "counted windows": Case(("--measurement-mode", "count_windows", "--measurement-request-count", "40")),
    "rates": Case(("--request-rate-range", "50:100:50"), ("50", "100"), column="Request Rate"),
    "system shared memory": Case((*SYSTEM, "--concurrency-range", "2"), ("2",)),
    "texts": Case(TEXTS, model="texts"),
    "texts in system shared memory": Case((*TEXTS, *SYSTEM, "--output-shared-memory-size", "4096"), model="texts"),
    "sequences": Case((*SEQUENCES, "--async", "--concurrency-range", "4"), ("4",), "sums"),
    "sequences over a stream": Case(
        (*SEQUENCES, "--async", "--streaming", "--concurrency-range", "4:8:4"), ("4", "8"), "sums"
    ),
    "sequences at a rate": Case(
        (*SEQUENCES, "--request-rate-range", "100", "--num-of-sequences", "3", "--serial-sequences"),
        ("100",),
        "sums",
        column="Request Rate",
    ),
    "traced": Case(("--trace-level", "TIMESTAMPS", "--trace-rate", "10", "--trace-count", "5")),
}


def write_repository(root: Path) -> Path:
    models.write(models.mlp(), root / "mlp" / "1" / "model.onnx")
    models.write(models.identity("BYTES"), root / "texts" / "1" / "model.onnx")
    for name in ("mlp", "texts"):
        (root / name / "config.pbtxt").write_text(f"max_batch_size: 16 dynamic_batching {{ }} {_ONE_THREAD}")
    models.write(state_models.accumulator(dims=("batch", 1)), root / "sums" / "1" / "model.onnx")
    state = 'state { input_name: "STATE" output_name: "STATE_OUT" }'
    sequences = f"max_sequence_idle_microseconds: 60000000 oldest {{ }} {state}"
    (root / "sums" / "config.pbtxt").write_text(f"max_batch_size: 16 sequence_batching {{ {sequences} }} {_ONE_THREAD}")
    return root


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """All that it may ask for is switched on."""
    folder = tmp_path_factory.mktemp("server")
    args = ["--allow-client-shm=true", "--allow-remote-settings=true", f"--trace-config=file={folder}/trace.json"]
    with ServerProcess(write_repository(folder / "models"), args=args) as started:
        yield started


def analyze(
    target: str, report: Path, model: str, *args: str, libraries: Path = PROGRAM.parent
) -> subprocess.CompletedProcess[str]:
    """Run it to its end; it writes its table to the file `report`."""
    command = [str(PROGRAM), "-m", model, "-u", target, "-i", "grpc", "-f", str(report), "--verbose-csv", *args]
    folders = f"{libraries}:{PROGRAM.parent}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    env = os.environ | {"LD_LIBRARY_PATH": folders}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)


def levels_of(said: str, report: Path, column: str) -> dict[str, Level]:
    """By concurrency or rate: its table is ordered by throughput, its output in the order of measuring."""
    with report.open(encoding="utf-8", newline="") as file:
        table = {row[column]: row for row in csv.DictReader(file)}
    blocks = {name: [int(number) for number in numbers] for name, *numbers in _SERVER.findall(said)}
    assert set(table) == set(blocks), said
    return {name: Level(table[name], *block[:5], tuple(block[5:])) for name, block in blocks.items()}


def statistics(server: ServerProcess, model: str) -> Any:
    with tritonclient.grpc.InferenceServerClient(server.target) as client:
        (one,) = client.get_inference_statistics(model).model_stats
    return one


def batches(one: Any) -> dict[int, int]:
    """Executions by their rows."""
    return {batch.batch_size: batch.compute_infer.count for batch in one.batch_stats}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_perf_analyzer_report_is_complete_and_agrees_with_the_servers_statistics(
    server: ServerProcess, tmp_path: Path, case: Case
) -> None:
    before = statistics(server, case.model)
    done = analyze(server.target, tmp_path / "report.csv", case.model, *BRIEF, *case.args)
    after = statistics(server, case.model)
    assert done.returncode == 0, done.stdout + done.stderr
    levels = levels_of(done.stdout, tmp_path / "report.csv", case.column)
    assert tuple(levels) == case.levels
    for level in levels.values():
        check_level(level)
    check_run(list(levels.values()), before, after, case.rows)


def check_level(level: Level) -> None:
    """Throughput is positive, and no column is empty."""
    assert float(level.row["Inferences/Second"]) > 0
    assert level.rows >= level.executions > 0
    assert level.requests > 0
    assert tuple(int(level.row[column]) for column in PARTS) == level.parts_us
    # Each rounded down to microseconds: stacking and splitting may take less than one.
    assert int(level.row["Server Queue"]) > 0
    assert int(level.row["Server Compute Infer"]) > 0
    # The rest of the server's time and of the client's. A request counts in the window in which it is answered, and its
    # batch in the one in which it is executed, so the parts may exceed the whole: then it reports 0.
    left_us = max(0, level.latency_us - sum(level.parts_us))
    assert abs(level.overhead_us - left_us) <= 2 * len(PARTS)
    assert int(level.row["Network+Server Send/Recv"]) >= 0
    assert int(level.row["Avg latency"]) > 0


def check_run(levels: list[Level], before: Any, after: Any, rows: int) -> None:
    """The server has counted at least what the windows did, in requests of `rows` rows only."""
    ours, then = after.inference_stats, before.inference_stats
    requests = ours.success.count - then.success.count
    assert sum(level.requests for level in levels) <= requests
    assert sum(level.rows for level in levels) <= after.inference_count - before.inference_count == rows * requests
    executions = after.execution_count - before.execution_count
    assert sum(level.executions for level in levels) <= executions
    sizes = {size: count - batches(before).get(size, 0) for size, count in batches(after).items()}
    assert sum(sizes.values()) == executions
    assert all(size % rows == 0 for size, count in sizes.items() if count)
    assert ours.fail.count == then.fail.count
    for number, name in enumerate(PARTS.values()):
        here, there = getattr(ours, name), getattr(then, name)
        assert here.count - there.count == requests
        assert here.ns > there.ns
        assert sum(level.parts_us[number] * level.requests for level in levels) * 1000 <= 1.02 * (here.ns - there.ns)
    assert sum(level.latency_us * level.requests for level in levels) * 1000 <= 1.02 * (
        ours.success.ns - then.success.ns
    )


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """None of what it may ask for is switched on."""
    with ServerProcess(write_repository(tmp_path_factory.mktemp("closed") / "models")) as started:
        yield started


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (("-m", "nosuch"), "unknown model: 'nosuch' is not found"),
        (("-m", "mlp", "--shared-memory", "system"), "--allow-client-shm"),
        (("-m", "mlp", "--trace-level", "TIMESTAMPS"), "--allow-remote-settings"),
    ],
    ids=["model", "shared memory", "traces"],
)
def test_refused_request_ends_the_run_with_our_reason(
    closed: ServerProcess, tmp_path: Path, args: tuple[str, ...], reason: str
) -> None:
    done = analyze(closed.target, tmp_path / "report.csv", "mlp", *BRIEF, *args)
    assert done.returncode != 0
    assert reason in done.stdout + done.stderr
    assert analyze(closed.target, tmp_path / "report.csv", "mlp", *BRIEF).returncode == 0


def test_tensors_in_cuda_shared_memory(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """On a stand-in GPU, whose libraries both programs load."""
    libraries = stand_in.libraries(tmp_path_factory.mktemp("gpu"))
    models.write(models.mlp(), tmp_path / "models" / "mlp" / "1" / "model.onnx")
    config = "max_batch_size: 16 dynamic_batching { } instance_group { kind: KIND_GPU }"
    (tmp_path / "models" / "mlp" / "config.pbtxt").write_text(config)
    env = {"LD_LIBRARY_PATH": str(libraries)}
    with ServerProcess(tmp_path / "models", args=["--allow-client-shm=true"], env=env) as server:
        given = ("--shared-memory", "cuda", "--concurrency-range", "4", "--async")
        run = analyze(server.target, tmp_path / "report.csv", "mlp", *given, *BRIEF, libraries=libraries)
        assert run.returncode == 0, run.stdout + run.stderr
        level = levels_of(run.stdout, tmp_path / "report.csv", "Concurrency")["4"]
        assert level.requests > 0
        assert server.metrics()['nv_inference_request_failure{model="mlp",reason="BACKEND",version="1"}'] == 0
        with tritonclient.grpc.InferenceServerClient(server.target) as client:
            assert not client.get_cuda_shared_memory_status().regions
