"""Single measurements of `bench.gpu`: correctness, saturation, the ceiling, an open loop, the first request.

Lives here: the measurements, and the processes that they take. Must not: start servers, repeat, compare or print.
"""

from __future__ import annotations

import json
import os
import select
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grpc
import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped,unused-ignore]

from backends.errors import DeviceError
from bench import gpu_models
from bench.gpu_memory import export
from bench.gpu_models import GpuModel
from bench.stats import Sample
from bench.steps import BenchError, open_loop
from bench.subjects import stub
from protos import inference_pb2 as pb
from server.telemetry.nvml import Nvml, open_nvml
from tests.harness import REPO, ServerProcess
from tests.wire import Array

__all__ = [
    "Direct",
    "LoadGenerators",
    "deviations",
    "first_request",
    "gpu_region",
    "latency_at",
    "region",
    "saturation",
    "why_not_busy",
]

_SPARE_S = 60.0
_START_S = 120.0
_SAMPLE_S = 0.1
_SINGLE = 30
_ANSWER_S = 60.0


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

    def send(self, target: str, request: Path, seconds: float, warmup_s: float) -> Sample:
        """Load `target`. Raises BenchError if an answer is an error, or there is none."""
        arguments = [target, str(request), "--clients", str(self.clients), "--channels", str(self.channels)]
        arguments += ["--seconds", str(seconds), "--warmup", str(warmup_s), *(["--stream"] if self.stream else [])]
        with ExitStack() as stack:
            loads = [stack.enter_context(_Process("load", "--wait", *arguments)) for _ in range(self.processes)]
            for one in loads:
                one.answer(_SPARE_S)
            # All begin at once: a process that measures before others have begun, or after they have ended, has the
            # server to itself, and the sum would be more than the server can do.
            for one in loads:
                one.tell("begin")
            answers = [one.answer(seconds + warmup_s + _SPARE_S) for one in loads]
        for answer in answers:
            if answer["errors"] or not answer["ok"]:
                raise BenchError(f"{answer['ok']} answers, errors {answer['errors']}")
        return {
            "requests_per_s": sum(answer["requests_per_s"] for answer in answers),
            "p50_ms": statistics.median(answer["p50_ms"] for answer in answers),
            "p99_ms": max(answer["p99_ms"] for answer in answers),
            "cores": sum(answer["cores"] for answer in answers),
        }


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
            raise BenchError(f"{self._name} " + ("ended" if readable else f"gave no answer within {timeout_s:g} s"))
        answer: dict[str, Any] = json.loads(line)
        return answer


class Direct(_Process):
    """`bench.gpu_direct`: `session.run_with_iobinding`."""

    def __init__(self, file: Path, batch: Array, device: str, folder: Path) -> None:
        path = folder / f"{file.stem}.npy"
        np.save(path, batch)
        super().__init__("gpu_direct", str(file), str(path), "--device", device)

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            self.answer(_START_S)
        except BaseException:
            self.__exit__()
            raise
        return self

    def measure(self, seconds: float) -> tuple[Sample, Sample]:
        """Samples with tensors that stay on the device, and with tensors of the host."""
        self.tell(str(seconds))
        found = self.answer(2 * seconds + _SPARE_S)
        return found["bound"], found["copies"]


