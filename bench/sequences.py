"""Sequences: what a server makes of 64 of them at once on one thread, and what its scheduler takes for a step.

Lives here: the loads, what bounds them, the ratios. Must not: assert. In each round all loads follow each other; every
other round goes backwards.

1. `vad` (needs `--silero`) and `fixed`: 64 streams in closed loops. `of_joined`: over 64 rows with their states joined
   for good, nothing but a session, in a process without a server. `inside_of_joined`: the same over what this
   server makes of the steps' bytes without gRPC. `of_plain`: over what the server makes of
   requests as large for a model that does nothing and remembers nothing. `of_one`: over one stream in a closed loop.
   Before that, each of 64 sequences is compared with the model run alone.
2. `ages`: 64 streams in closed loops, of sequences of random lengths, whose state grows with each step. `of_exact`:
   what the server makes of them if it fills states up to share batches, over batches of equal states. Both are compared
   with the model alone, too.
3. `triton` (needs perf_analyzer and Triton's server): the same Python model under the strategy `oldest`, in both.
4. `costs`: `bench.sequence_costs`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped,unused-ignore]

from bench import perf_analyzer, sequence_costs, sequence_models
from bench.load import closed
from bench.report import Rounds
from bench.sequence_models import EXACT, FIXED, GROWING, PLAIN, PYTHON, VAD, WIDE, Recurrent
from bench.sessions import open_session
from bench.steps import BenchError, run_module
from bench.subjects import counted, cpu_s
from paceline.clients import AsyncInferenceClient
from tests.differential import triton_process
from tests.harness import REPO, ServerProcess, write_identity
from tests.wire import Array

__all__ = [
    "STREAMS",
    "difference",
    "joined",
    "joined_per_s",
    "load",
    "main",
    "measure",
    "measure_ages",
    "measure_triton",
]

STREAMS = 64
_PARTS = ("vad", "fixed", "ages", "triton", "costs")
_SILERO = REPO / ".witness" / "silero_vad.onnx"
_ANALYZER = REPO / ".witness" / "perf_analyzer"
_BY_NAME = {model.name: model for model in (VAD, FIXED, WIDE)}
_WARMUP_S = 2.0
_SPARE_S = 60.0

Step = Callable[[], float]


def joined_per_s(model: Recurrent, file: Path, seconds: float, device: str) -> float:
    """Steps per second of `STREAMS` rows in one `run_with_iobinding` after the other, with their states joined for
    good, on the device."""
    session = open_session(file, device)
    binding = session.io_binding()
    (inputs,) = zip(*(model.inputs(number, 1) for number in range(STREAMS)), strict=True)
    feeds = {
        name: np.concatenate([one[name] for one in inputs]) if inputs[0][name].ndim else inputs[0][name]
        for name in inputs[0]
    }
    first = np.ascontiguousarray(np.repeat(model.first, STREAMS, model.axis))
    states, runs = [ort.OrtValue.ortvalue_from_numpy(first, device, 0) for _ in range(2)], 0
    began_s, until_s = 0.0, time.perf_counter() + _WARMUP_S
    while not began_s or time.perf_counter() < until_s:
        for name, array in feeds.items():
            binding.bind_cpu_input(name, array)
        binding.bind_ortvalue_input(model.state[0], states[0])
        binding.bind_output(model.output)
        binding.bind_ortvalue_output(model.state[1], states[1])
        session.run_with_iobinding(binding)
        binding.get_outputs()[0].numpy()
        states.reverse()
        runs += 1
        if not began_s and time.perf_counter() > until_s:
            began_s, runs = time.perf_counter(), 0
            until_s = began_s + seconds
    return runs * STREAMS / (time.perf_counter() - began_s)


async def difference(model: Recurrent, file: Path, target: str, steps: int) -> float:
    """The largest difference between what 64 sequences at once get over streams and what each gets alone."""

    async def run(client: AsyncInferenceClient, given: Sequence[dict[str, Array]]) -> list[Array]:
        return [answer[model.output] async for answer in client.sequence(model.name).infer_all(given)]

    given = [model.inputs(number, steps) for number in range(STREAMS)]
    async with AsyncInferenceClient(target, transport="stream") as client:
        together = await asyncio.gather(*(run(client, each) for each in given))
    with ThreadPoolExecutor() as pool:
        expected = list(pool.map(partial(sequence_models.alone, model, file), given))
    return float(np.max(np.abs(np.array(together) - np.array(expected))))


def measure(
    files: Mapping[str, Path], rounds: int, seconds: float, steps: int, report: Callable[[dict[str, Any]], None]
) -> None:
    """All rounds with the models of these ONNX files, by name; each is reported. Raises BenchError."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        for model in files:
            sequence_models.add(_BY_NAME[model], files[model], folder / "models")
        write_identity(folder / "models", PLAIN, dims="[ -1 ]", rows=STREAMS)
        args = ["--model-control-mode=none"]
        server = stack.enter_context(ServerProcess(folder / "models", args=args, fresh=True))
        for model in files:
            recurrent = _BY_NAME[model]
            requests = sequence_models.messages(recurrent, 0, steps)
            plain = sequence_models.plain_message(recurrent)
            apart = asyncio.run(difference(recurrent, files[model], server.target, steps))
            for number in range(rounds):
                found = _round(server, model, files[model], requests, plain, seconds, backwards=bool(number % 2))
                report({"model": model, "difference": apart, **found})


