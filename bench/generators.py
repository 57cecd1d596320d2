"""`paceline load` beside NVIDIA's perf_analyzer, and how late it sends when requests are due at given times.

Lives here: the servers, the turns, a table. Must not: send or count. All processes share the machine, so a generator
that takes more of it leaves less to the server.

1. `closed`: both send to the same server in turn, whose model takes so many milliseconds for each request and has an
   instance for each client, so that a client's rate depends on how soon its generator sends again. Requests/s of one
   over the other, and the processor time of each generator per request (of perf_analyzer with its start).
2. `lag`: an open loop at half of what a closed one of 64 clients gets from a bare echo. Within which time 99 % of the
   requests were sent.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench import models, perf_analyzer
from bench.load import GENERATOR, closed, open_loop
from bench.scenario import Closed, Side
from bench.stats import Sample, ratio, spread
from bench.steps import Load
from bench.subjects import EchoProcess
from tests.harness import REPO, ServerProcess

__all__ = ["CLIENTS", "PROGRAMS", "compare", "lag", "main"]

CLIENTS = (1, 4, 16)
_ANALYZER = "perf_analyzer"
PROGRAMS = REPO / ".witness" / _ANALYZER
_MODEL = "tiny"
_CROWD = 64
_DEADLINE_S = 5.0
_WARMUP_S = 0.5
_CONFIG = """
backend: "identity"
max_batch_size: 1
input {{ name: "INPUT0" data_type: TYPE_FP32 dims: [ 16 ] }}
output {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ 16 ] }}
instance_group {{ count: {instances} }}
parameters {{ key: "execute_delay_ms" value {{ string_value: "{delay_ms}" }} }}
"""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Requests/s of both, and microseconds of processor time that each takes for a request itself; a round each."""

    ours_per_s: tuple[float, ...]
    theirs_per_s: tuple[float, ...]
    ours_cpu_us: tuple[float, ...]
    theirs_cpu_us: tuple[float, ...]


def compare(binary: Path, delay_ms: int, clients: Sequence[int], rounds: int, seconds: float) -> dict[int, Comparison]:
    """Both generators in turn, every second round backwards, by number of clients."""
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as name:
        folder = Path(name)
        (folder / "models" / _MODEL / "1").mkdir(parents=True)
        config = _CONFIG.format(instances=max(clients), delay_ms=delay_ms)
        (folder / "models" / _MODEL / "config.pbtxt").write_text(config)
        shape = models.MODELS[_MODEL].shape
        (folder / "request").write_bytes(models.request(_MODEL, shape))
        side = Side("paceline", _MODEL, (shape,))
        with ServerProcess(folder / "models", fresh=True) as server:
            steps = {
                (count, who): Load(
                    server,
                    (folder / "request",),
                    Closed(count),
                    _MODEL,
                    binary=binary if who == _ANALYZER else None,
                    side=side,
                )
                for count in clients
                for who in (GENERATOR, _ANALYZER)
            }
            found: dict[tuple[int, str], list[Sample]] = {key: [] for key in steps}
            for number in range(rounds):
                for key in reversed(steps) if number % 2 else steps:
                    found[key].append(steps[key].measure(seconds, _WARMUP_S))
    return {count: _compared(found[count, GENERATOR], found[count, _ANALYZER]) for count in clients}


def _compared(ours: Sequence[Sample], theirs: Sequence[Sample]) -> Comparison:
    rates = [tuple(one["requests_per_s"] for one in samples) for samples in (ours, theirs)]
    costs = [tuple(1e6 * one["cores"] / one["requests_per_s"] for one in samples) for samples in (ours, theirs)]
    return Comparison(*rates, *costs)


def lag(seconds: float) -> dict[str, float]:
    """Of one round: requests/s of the closed loop, and of the open one; how late 99 % of its requests were at most."""
    request = models.request(_MODEL, models.MODELS[_MODEL].shape)
    with EchoProcess() as echo:
        most = closed(echo.target, [request], _CROWD, seconds, _WARMUP_S)["requests_per_s"]
        found = open_loop(echo.target, [request], most / 2, _DEADLINE_S, seconds, _WARMUP_S)
    return {"closed_per_s": most, "open_per_s": most / 2, "lag_p99_ms": found["lag_p99_ms"], "cores": found["cores"]}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.generators", description=__doc__.partition("\n")[0])
    parser.add_argument("--delay-ms", type=int, nargs="+", default=[2, 10], help="of each request (default: 2 10)")
    parser.add_argument("--rounds", type=int, default=3, help="the median is reported (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=3.0, help="per load (default: %(default)s)")
    got = parser.parse_args(arguments)
    lags = [lag(got.seconds) for _ in range(got.rounds)]
    print(json.dumps(lags))
    late, rate = (spread([one[key] for one in lags]) for key in ("lag_p99_ms", "open_per_s"))
    within = f"{late.median:.2f} ms ({late.low:.2f} to {late.high:.2f})"
    print(f"\nopen loop, {rate.median:,.0f} a second: 99 % sent within {within}")
    binary = perf_analyzer.find(PROGRAMS)
    if binary is None:
        sys.exit("no perf_analyzer, so nothing to compare with: make witness")
    print("\n| a request takes | clients | requests/s | over perf_analyzer's | CPU us/request | perf_analyzer's |")
    print("|" + "---|" * 6)
    for delay_ms in got.delay_ms:
        for count, found in compare(binary, delay_ms, CLIENTS, got.rounds, got.seconds).items():
            over = ratio(found.ours_per_s, found.theirs_per_s)
            rate, ours, theirs = map(spread, (found.ours_per_s, found.ours_cpu_us, found.theirs_cpu_us))
            ratios = f"{over.median:.2f} ({over.low:.2f} to {over.high:.2f})"
            costs = f"{ours.median:.0f} | {theirs.median:.0f}"
            print(f"| {delay_ms} ms | {count} | {rate.median:,.0f} | {ratios} | {costs} |", flush=True)


if __name__ == "__main__":
    main()
