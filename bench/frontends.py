"""Costs and gains of `--frontends N`: servers of one process and with frontends, in turn, under the same load.

Lives here: the servers, the load, processor time of engine and fronts apart. Must not: anything of the main
benchmark. The load comes from NVIDIA's perf_analyzer if it is there (`make witness`), because Python's takes more of
the machine than the server does; else from `paceline load`. The model returns its input and computes nothing.

On a machine with two cores, the servers and the load share them, so that ratios of requests/s below 1 show what the way
between processes costs; what fronts gain shows only where there are cores for them.
"""

from __future__ import annotations

import argparse
import csv
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bench.load import closed
from bench.stats import Spread, ratio, spread
from paceline.clients.messages import infer_request
from tests.fronts import fronts_of
from tests.harness import REPO, ServerProcess, write_identity

__all__ = ["main"]

_ANALYZER = REPO / ".witness" / "perf_analyzer" / "perf_analyzer"
_FLOATS = {"tiny": 16, "600 KB": 150_000}
_SPARE_S = 60.0


@dataclass(frozen=True, slots=True)
class Load:
    """`clients` clients over `channels` connections, for `seconds`; `analyzer` is perf_analyzer, if it is there."""

    clients: int
    channels: int
    seconds: float
    analyzer: Path | None
    streams: bool

    def run(self, target: str, floats: int, folder: Path) -> float:
        """Requests/s."""
        return self._analyzed(target, floats, folder) if self.analyzer else self._sent(target, floats)

    def _analyzed(self, target: str, floats: int, folder: Path) -> float:
        assert self.analyzer is not None
        report = folder / "report.csv"
        window_ms = max(100, round(1000 * self.seconds / 3))
        command = [str(self.analyzer), "-u", target, "-i", "grpc", "-m", _model(floats), "--async"]
        command += ["--concurrency-range", str(self.clients), "--shape", f"INPUT0:{floats}"]
        command += ["-p", str(window_ms), "-s", "1000000", "-r", "3", "-f", str(report)]
        command += ["--streaming"] if self.streams else []
        share = max(1, self.clients // self.channels)
        env = {
            **os.environ,
            "LD_LIBRARY_PATH": str(self.analyzer.parent),
            "TRITON_CLIENT_GRPC_CHANNEL_MAX_SHARE_COUNT": str(share),
        }
        _run(command, self.seconds, env)
        (row,) = csv.DictReader(report.read_text().strip().splitlines())
        return float(row["Inferences/Second"])

    def _sent(self, target: str, floats: int) -> float:
        row = np.random.default_rng(0).standard_normal((1, floats)).astype(np.float32)
        request = infer_request(_model(floats), {"INPUT0": row}).SerializeToString()
        told = closed(target, [request], self.clients, self.seconds, connections=self.channels, stream=self.streams)
        rate: float = told["requests_per_s"]
        return rate


@dataclass(frozen=True, slots=True)
class Sample:
    """Requests/s, and microseconds of processor time per request of the process with the models and of its fronts."""

    requests_per_s: float
    engine_us: float
    fronts_us: float

    @property
    def cpu_us(self) -> float:
        """Of the engine and its fronts together."""
        return self.engine_us + self.fronts_us


def measure(server: ServerProcess, load: Load, floats: int, folder: Path) -> Sample:
    """One run of the load."""
    pids = [server.pid, *fronts_of(server.pid)]
    before, cpu_s = _answered(server, floats), [_cpu_s(pid) for pid in pids]
    requests_per_s = load.run(server.target, floats, folder)
    answered = _answered(server, floats) - before
    engine_s, *fronts_s = (_cpu_s(pid) - was for pid, was in zip(pids, cpu_s, strict=True))
    return Sample(requests_per_s, 1e6 * engine_s / answered, 1e6 * sum(fronts_s) / answered)


def table(rounds: Mapping[tuple[str, int], Sequence[Sample]]) -> str:
    """The rounds as a table for people."""
    lines = [
        "| tensor | frontends | requests/s | of one process | CPU us/request | of that, the process with the models |",
        "|" + "---|" * 6,
    ]
    for (tensor, frontends), samples in rounds.items():
        alone = rounds[tensor, 1]
        whole = ratio([one.requests_per_s for one in samples], [one.requests_per_s for one in alone])
        rate, cpu, engine = (
            spread([getattr(one, name) for one in samples]) for name in ("requests_per_s", "cpu_us", "engine_us")
        )
        cells = [
            tensor,
            str(frontends),
            _formatted(rate, 0),
            _formatted(whole, 2),
            _formatted(cpu, 0),
            _formatted(engine, 0),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.frontends", description=__doc__.partition("\n")[0])
    parser.add_argument("frontends", nargs="*", type=int, default=[2], help="to compare with 1 (default: 2)")
    parser.add_argument("--clients", type=int, default=64, help="requests in flight (default: %(default)s)")
    parser.add_argument("--channels", type=int, default=16, help="connections they share (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="the median is reported (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=3.0, help="per run (default: %(default)s)")
    parser.add_argument("--stream", action="store_true", help="use ModelStreamInfer")
    parser.add_argument("--python", action="store_true", help="load from paceline load even if perf_analyzer is there")
    got = parser.parse_args(arguments)
    analyzer = Path(os.environ.get("PERF_ANALYZER", _ANALYZER))
    load = Load(
        got.clients, got.channels, got.seconds, analyzer if analyzer.exists() and not got.python else None, got.stream
    )
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder, ExitStack() as stack:
        path = Path(folder)
        for floats in _FLOATS.values():
            write_identity(path / "models", _model(floats), dims=f"[ {floats} ]", rows=64)
        servers = {
            count: stack.enter_context(ServerProcess(path / "models", args=("--frontends", str(count)), fresh=True))
            for count in dict.fromkeys((1, *got.frontends))
        }
        rounds: dict[tuple[str, int], list[Sample]] = {(name, count): [] for name in _FLOATS for count in servers}
        for number in range(-1, got.rounds):
            for name, count in rounds if number % 2 else reversed(rounds):
                sample = measure(servers[count], load, _FLOATS[name], path)
                if number >= 0:  # the first warms up
                    rounds[name, count].append(sample)
    print(f"{load.clients} clients, {load.channels} connections, {os.cpu_count()} cores, {got.rounds} rounds")
    print(table(rounds))


def _model(floats: int) -> str:
    return f"m{floats}"


def _answered(server: ServerProcess, floats: int) -> float:
    return server.metrics()[f'nv_inference_request_success{{model="{_model(floats)}",version="1"}}']


def _cpu_s(pid: int) -> float:
    """Processor time that a process has used. Source: proc_pid_stat(5)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _run(command: Sequence[str], seconds: float, env: Mapping[str, str]) -> str:
    """What `command` printed; ends this program if it fails."""
    try:
        done = subprocess.run(
            command, cwd=REPO, env=env, capture_output=True, text=True, timeout=3 * seconds + _SPARE_S, process_group=0
        )
    except subprocess.TimeoutExpired:
        sys.exit(f"bench: did not end: {' '.join(command)}")
    if done.returncode:
        sys.exit(f"bench: {command[0]} ended with {done.returncode}: {(done.stdout + done.stderr)[-500:]}")
    return done.stdout


def _formatted(found: Spread, digits: int) -> str:
    return f"{found.median:.{digits}f} ({found.low:.{digits}f} to {found.high:.{digits}f})"


if __name__ == "__main__":
    main()
