"""MLPerf's LoadGen as the load: its scenarios Offline and Server, on models of the shapes of ResNet-50 and BERT-base.

Lives here: the models, what is compared, the search for the highest rate, a table. Must not: send or check answers,
which `loadgen_client` does in a process of its own for each run. These are LoadGen's scenarios on models with random
weights, reduced for a core or two (`gpu_models.SMALL`): no results of MLPerf.

1. `offline`: all samples are there at once. Samples per second over `session.run` at its best batch size, one thread.
2. `server`: samples at random, as Poisson has it. The highest rate that LoadGen calls VALID, which means that 99 % were
   answered within the bound; over the same `session.run`, and over the same server with batches of one row.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench import gpu_models
from bench.gpu_models import GpuModel, Sizes
from bench.loadgen_client import HOME
from bench.sessions import open_session
from bench.stats import spread
from bench.steps import BenchError, run_module
from tests.harness import ServerProcess

__all__ = ["highest", "main", "measure", "run", "samples"]

_ROWS = 32
_SAMPLES = 64
_UNDER_WAY = 4 * _ROWS
_STEPS = 5  # of the search: a rate is known to 1/32 of what session.run makes
_SPARE_S = 120.0
_ALONE = "_alone"
_KEYS = ("offline_of_best", "server_of_best", "server_of_alone")


def highest(is_valid: Callable[[float], bool], most: float, steps: int) -> float:
    """The highest valid rate below `most`, to `most` / 2**steps, by bisection; 0 if none that was tried is."""
    low, high = 0.0, most
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if is_valid(middle) else (low, middle)
    return low


def samples(model: GpuModel, file: Path, folder: Path) -> None:
    """Requests of one row for the model, in `folder`, with the outputs that `session.run` has for each alone."""
    folder.mkdir()
    session = open_session(file, threads=0)
    expected = []
    for number, row in enumerate(gpu_models.batch_of(model, _SAMPLES)):
        request = gpu_models.request(model, row[np.newaxis])
        (folder / f"{number:03}.request").write_bytes(request.SerializeToString())
        expected.append(session.run(None, {gpu_models.INPUT: row[np.newaxis]})[0][0])
    np.save(folder / "expected.npy", np.stack(expected))


def measure(sizes: Sizes, seconds: float, bound_ms: float, steps: int = _STEPS) -> dict[str, dict[str, Any]]:
    """One round, by model. Raises BenchError if a sample has an error or a wrong answer, or is lost."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        folder = Path(name)
        chosen = [one for one in gpu_models.chosen("cpu", sizes) if one.datatype == "FP32"]
        files = {model.name: gpu_models.write(model, folder) for model in chosen}
        for model in chosen:
            # Every number of rows is a size, so that no batch is filled up.
            for suffix, rows in (("", range(1, _ROWS + 1)), (_ALONE, (1,))):
                served = replace(model, name=model.name + suffix, sizes=tuple(rows))
                gpu_models.add(served, files[model.name], folder / "models", "cpu")
                samples(served, files[model.name], folder / served.name)
        with ServerProcess(folder / "models", fresh=True) as server:
            return {
                name: _measured(server.target, folder / name, file, seconds, bound_ms, steps)
                for name, file in files.items()
            }


def _measured(target: str, folder: Path, file: Path, seconds: float, bound_ms: float, steps: int) -> dict[str, Any]:
    rows = [str(1 << power) for power in range(_ROWS.bit_length())]
    direct = run_module("direct", str(file), *rows, "--seconds", str(seconds / 10), timeout_s=seconds + _SPARE_S)
    best, tries = max(direct.values()), []

    def is_valid(model: Path, per_s: float) -> bool:
        found = run(target, model, "server", per_s, seconds, "--bound-ms", str(bound_ms))
        if found["result_query_count"] != found["answered"]:
            raise BenchError(
                f"{model.name}: {found['answered']} of {found['result_query_count']} samples were answered"
            )
        p99_ms, validity = found["result_99.00_percentile_latency_ns"] / 1e6, found["result_validity"]
        reason = found.get("result_invalid_reason", "")
        tries.append({"model": model.name, "per_s": per_s, "p99_ms": p99_ms, "validity": validity, "reason": reason})
        return bool(validity == "VALID")

    offline = run(target, folder, "offline", best, seconds, "--under-way", str(_UNDER_WAY))
    offline_per_s = offline["result_samples_per_second"]
    server_per_s = highest(partial(is_valid, folder), best, steps)
    alone_per_s = highest(partial(is_valid, folder.with_name(folder.name + _ALONE)), best, steps)
    return {
        "session_run_per_s": direct,
        "offline_per_s": offline_per_s,
        "server_per_s": server_per_s,
        "server_alone_per_s": alone_per_s,
        "server_tries": tries,
        "offline_of_best": offline_per_s / best,
        "server_of_best": server_per_s / best,
        "server_of_alone": server_per_s / alone_per_s if alone_per_s else None,
    }


def run(target: str, folder: Path, scenario: str, per_s: float, seconds: float, *options: str) -> dict[str, Any]:
    """What LoadGen says of one run with the samples in `folder`. Raises BenchError unless every sample got its answer:
    LoadGen itself waits for all, so one that is lost shows as a run that doesn't end."""
    given = (str(folder), target, scenario, "--per-s", str(per_s), "--seconds", str(seconds), *options)
    found = run_module("loadgen_client", *given, timeout_s=4 * seconds + _SPARE_S)
    if found["problems"] or not found["answered"]:
        raise BenchError(f"{folder.name}, {scenario}: {found['answered']} right answers, and {found['problems']}")
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.loadgen", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="the median is reported (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=5.0, help="per run of LoadGen (default: %(default)s)")
    parser.add_argument("--bound-ms", type=float, default=100.0, help="of the 99th percentile (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="tiny models, a second: check that everything works")
    got = parser.parse_args(arguments)
    if not (HOME / "installed").exists():
        sys.exit("no LoadGen: `make bench-loadgen` installs it, for Linux on x86-64 with Python 3.11 to 3.13")
    if got.quick:
        rounds = [measure(gpu_models.QUICK, 0.5, got.bound_ms, steps=1)]
    else:
        rounds = [measure(gpu_models.SMALL, got.seconds, got.bound_ms) for _ in range(got.rounds)]
    for one in rounds:
        print(json.dumps(one))
    print("\n| model | LoadGen scenario | median | lowest | highest |\n|---|---|---|---|---|")
    for model in rounds[0]:
        for key in _KEYS:
            if values := [one[model][key] for one in rounds if one[model][key] is not None]:
                found = spread(values)
                print(f"| {model} | {key} | {found.median:.2f} | {found.low:.2f} | {found.high:.2f} |")


if __name__ == "__main__":
    main()
