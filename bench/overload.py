"""What a server does at ten times its capacity, over gRPC.

What is still answered, how soon the rest is refused, how much memory it takes, and how soon everything is as before.

Lives here: the server, the three loads, the table. Must not: assert. The model sleeps for what a batch costs, so that
the capacity is known and the cores are left to gRPC; requests are sent at random (`paceline load`), whether or not
answers come.

1. `1x`: as many requests a second as full batches can hold. The rate of answers is the peak.
2. `10x`: ten times as many, for as long.
3. `after`: half of the capacity, immediately afterwards.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bench.load import open_loop
from bench.stats import spread
from paceline.clients.messages import infer_request
from tests.harness import ServerProcess, write_identity

__all__ = ["Case", "Found", "main", "measure"]

ROWS, BATCH_MS = 8, 80
CAPACITY_PER_S = 1000 * ROWS / BATCH_MS
FLOATS = 16_384
"""64 KiB a request."""
LOADS = {"1x": 1.0, "10x": 10.0, "after": 0.5}


@dataclass(frozen=True, slots=True)
class Case:
    """A server's flags, and how long callers wait for answers."""

    name: str
    args: tuple[str, ...]
    deadline_s: float


CASES = (
    Case("defaults, callers wait 10 s", (), 10.0),
    Case("defaults, callers wait 1 s", (), 1.0),
    Case("--max-queued-requests=64", ("--max-queued-requests=64",), 10.0),
    Case("--max-queued-requests=64, callers wait 1 s", ("--max-queued-requests=64",), 1.0),
    Case("--max-queued-bytes=4194304", ("--max-queued-bytes=4194304",), 10.0),
    Case("--grpc-max-concurrent-rpcs=64", ("--grpc-max-concurrent-rpcs=64",), 10.0),
    Case("--max-queued-requests=64 --frontends=2", ("--max-queued-requests=64", "--frontends=2"), 10.0),
)


@dataclass(frozen=True, slots=True)
class Found:
    """The results of one load. Times in ms are 0 if nothing was answered, or refused. `memory_bytes`: by how much the
    peak memory of the process with the models until now exceeds its peak before the first load."""

    answered_per_s: float
    p50_ms: float
    p99_ms: float
    refused: int
    refused_p50_ms: float
    refused_p99_ms: float
    too_late: int
    memory_bytes: int
    generator_cores: float
    lag_p99_ms: float


def measure(case: Case, seconds: float) -> dict[str, Found]:
    """The three loads on a new server, by name. Raises BenchError for errors other than refusals and missed
    deadlines."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        folder = Path(name)
        delay = f'parameters {{ key: "execute_delay_ms" value {{ string_value: "{BATCH_MS}" }} }}'
        write_identity(folder / "models", dims="[ -1 ]", rows=ROWS, extra=f"dynamic_batching {{ }} {delay}")
        request = folder / "request"
        data = infer_request("echo", {"INPUT0": np.ones((1, FLOATS), np.float32)}).SerializeToString()
        request.write_bytes(data)
        with ServerProcess(folder / "models", args=case.args, fresh=True) as server:
            before = peak_bytes(server.pid)
            return {
                name: _found(
                    open_loop(server.target, (request,), load * CAPACITY_PER_S, case.deadline_s, seconds, 0.0),
                    peak_bytes(server.pid) - before,
                )
                for name, load in LOADS.items()
            }


def peak_bytes(pid: int) -> int:
    """The most resident memory that the process has had. Source: proc_pid_status(5)."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def _found(told: dict[str, Any], memory_bytes: int) -> Found:
    errors = told["errors"]
    return Found(
        answered_per_s=told["requests_per_s"],
        p50_ms=told["p50_ms"] or 0.0,
        p99_ms=told["p99_ms"] or 0.0,
        refused=errors.get("RESOURCE_EXHAUSTED", 0),
        refused_p50_ms=told["refused_p50_ms"] or 0.0,
        refused_p99_ms=told["refused_p99_ms"] or 0.0,
        too_late=errors.get("DEADLINE_EXCEEDED", 0) + errors.get("NOT_SENT", 0),
        memory_bytes=memory_bytes,
        generator_cores=told["cores"],
        lag_p99_ms=told["lag_p99_ms"] or 0.0,
    )


def table(case: Case, rounds: Sequence[dict[str, Found]]) -> str:
    """A table for people: medians of the rounds; what is answered over the peak is taken within each."""
    lines = [
        f"{case.name} (callers give up after {case.deadline_s:g} s)",
        "",
        "| load | answered/s | of the peak | p50 ms | p99 ms | refused | after p50 ms | after p99 ms | too late "
        "| memory MiB | load's cores | load's lag p99 ms |",
        "|" + "---|" * 12,
    ]
    for name in LOADS:
        found = [one[name] for one in rounds]
        ratios = [one[name].answered_per_s / max(one["1x"].answered_per_s, 1e-9) for one in rounds]
        cells = [name, _median([one.answered_per_s for one in found], 0), _median(ratios, 2)]
        cells += [_median([getattr(one, key) for one in found], 1) for key in ("p50_ms", "p99_ms")]
        cells += [_median([one.refused for one in found], 0)]
        cells += [_median([getattr(one, key) for one in found], 1) for key in ("refused_p50_ms", "refused_p99_ms")]
        cells += [_median([one.too_late for one in found], 0)]
        cells += [_median([one.memory_bytes / 2**20 for one in found], 0)]
        cells += [_median([one.generator_cores for one in found], 2), _median([one.lag_p99_ms for one in found], 1)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _median(values: Sequence[float], digits: int) -> str:
    return f"{spread(values).median:.{digits}f}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.overload", description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="the median is reported (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=5.0, help="per load (default: %(default)s)")
    parser.add_argument(
        "--case", type=int, action="append", choices=range(len(CASES)), help="run only this case, by number"
    )
    got = parser.parse_args(arguments)
    print(f"{CAPACITY_PER_S:g} requests/s of {FLOATS * 4 // 1024} KiB can be executed; {got.rounds} rounds")
    for number in got.case or range(len(CASES)):
        case = CASES[number]
        print("\n" + table(case, [measure(case, got.seconds) for _ in range(got.rounds)]))
        sys.stdout.flush()


if __name__ == "__main__":
    main()