def _round(
    server: ServerProcess,
    model: str,
    file: Path,
    requests: Sequence[bytes],
    plain: bytes,
    seconds: float,
    *,
    backwards: bool,
) -> dict[str, float]:
    found: dict[str, float] = {}

    def streams() -> float:
        before, before_s = counted(server, model), cpu_s(server.pid) or 0.0
        told = load(server.target, requests, STREAMS, seconds, steps=len(requests))
        rows, executions = (new - old for new, old in zip(counted(server, model), before, strict=True))
        found["rows_per_batch"] = rows / executions
        found["server_cpu_us"] = 1e6 * ((cpu_s(server.pid) or 0.0) - before_s) / rows
        found["load_cores"] = told["cores"]
        return float(told["requests_per_s"])

    loads: list[tuple[str, Step]] = [
        ("joined", lambda: joined(model, file, seconds)),
        ("inside", lambda: _inside(model, file, seconds)),
        ("streams", streams),
        ("plain", lambda: float(load(server.target, [plain], STREAMS, seconds, steps=None)["requests_per_s"])),
        ("one", lambda: float(load(server.target, requests, 1, seconds, steps=len(requests))["requests_per_s"])),
    ]
    for name, measured in reversed(loads) if backwards else loads:
        found[name] = measured()
    return {
        **found,
        "of_joined": found["streams"] / found["joined"],
        "inside_of_joined": found["inside"] / found["joined"],
        "of_plain": found["streams"] / found["plain"],
        "of_one": found["streams"] / found["one"],
    }


def measure_ages(file: Path, rounds: int, seconds: float, steps: int, report: Callable[[dict[str, Any]], None]) -> None:
    """One server has the growing model twice, filled up and not, loaded in turn with sequences of up to twice `steps`
    steps."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name, ExitStack() as stack:
        folder, ways = Path(name), {"shared": GROWING, "exact": EXACT}
        for model in ways.values():
            sequence_models.add(model, file, folder)
        args = ["--model-control-mode=none"]
        server = stack.enter_context(ServerProcess(folder, args=args, fresh=True))
        apart = max(asyncio.run(difference(one, file, server.target, steps)) for one in ways.values())
        for number in range(rounds):
            found: dict[str, Any] = {"model": "ages", "difference": apart}
            for way in ways if number % 2 else reversed(ways):
                model = ways[way]
                before = counted(server, model.name)
                requests = sequence_models.messages(model, 0, 2 * steps)
                told = load(server.target, requests, STREAMS, seconds, steps=(1, 2 * steps))
                rows, executions = (new - old for new, old in zip(counted(server, model.name), before, strict=True))
                found |= {way: float(told["requests_per_s"]), f"{way}_rows_per_batch": rows / executions}
            report({**found, "of_exact": found["shared"] / found["exact"]})


def joined(model: str, file: Path, seconds: float, device: str = "cpu") -> float:
    """`joined_per_s` in a process of its own. Raises BenchError."""
    told = run_module(
        *("sequences", "--joined", model, str(file), "--seconds", str(seconds), "--device", device),
        timeout_s=seconds + _SPARE_S,
    )
    return float(told["steps_per_s"])


def _inside(model: str, file: Path, seconds: float) -> float:
    told = run_module("sequences_inside", model, str(file), "--seconds", str(seconds), timeout_s=seconds + _SPARE_S)
    return float(told["steps_per_s"])


def load(
    target: str,
    requests: Sequence[bytes],
    clients: int,
    seconds: float,
    *,
    steps: int | tuple[int, int] | None,
    processes: int = 1,
) -> dict[str, Any]:
    """`clients` streams in closed loops, each with sequences of so many `steps`. Raises BenchError."""
    warmup_s = min(_WARMUP_S, seconds)
    return closed(target, requests, clients, seconds, warmup_s, stream=True, steps=steps, processes=processes)


def measure_triton(
    analyzer: Path, rounds: int, seconds: float, delay_s: float, report: Callable[[dict[str, Any]], None]
) -> None:
    """Both servers up, each loaded in turn by perf_analyzer with 64 sequences, over calls and over a stream."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        for server in ("paceline", "triton"):
            sequence_models.add_python(folder / server, delay_s, for_triton=server == "triton")
        (folder / "files").mkdir()
        args = ["--model-control-mode=none", "--allow-python-models=true"]
        ours = stack.enter_context(ServerProcess(folder / "paceline", args=args, fresh=True))
        theirs = stack.enter_context(triton_process.TritonProcess(folder / "triton", folder / "files"))
        targets = [("paceline", ours.target), ("triton", theirs.target)]
        for number in range(rounds):
            for way in ("calls", "stream"):
                found: dict[str, Any] = {"model": f"{PYTHON} {way}", "delay_ms": 1e3 * delay_s}
                for server, target in reversed(targets) if number % 2 else targets:
                    try:
                        found[server] = analyze(analyzer, target, way, seconds, folder)
                    except BenchError as error:
                        # A rival that breaks is a finding: under load, some of its streams end without all answers.
                        if server == "paceline":
                            raise
                        found[server] = {"failed": str(error)}
                if "failed" not in found["triton"]:
                    found["of_triton"] = found["paceline"]["requests_per_s"] / found["triton"]["requests_per_s"]
                report(found)


