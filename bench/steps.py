"""One measurement each: a load on a server, the model run directly, or stacking and splitting alone.

Lives here: the measurements, and reading their results. Must not: start servers, repeat, compare or print.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import grpc

from bench import models, perf_analyzer
from bench.load import BenchError, closed, open_loop
from bench.scenario import Closed, Open, Point, Side
from bench.stats import Sample
from bench.subjects import NotServingError, Subject, cpu_s, stub
from paceline.protos import inference_pb2 as pb
from tests.harness import REPO, ServerProcess

__all__ = ["BenchError", "Counters", "Load", "Module", "Step", "batch_figures", "region", "run_module"]

_SPARE_S = 60.0
_STRETCHES = 4  # attempts at a measurement, each twice as long as the last, as long as no answer comes
_ANSWER = ("requests_per_s", "p50_ms", "p90_ms", "p99_ms", "cores")
_METRICS = (
    "nv_inference_request_success",
    "nv_inference_count",
    "nv_inference_exec_count",
    "nv_inference_compute_infer_duration_us",
)


class NoAnswersError(BenchError):
    """Neither an answer nor an error came in the time: longer may help."""


class Counters(NamedTuple):
    """What a server has counted of one model since it started."""

    requests: float
    rows: float
    batches: float
    model_us: float


class Step(Protocol):
    """Something that is measured once per round."""

    def measure(self, seconds: float, warmup_s: float) -> Sample: ...


@dataclass(frozen=True, slots=True)
class Load:
    """`requests` are sent in turn to `subject`, as `point` says; what the product counts for `model` is part of the
    sample.

    With `binary` and `side`, perf_analyzer at `binary` sends, and makes requests of its own like these.
    """

    subject: Subject
    requests: tuple[Path, ...]
    point: Point
    model: str
    transport: str = "unary"
    deadline_s: float = 30.0
    binary: Path | None = None
    side: Side | None = None

    def measure(self, seconds: float, warmup_s: float) -> Sample:
        if self.binary is not None:
            with suppress(NoAnswersError):
                self._perf_analyzer(warmup_s)
        for stretch in range(_STRETCHES - 1):
            with suppress(NoAnswersError):
                return self._measured(seconds * 2**stretch, warmup_s)
        return self._measured(seconds * 2 ** (_STRETCHES - 1), warmup_s)

    def _measured(self, seconds: float, warmup_s: float) -> Sample:
        if self.binary is not None:
            before = self._looked()
            answer = self._perf_analyzer(seconds)
            after = self._looked()
        elif self.transport == "http":
            before = self._looked()
            answer = self._http(seconds, warmup_s)
            after = self._looked()
        else:
            answer = self._own(seconds, warmup_s)
            before, after = answer["before"], answer["after"]
        (counted_before, cpu_before_s), (counted, cpu_after_s) = before, after
        sample: dict[str, float] = {key: answer[key] for key in (*_ANSWER, "lag_p99_ms") if answer.get(key) is not None}
        sample["answered"] = answer["ok"] / answer["offered"] if isinstance(self.point, Open) else 1.0
        if cpu_before_s is not None and cpu_after_s is not None and answer["answers"]:
            sample["server_cpu_us"] = 1e6 * (cpu_after_s - cpu_before_s) / answer["answers"]
        return {**sample, **batch_figures(counted_before, counted)}

    def _perf_analyzer(self, seconds: float) -> dict[str, Any]:
        assert self.binary is not None
        assert self.side is not None
        assert isinstance(self.point, Closed)
        with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
            try:
                return perf_analyzer.run(
                    self.binary, self.subject.target, self.side, self.point.clients, seconds, Path(folder)
                )
            except perf_analyzer.UnstableError as error:
                raise NoAnswersError(str(error)) from None
            except perf_analyzer.FailedError as error:
                raise BenchError(str(error)) from None

    def _http(self, seconds: float, warmup_s: float) -> dict[str, Any]:
        assert isinstance(self.point, Closed)
        (body,), times = self.requests, ("--seconds", str(seconds), "--warmup", str(warmup_s))
        given = (self.subject.target, str(body), "--clients", str(self.point.clients), *times)
        return run_module("http_load", *given, timeout_s=seconds + warmup_s + _SPARE_S)

    def _own(self, seconds: float, warmup_s: float) -> dict[str, Any]:
        target, requests = self.subject.target, self.requests
        if isinstance(self.point, Open):
            return open_loop(target, requests, self.point.per_s, self.deadline_s, seconds, warmup_s, look=self._looked)
        clients = self.point.clients
        return closed(
            target, requests, clients, seconds, warmup_s, stream=self.transport == "stream", look=self._looked
        )

    def _looked(self) -> tuple[Counters | None, float | None]:
        """What the product has counted until now, and the processor time that the subject has used."""
        return self._counters(), cpu_s(self.subject.pid)

    def _counters(self) -> Counters | None:
        if not isinstance(self.subject, ServerProcess):
            return None
        metrics, labels = self.subject.metrics(), f'{{model="{self.model}",version="1"}}'
        return Counters(*(metrics[name + labels] for name in _METRICS))


@dataclass(frozen=True, slots=True)
class Module:
    """What `python -m bench.NAME` finds, in a process of its own each time."""

    name: str
    arguments: tuple[str, ...]

    @classmethod
    def of(cls, side: Side, file: Path) -> Module:
        """session.run on the side's model, or stacking and splitting its rows."""
        if side.server == "onnxruntime":
            return cls("direct", (str(file), str(side.rows)))
        return cls("micro", ("batching", "--rows", str(side.rows), "--floats", str(prod(side.shapes[0]))))

    def measure(self, seconds: float, warmup_s: float) -> Sample:
        answer = run_module(self.name, *self.arguments, "--seconds", str(seconds), timeout_s=seconds + _SPARE_S)
        if self.name == "direct":
            return {"requests_per_s": answer[self.arguments[-1]]}
        found: Sample = answer["batching"][0]
        return found


