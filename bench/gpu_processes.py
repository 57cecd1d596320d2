"""The processes that `bench.gpu` starts: servers, load generators, and the model without a server.

Lives here: starting them, having them begin at once, reading their lines, ending them. Must not: repeat, compare or
print.
"""

from __future__ import annotations

import json
import select
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from bench.gpu_plan import Plan
from bench.load import closed, open_loop
from bench.stats import Sample
from bench.steps import BenchError
from tests.harness import REPO, ServerProcess
from tests.wire import Array

__all__ = ["Direct", "LoadGenerators", "RandomLoad", "serving"]

_SPARE_S = 60.0
_DEADLINE_S = 30.0
_START_S = 120.0
_SERVE_S = 240.0


@dataclass(frozen=True, slots=True)
class LoadGenerators:
    """`processes` load generators, each with `clients` clients over `channels` connections; each client has one request
    in flight, over a stream or as a call."""

    processes: int
    clients: int
    channels: int
    stream: bool

    def __str__(self) -> str:
        return f"{self.processes * self.clients} clients"

    def limit(self, cores: Sequence[float]) -> str:
        """What to add to a result if these processes, which took so many `cores` in each round, were the limit."""
        used = statistics.median(cores) if cores else 0.0
        return (
            f"; the load was the limit, with {used:.1f} of {self.processes} cores"
            if used > 0.85 * self.processes
            else ""
        )

    def send(
        self,
        target: str,
        requests: Sequence[Path],
        seconds: float,
        warmup_s: float,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Sample:
        """Load `target` with `requests` in turn; `meanwhile` is called when the warm-up is over. Raises BenchError if
        an answer is an error, or there is none."""
        found = closed(
            target,
            requests,
            self.processes * self.clients,
            seconds,
            warmup_s,
            processes=self.processes,
            connections=self.channels,
            stream=self.stream,
            meanwhile=meanwhile,
        )
        return _sample(found, "requests_per_s", "p50_ms", "p99_ms", "cores")


@dataclass(frozen=True, slots=True)
class RandomLoad:
    """`processes` load generators, each with a connection of its own, which send at random together, whether or not
    answers come."""

    processes: int

    def send(
        self, target: str, requests: Sequence[Path], per_s: float, seconds: float, warmup_s: float, seed: int
    ) -> Sample:
        """Latencies of `requests` in turn, `per_s` a second on average. Raises BenchError if an answer is an error, or
        there is none."""
        found = open_loop(target, requests, per_s, _DEADLINE_S, seconds, warmup_s, processes=self.processes, seed=seed)
        if found["errors"]:
            raise BenchError(f"{found['ok']} answers, errors {found['errors']}")
        return _sample(found, "requests_per_s", "p50_ms", "p99_ms", "lag_p99_ms", "cores")


def _sample(found: dict[str, Any], *names: str) -> Sample:
    if not found["answers"]:
        raise BenchError("no answers")
    return {name: found[name] for name in names}


class _Process:
    """`python -m bench.<module>`, for as long as the context lasts. It reads lines and prints lines of JSON."""

    def __init__(self, module: str, *arguments: str) -> None:
        self._name = f"bench.{module}"
        self._command = [sys.executable, "-m", self._name, *arguments]

    def __enter__(self) -> Self:
        self._process = subprocess.Popen(
            self._command, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, process_group=0
        )
        return self

    def __exit__(self, *exc: object) -> None:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(OSError):
            process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()

    def tell(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{line}\n")
        self._process.stdin.flush()

    def answer(self, timeout_s: float) -> dict[str, Any]:
        """The next line. Raises BenchError if none comes in time."""
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        line = self._process.stdout.readline() if readable else ""
        if not line:
            self._process.kill()  # or the next answer would be to the last question
            raise BenchError(f"{self._name} " + ("ended" if readable else f"gave no answer within {timeout_s:g} s"))
        answer: dict[str, Any] = json.loads(line)
        return answer


class Direct(_Process):
    """`bench.gpu_direct`: `session.run_with_iobinding`."""

    def __init__(self, file: Path, batch: Array, plan: Plan, folder: Path) -> None:
        path = folder / f"{file.stem}.npy"
        np.save(path, batch)
        graphs = ["--graphs"] if plan.graphs and plan.on_gpu else []
        super().__init__("gpu_direct", str(file), str(path), "--device", plan.device, *graphs)

    def wait_ready(self) -> None:
        """Wait until it has opened the model. Raises BenchError if it can't."""
        self.answer(_START_S)

    def measure(self, seconds: float) -> tuple[Sample, Sample]:
        """Samples with tensors that stay on the device, and with tensors of the host."""
        self.tell(f"measure {seconds}")
        found = self.answer(2 * seconds + _SPARE_S)
        return found["bound"], found["copies"]

    def after_smaller(self, seconds: float) -> Sample:
        """The time of a batch after one of half the rows."""
        self.tell(f"change {seconds}")
        return self.answer(seconds + _SPARE_S)


@contextmanager
def serving(
    repository: Path, frontends: int, end_s: float = 20.0, start_s: float = _SERVE_S
) -> Iterator[ServerProcess]:
    """A server with the time that GPUs take to load and to warm up. Requests to a model that can't be loaded are
    answered with the reason, and the others serve: the machine may be lent, and starting over takes minutes.

    Raises BenchError if it doesn't start; or afterwards, if it doesn't end by itself. It has ended in any case.
    """
    server = ServerProcess(
        repository,
        args=["--frontends", str(frontends), "--allow-client-shm=true", "--exit-on-error=false"],
        fresh=True,
    )
    server.start()
    try:
        try:
            server.wait_ready(start_s)
        except AssertionError as error:
            raise BenchError(f"paceline did not start: {error}") from None
        yield server
        try:
            server.terminate(end_s)
        except subprocess.TimeoutExpired:
            raise BenchError(f"paceline did not end within {end_s:g} s of SIGTERM and was killed") from None
    finally:
        server.kill()