def analyze(analyzer: Path, target: str, way: str, seconds: float, folder: Path) -> dict[str, Any]:
    """What perf_analyzer finds with 64 sequences of about 50 steps."""
    report = folder / "perf_analyzer.csv"
    command = [str(analyzer), "-u", target, "-i", "grpc", "-m", PYTHON, "--async", "-f", str(report)]
    command += ["--concurrency-range", str(STREAMS), "--sequence-length", "50"]
    command += ["-p", str(max(100, round(1_000 * seconds / 3))), "-s", "1000000", "-r", "3"]
    command += ["--streaming"] if way == "stream" else []
    environment = {**os.environ, "LD_LIBRARY_PATH": str(analyzer.parent)}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=3 * seconds + _SPARE_S)
    except subprocess.TimeoutExpired:
        raise BenchError(f"perf_analyzer did not end: {' '.join(command)}") from None
    if done.returncode:
        raise BenchError(f"perf_analyzer ended with {done.returncode}: {(done.stdout + done.stderr)[-500:]}")
    return perf_analyzer.read(report.read_text(), done.stdout)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.sequences", description=__doc__.partition("\n")[0])
    parser.add_argument("parts", nargs="*", choices=[*_PARTS, []], help="by default all for which everything is there")
    parser.add_argument("--rounds", type=int, default=5, help="medians are reported (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=5.0, help="per load (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100, help="of each sequence (default: %(default)s)")
    parser.add_argument("--delay-ms", type=float, default=10.0, help="of the Python model (default: %(default)s)")
    parser.add_argument("--silero", type=Path, default=_SILERO, help="silero_vad.onnx (default: %(default)s)")
    parser.add_argument("--joined", nargs=2, metavar=("MODEL", "FILE"), help="only the best that could be had, as JSON")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="with --joined (default: %(default)s)")
    got = parser.parse_args(arguments)
    if got.joined:
        name, file = got.joined
        print(json.dumps({"steps_per_s": joined_per_s(_BY_NAME[name], Path(file), got.seconds, got.device)}))
        return
    analyzer = perf_analyzer.find(_ANALYZER)
    there = {
        "vad": got.silero.is_file(),
        "fixed": True,
        "ages": True,
        "triton": analyzer is not None and not triton_process.missing(),
        "costs": True,
    }
    parts = got.parts or [part for part in _PARTS if there[part]]
    if lacking := [part for part in parts if not there[part]]:
        sys.exit(f"{', '.join(lacking)}: not installed; see --silero, make witness and make bench-rivals")
    rounds = Rounds()
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        files = {"vad": got.silero, "fixed": Path(folder) / "fixed.onnx"}
        sequence_models.write_fixed(Path(folder))
        if wanted := {part: files[part] for part in parts if part in files}:
            measure(wanted, got.rounds, got.seconds, got.steps, rounds.add)
        if "ages" in parts:
            growing = sequence_models.write_growing(Path(folder))
            measure_ages(growing, got.rounds, got.seconds, got.steps, rounds.add)
    if "triton" in parts:
        assert analyzer is not None
        measure_triton(analyzer, got.rounds, got.seconds, got.delay_ms / 1e3, rounds.add)
    if "costs" in parts:
        print(json.dumps(sequence_costs.costs(got.seconds)), flush=True)
    keys = ("difference", "inside_of_joined", "of_joined", "of_plain", "of_one", "rows_per_batch", "of_exact",
            "shared_rows_per_batch", "exact_rows_per_batch", "of_triton")  # fmt: skip
    print(f"\n{rounds.medians(keys, 'model')}")


if __name__ == "__main__":
    main()