@contextmanager
def region(target: str, shape: tuple[int, ...], output_bytes: int) -> Iterator[tuple[str, int]]:
    """System shared memory registered with the server at `target`, with a row of `shape` and room for its output;
    yields its name, and the offset of the room. Raises NotServingError if the server doesn't support it."""
    row = models.row(shape)
    name = f"paceline-bench-{os.getpid()}"
    path = Path("/dev/shm") / name
    channel, service = stub(target)
    with channel:
        path.write_bytes(row + bytes(output_bytes))
        try:
            service.SystemSharedMemoryRegister(
                pb.SystemSharedMemoryRegisterRequest(name=name, key=f"/{name}", byte_size=path.stat().st_size)
            )
            yield name, len(row)
            service.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest(name=name))
        except grpc.RpcError as error:
            text = f"{error.code().name}: {error.details()}"
            raise NotServingError(f"not supported: {text}") from None
        finally:
            path.unlink()


def run_module(module: str, *arguments: str, timeout_s: float) -> dict[str, Any]:
    """Run `python -m bench.<module>` to its end; returns the JSON it printed. Raises BenchError if it fails."""
    command = [sys.executable, "-m", f"bench.{module}", *arguments]
    try:
        # In a process group of its own: Ctrl-C goes to the process that started it, which then ends it.
        done = subprocess.run(command, cwd=REPO, stdout=subprocess.PIPE, process_group=0, timeout=timeout_s, check=True)
    except subprocess.SubprocessError as error:
        raise BenchError(f"bench.{module}: {error}") from None
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def batch_figures(before: Counters | None, after: Counters | None) -> Sample:
    """Mean rows of a batch, and the mean time in the model, in ms, of the batch that a request was in. Nothing if no
    request was answered: batches that came too late for their callers were executed, and count for no request."""
    if before is None or after is None:
        return {}
    requests, rows, batches, model_us = (new - old for old, new in zip(before, after, strict=True))
    if not requests or not batches:
        return {}
    return {"rows_per_batch": rows / batches, "model_ms_per_batch": model_us / requests / 1_000}
