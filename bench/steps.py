"""One measurement each: a load on a server, or the model run directly.

Lives here: the processes that measure and are measured, and what is read from them. Must not: repeat, compare or print.
Every process ends with its step, or with the context that started it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from bench.stats import Sample
from tests.harness import REPO, ServerProcess

__all__ = ["BenchError", "Direct", "EchoProcess", "Load", "Step", "Subject", "run_module"]

_SPARE_S = 60.0
_ANSWER = ("requests_per_s", "p50_ms", "p90_ms", "p99_ms", "cores")
_METRICS = (
    "nv_inference_request_success",
    "nv_inference_count",
    "nv_inference_exec_count",
    "nv_inference_compute_infer_duration_us",
)
# In a group of their own: Ctrl-C is for the one who started them, who then ends them.
_CHILD: dict[str, Any] = {"cwd": REPO, "stdout": subprocess.PIPE, "process_group": 0}


class BenchError(Exception):
    """A measurement failed, so there is nothing to report."""


class Counters(NamedTuple):
    """What a server says of one model since it started."""

    requests: float
    rows: float
    batches: float
    model_us: float


class Step(Protocol):
    """Something that is measured once per round."""

    @property
    def name(self) -> str: ...

    def measure(self, seconds: float, warmup_s: float) -> Sample: ...


class Subject(Protocol):
    """A server under load."""

    @property
    def target(self) -> str: ...

    @property
    def pid(self) -> int: ...


class EchoProcess:
    """`bench.echo` in a process of its own, for as long as the context lasts."""

    def __enter__(self) -> EchoProcess:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.echo"],
            **_CHILD,
            stdin=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        port = self._process.stdout.readline().strip()
        if not port:
            self.__exit__()
            raise BenchError("the echo server did not start")
        self.target = f"127.0.0.1:{port}"
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        finally:
            self._process.kill()
            self._process.wait()
            self._process.stdout.close()

    @property
    def pid(self) -> int:
        return self._process.pid


@dataclass(frozen=True, slots=True)
class Load:
    """`clients` clients send `request`, and `more` in turn with it, to `subject` over and over; what it counted for
    `model`, if it counts."""

    name: str
    subject: Subject
    request: Path
    clients: int
    model: str = ""
    more: tuple[Path, ...] = ()

    def measure(self, seconds: float, warmup_s: float) -> Sample:
        before, cpu_before_s = self._counters(), _cpu_s(self.subject.pid)
        answer = run_module(
            "load",
            self.subject.target,
            *map(str, (self.request, *self.more)),
            *("--clients", str(self.clients), "--seconds", str(seconds), "--warmup", str(warmup_s)),
            timeout_s=seconds + warmup_s + _SPARE_S,
        )
        if answer["errors"] or not answer["ok"]:
            raise BenchError(f"{self.name}: {answer['ok']} answers, errors {answer['errors']}")
        sample: dict[str, float] = {key: answer[key] for key in _ANSWER}
        if cpu_before_s is not None and (cpu_s := _cpu_s(self.subject.pid)) is not None:
            sample["server_cpu_us"] = 1e6 * (cpu_s - cpu_before_s) / answer["answers_in_all"]
        return {**sample, **_batches(before, self._counters())}

    def _counters(self) -> Counters | None:
        if not self.model or not isinstance(self.subject, ServerProcess):
            return None
        metrics, labels = self.subject.metrics(), f'{{model="{self.model}",version="1"}}'
        return Counters(*(metrics[name + labels] for name in _METRICS))


@dataclass(frozen=True, slots=True)
class Direct:
    """`session.run` on `model` in batches of `rows`."""

    name: str
    model: Path
    rows: int

    def measure(self, seconds: float, warmup_s: float) -> Sample:
        answer = run_module(
            "direct", str(self.model), str(self.rows), "--seconds", str(seconds), timeout_s=seconds + _SPARE_S
        )
        return {"requests_per_s": answer[str(self.rows)]}


def run_module(module: str, *arguments: str, timeout_s: float) -> dict[str, Any]:
    """Run `python -m bench.<module>` to its end; the JSON it printed."""
    command = [sys.executable, "-m", f"bench.{module}", *arguments]
    try:
        done = subprocess.run(command, **_CHILD, timeout=timeout_s, check=True)
    except subprocess.SubprocessError as error:
        raise BenchError(f"bench.{module}: {error}") from None
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def _batches(before: Counters | None, after: Counters | None) -> Sample:
    """Mean rows of a batch, and the mean time in the model of the batch that a request was in."""
    if before is None or after is None:
        return {}
    requests, rows, batches, model_us = (new - old for old, new in zip(before, after, strict=True))
    return {"rows_per_batch": rows / batches, "model_ms_per_batch": model_us / requests / 1_000}


def _cpu_s(pid: int) -> float | None:
    """The processor time a process has used; None where the system doesn't tell. Source: proc_pid_stat(5)."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    user, system = int(fields[11]), int(fields[12])
    return (user + system) / os.sysconf("SC_CLK_TCK")
