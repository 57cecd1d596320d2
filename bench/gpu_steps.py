"""Single measurements of `bench.gpu`: correctness, saturation, the first request.

Lives here: the measurements. Must not: start processes (`gpu_processes`), repeat, compare or print.
"""

from __future__ import annotations

import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped,unused-ignore]

from bench import gpu_models
from bench.gpu_busy import open_utilization, shares
from bench.gpu_memory import export
from bench.gpu_models import GpuModel
from bench.gpu_processes import LoadGenerators
from bench.stats import Sample, percentile
from bench.subjects import stub
from paceline.backends.errors import DeviceError
from paceline.protos import inference_pb2 as pb
from tests.harness import ServerProcess
from tests.wire import Array

__all__ = [
    "apart",
    "batches_between",
    "counters",
    "deviation",
    "first_request",
    "gpu_region",
    "region",
    "requests_of",
    "saturation",
    "source",
]

_SINGLE = 300
_SOURCES = 16
_PARTS = {"input": "input", "model": "infer", "output": "output"}
"""The parts of a batch, and the metrics' names for them."""
_ANSWER_S = 60.0


def deviation(
    server: ServerProcess, model: GpuModel, reference: ort.InferenceSession, rows: int, seeds: Sequence[int]
) -> Sample:
    """How far the server's answers to requests of `rows` rows, one per seed and all at once, are at most from what the
    CPU computes, as a share of the largest value; and how many rows shared a batch."""
    batches = [gpu_models.batch_of(model, rows, seed) for seed in seeds]
    expected = [reference.run(None, {gpu_models.INPUT: batch})[0] for batch in batches]
    before = counters(server, model.name)
    channel, service = stub(server.target)
    with channel:
        calls = [service.ModelInfer.future(gpu_models.request(model, one), timeout=_ANSWER_S) for one in batches]
        answers = [call.result() for call in calls]
    found = [apart(one.raw_output_contents[0], right) for one, right in zip(answers, expected, strict=True)]
    return {"deviation": max(found), **batches_between(before, counters(server, model.name))}


def apart(raw: bytes, expected: Array) -> float:
    """How far an answer is at most from what is expected, as a share of the largest value."""
    answer = np.frombuffer(raw, expected.dtype).reshape(expected.shape).astype(np.float64)
    if not np.isfinite(answer).all():
        return float("inf")
    return float(np.abs(answer - expected).max() / np.abs(expected).max())


def saturation(
    server: ServerProcess,
    model: GpuModel,
    crowd: LoadGenerators,
    requests: Sequence[Path],
    seconds: float,
    warmup_s: float,
) -> Sample:
    """What `crowd` gets out of the server with `requests` in turn, of `model.rows` rows each."""
    before = counters(server, model.name)
    busy: list[float] = []
    read: Callable[[], float] | None = None
    with suppress(DeviceError):  # `gpu_busy.why_unknown` has the reason
        read = open_utilization()

    def watch() -> None:
        if read is not None:
            busy.extend(shares(read, seconds))

    sample = crowd.send(server.target, requests, seconds, warmup_s, watch)
    return {
        **sample,
        "rows_per_s": model.rows * sample["requests_per_s"],
        **batches_between(before, counters(server, model.name)),
        **({"gpu_busy": statistics.mean(busy)} if busy else {}),
    }


def first_request(server: ServerProcess, model: GpuModel) -> Sample:
    """Milliseconds that the very first request takes on an open connection, and the next ones, one after another; and
    what of that passes in the model."""
    message = gpu_models.request(model, gpu_models.batch_of(model, model.rows))
    channel, service = stub(server.target)
    with channel:
        service.ServerReady(pb.ServerReadyRequest(), timeout=_ANSWER_S)

        def times_ms(count: int) -> tuple[list[float], float]:
            before, taken_ms = counters(server, model.name), []
            for _ in range(count):
                began = time.perf_counter()
                service.ModelInfer(message, timeout=_ANSWER_S)
                taken_ms.append(1e3 * (time.perf_counter() - began))
            return sorted(taken_ms), batches_between(before, counters(server, model.name))["model_ms_per_batch"]

        (first_ms,), first_model_ms = times_ms(1)
        later_ms, model_ms = times_ms(_SINGLE)
    return {
        "first_ms": first_ms,
        "first_model_ms": first_model_ms,
        "p50_ms": percentile(later_ms, 50),
        "p99_ms": percentile(later_ms, 99),
        "model_ms_per_batch": model_ms,
    }


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
        finally:
            # The server has it open; a file would outlive a bench that is killed.
            path.unlink(missing_ok=True)
        try:
            yield name
        finally:
            service.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest(name=name))


@contextmanager
def gpu_region(server: ServerProcess, batch: Array) -> Iterator[str]:
    """The same on the first GPU."""
    name = f"paceline-bench-gpu-{os.getpid()}-cuda"
    exported = export(batch)
    channel, service = stub(server.target)
    with channel:
        service.CudaSharedMemoryRegister(
            pb.CudaSharedMemoryRegisterRequest(name=name, raw_handle=exported.handle, byte_size=batch.nbytes)
        )
        try:
            yield name
        finally:
            service.CudaSharedMemoryUnregister(pb.CudaSharedMemoryUnregisterRequest(name=name))


def batches_between(before: Sequence[float], after: Sequence[float]) -> Sample:
    """Rows per batch, and what a request's batch took on average in ms, from `counters` before and after."""
    rows, batches, requests, *took_us = (new - old for old, new in zip(before, after, strict=True))
    means_ms = [us / max(1.0, requests) / 1000 for us in took_us]
    times_ms = {f"{part}_ms_per_batch": mean_ms for part, mean_ms in zip(_PARTS, means_ms, strict=True)}
    return {"rows_per_batch": rows / max(1.0, batches), **times_ms}


def counters(server: ServerProcess, model: str) -> list[float]:
    """Rows, batches, requests, and microseconds summed over requests: before, in and after the model. 0 of a model that
    isn't loaded."""
    metrics, labels = server.metrics(), f'{{model="{model}",version="1"}}'
    names = ("count", "exec_count", "request_success", *(f"compute_{part}_duration_us" for part in _PARTS.values()))
    return [metrics.get(f"nv_inference_{name}{labels}", 0.0) for name in names]


def source(model: GpuModel) -> Array:
    """Rows of several different requests: more than caches keep, but at most half of what shared memory has room for,
    which in a container may be 64 MiB."""
    bytes_each = gpu_models.batch_of(model, model.rows).nbytes
    room = shutil.disk_usage("/dev/shm").free // 2
    return gpu_models.batch_of(model, model.rows * max(1, min(_SOURCES, room // bytes_each)))


def requests_of(model: GpuModel, batch: Array, rows: int, region_name: str, folder: Path) -> list[Path]:
    """Files with serialized requests of `rows` rows, which together have those of `batch`. `region_name`: the shared
    memory that has it, or "" to put rows into the messages."""
    found = []
    for begin in range(0, len(batch), rows):
        path = folder / f"{model.name}-{region_name}-{rows}-{begin}.request"
        offset = batch[:begin].nbytes
        message = gpu_models.request(model, batch[begin : begin + rows], region_name, offset)
        path.write_bytes(message.SerializeToString())
        found.append(path)
    return found