def deviations(server: ServerProcess, model: GpuModel, file: Path, seeds: Sequence[int]) -> list[float]:
    """How far the server's answers to one request per seed are from what the CPU computes, as a share of the largest
    value."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    channel, service = stub(server.target)
    found = []
    with channel:
        for seed in seeds:
            batch = gpu_models.batch_of(model, model.rows, seed)
            (expected,) = session.run(None, {gpu_models.INPUT: batch})
            try:
                answer = service.ModelInfer(gpu_models.request(model, batch), timeout=_ANSWER_S)
            except grpc.RpcError as error:
                raise BenchError(f"{error.code().name}: {error.details()}") from None
            found.append(_deviation(answer.raw_output_contents[0], expected))
    return found


def _deviation(raw: bytes, expected: Array) -> float:
    answer = np.frombuffer(raw, expected.dtype).reshape(expected.shape).astype(np.float64)
    if not np.isfinite(answer).all():
        return float("inf")
    return float(np.abs(answer - expected).max() / np.abs(expected).max())


def saturation(
    server: ServerProcess, model: str, rows: int, crowd: LoadGenerators, request: Path, seconds: float, warmup_s: float
) -> Sample:
    """What `crowd` gets out of the server if each request has `rows` rows."""
    before = _counters(server, model)
    with _busy() as shares:
        sample = crowd.send(server.target, request, seconds, warmup_s)
    batches = [new - old for old, new in zip(before, _counters(server, model), strict=True)]
    busy = {"gpu_busy": statistics.median(shares[len(shares) // 4 :])} if shares else {}
    return {
        **sample,
        "rows_per_s": rows * sample["requests_per_s"],
        "rows_per_batch": batches[0] / max(1.0, batches[1]),
        "model_ms_per_batch": batches[2] / max(1.0, batches[3]) / 1000,
        **busy,
    }


def latency_at(server: ServerProcess, request: Path, per_s: float, seconds: float, warmup_s: float) -> Sample:
    """Latencies of requests that are sent at random, `per_s` a second."""
    found = open_loop(server.target, (request,), per_s, 30.0, seconds, warmup_s)
    if not found["ok"] or found["errors"]:
        raise BenchError(f"{found['ok']} answers, errors {found['errors']}")
    return {key: found[key] for key in ("requests_per_s", "p50_ms", "p99_ms", "lag_p99_ms", "cores")}


def first_request(server: ServerProcess, model: GpuModel) -> tuple[float, float]:
    """Milliseconds that the very first request takes on an open connection, and the median of the next ones."""
    message = gpu_models.request(model, gpu_models.batch_of(model, model.rows))
    channel, service = stub(server.target)
    with channel:
        service.ServerReady(pb.ServerReadyRequest(), timeout=_ANSWER_S)
        times_ms = []
        for _ in range(1 + _SINGLE):
            began = time.perf_counter()
            service.ModelInfer(message, timeout=_ANSWER_S)
            times_ms.append(1e3 * (time.perf_counter() - began))
    return times_ms[0], statistics.median(times_ms[1:])


@contextmanager
def region(server: ServerProcess, batch: Array) -> Iterator[str]:
    """System shared memory with `batch` in it, registered with the server; yields its name."""
    name = f"paceline-bench-gpu-{os.getpid()}"
    path = Path("/dev/shm") / name
    channel, service = stub(server.target)
    with channel:
        try:
            path.write_bytes(batch.tobytes())
            service.SystemSharedMemoryRegister(
                pb.SystemSharedMemoryRegisterRequest(name=name, key=f"/{name}", byte_size=batch.nbytes)
            )
            try:
                yield name
            finally:
                service.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest(name=name))
        except grpc.RpcError as error:
            raise BenchError(f"{error.code().name}: {error.details()}") from None
        finally:
            path.unlink(missing_ok=True)


@contextmanager
def gpu_region(server: ServerProcess, batch: Array) -> Iterator[str]:
    """The same on the first GPU."""
    name = f"paceline-bench-gpu-{os.getpid()}-cuda"
    exported = export(batch)
    channel, service = stub(server.target)
    with channel:
        try:
            service.CudaSharedMemoryRegister(
                pb.CudaSharedMemoryRegisterRequest(name=name, raw_handle=exported.handle, byte_size=batch.nbytes)
            )
            try:
                yield name
            finally:
                service.CudaSharedMemoryUnregister(pb.CudaSharedMemoryUnregisterRequest(name=name))
        except grpc.RpcError as error:
            raise BenchError(f"{error.code().name}: {error.details()}") from None


def _counters(server: ServerProcess, model: str) -> list[float]:
    """Rows, batches, microseconds in the model summed over requests, and requests."""
    metrics, labels = server.metrics(), f'{{model="{model}",version="1"}}'
    names = ("count", "exec_count", "compute_infer_duration_us", "request_success")
    return [metrics[f"nv_inference_{name}{labels}"] for name in names]


@contextmanager
def _busy() -> Iterator[list[float]]:
    """Shares of the time that the first GPU was computing, from NVML, ten a second; none if NVML can't be asked."""
    shares: list[float] = []
    ended = threading.Event()
    try:
        nvml = open_nvml()
    except DeviceError:
        yield shares
        return
    thread = threading.Thread(target=_sample, args=(nvml, shares, ended.wait), daemon=True)
    thread.start()
    try:
        yield shares
    finally:
        ended.set()
        thread.join(5)


def why_not_busy() -> str:
    """Why `saturation` can't tell how busy the GPU was."""
    try:
        open_nvml()
    except DeviceError as error:
        return str(error)
    return "NVML doesn't tell"


def _sample(nvml: Nvml, shares: list[float], wait: Callable[[float], bool]) -> None:
    while not wait(_SAMPLE_S):
        share = nvml.read()[0].utilization
        if share is not None:
            shares.append(share)


def requests_of(model: GpuModel, batch: Array, region_name: str, folder: Path) -> Path:
    """A file with the serialized request for `batch`."""
    path = folder / f"{model.name}{region_name}.request"
    path.write_bytes(gpu_models.request(model, batch, region_name).SerializeToString())
    return path
