"""A server inside the test's process, over real gRPC, with models that the test controls.

Lives here: `serving`, which writes a repository, starts and stops a `Server`; raw stubs and channels. Must not:
assertions about behaviour.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc

from paceline.backends.base import Backend
from paceline.backends.registry import backend as registered
from paceline.backends.spec import ModelSpec, TensorSpec
from paceline.protos import inference_pb2 as pb
from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceStub
from paceline.server.app import Server
from paceline.server.config import Settings
from tests import nursery
from tests.memory_models import MemoryBackend, MemoryModel
from tests.nursery import ForkedFront

__all__ = [
    "RETRY_CANCELLED",
    "RETRY_UNAVAILABLE",
    "Served",
    "echo_model",
    "failure_of",
    "serving",
    "write_model",
]

_UNLIMITED = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


def _retrying(code: str) -> tuple[tuple[str, str]]:
    policy = {
        "maxAttempts": 5,
        "initialBackoff": "0.05s",
        "maxBackoff": "0.5s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": [code],
    }
    return (("grpc.service_config", json.dumps({"methodConfig": [{"name": [{}], "retryPolicy": policy}]})),)


RETRY_CANCELLED = _retrying("CANCELLED")
"""Options of a channel whose calls meet a stopping server. gRPC's server cancels the calls that cross with its GOAWAY,
and which these are depends on the machine; retried, they end as all others do."""

RETRY_UNAVAILABLE = _retrying("UNAVAILABLE")
"""Options of a channel to a server that closes connections after a time. A call may be under way then, if the machine
is busy with something else."""


def echo_model(datatype: str = "FP32", *dims: int, utf8: bool = False) -> MemoryModel:
    """A model with a gate and switches for faults that returns its input `a` as `x`, batch axis in front. With one free
    dimension, the default, it isn't warmed up, which would count among its batches."""
    whole = (-1, *(dims or (-1,)))
    return MemoryModel(
        ModelSpec((TensorSpec("a", datatype, whole, utf8),), (TensorSpec("x", datatype, whole, utf8),)),
    )


def write_model(repository: Path, name: str, config: str = "") -> Path:
    """A folder with version 1 and a configuration that says that the model is in memory, followed by `config`."""
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    (folder / "config.pbtxt").write_text(f'backend: "memory" {config}')
    return folder


@dataclass
class Served:
    """A running server, a channel to it, and the pids of the processes that speak gRPC, oldest first, if it has any."""

    server: Server
    channel: grpc.aio.Channel
    stub: Any
    fronts: list[int] = field(default_factory=list)

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.server.grpc_port}"

    async def infer(self, request: pb.ModelInferRequest, timeout_s: float | None = 20) -> pb.ModelInferResponse:
        response: pb.ModelInferResponse = await self.stub.ModelInfer(request, timeout=timeout_s)
        return response

    async def raw_call(self, method: str, data: bytes) -> bytes:
        """Call `method` of the inference service with bytes that need not be a message."""
        call: Any = self.channel.unary_unary(f"/inference.GRPCInferenceService/{method}")
        answer: bytes = await call(data, timeout=20)
        return answer

    def waiting(self, model: str, version: str = "") -> int:
        """Number of requests in the queue of a model, including those that had only arrived: they are checked first."""
        batcher = self.server.repository.get(model, version).batcher
        batcher.take_announced()
        return batcher.waiting_requests

    def failed(self, model: str = "m") -> int:
        """Number of requests of a model that have failed, for whatever reason."""
        return self.server.repository.get(model, "").statistics.failed

    async def metrics(self) -> dict[str, float]:
        """All samples by `name{labels}`, as a scraper gets them."""
        url = f"http://127.0.0.1:{self.server.metrics_port}/metrics"
        text = await asyncio.to_thread(_get, url)
        lines = (line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        return {name: float(value) for name, value in lines}

    async def metric(self, name: str, labels: str = 'model="m",version="1"') -> float:
        """One sample."""
        return (await self.metrics())[f"{name}{{{labels}}}"]


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=60) as response:
        text: str = response.read().decode()
    return text


@asynccontextmanager
async def serving(
    repository: Path,
    models: Mapping[str, MemoryModel] | None = None,
    *,
    config: str = "",
    settings: Settings | None = None,
    backends: Mapping[str, Backend] | None = None,
    load: Callable[[str], Any] = ctypes.CDLL,
    start_front: Callable[[tuple[int, int, int]], Awaitable[ForkedFront]] = nursery.start_front,
    options: Sequence[tuple[str, Any]] = (),
) -> AsyncIterator[Served]:
    """Serve `repository`, in which a folder with `config` is written for each of `models` that has none. `backends`
    replace those of the same names; `load` opens the CUDA driver, `start_front` starts a process that speaks gRPC,
    `options` are additional options of the channel."""
    models = models or {}
    for name in models:
        if not (repository / name).exists():
            write_model(repository, name, config)

    def backend_of(name: str) -> Backend:
        if backends is not None and name in backends:
            return backends[name]
        return MemoryBackend(models) if name == "memory" else registered(name)

    given = settings or Settings(paths=(repository,))
    frontends = int(os.environ.get("PACELINE_FRONTENDS", given.frontends))
    local = replace(given, grpc_address="127.0.0.1", grpc_port=0, metrics_port=0, frontends=frontends)
    fronts: list[int] = []

    async def start(descriptors: tuple[int, int, int]) -> ForkedFront:
        front = await start_front(descriptors)
        fronts.append(front.pid)
        return front

    server = Server(local, backend_of, load, start)
    await server.start()
    try:
        target = f"127.0.0.1:{server.grpc_port}"
        async with grpc.aio.insecure_channel(target, options=[*_UNLIMITED, *options]) as channel:
            if local.tls is None:
                await asyncio.wait_for(channel.channel_ready(), 20)  # calls that wait for it are sent in any order
            yield Served(server, channel, GRPCInferenceServiceStub(channel), fronts)
    finally:
        for model in models.values():
            model.gate.open()
        await server.stop(5)


async def failure_of(call: Any) -> tuple[grpc.StatusCode, str]:
    """Status and message of a call that must fail."""
    try:
        answer = await call
    except grpc.aio.AioRpcError as error:
        return error.code(), error.details() or ""
    raise AssertionError(f"expected a failure, got {answer}")
