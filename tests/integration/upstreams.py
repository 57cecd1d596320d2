"""Servers for the proxy to stand in front of, built from the generated stubs alone; and the proxy itself.

Lives here: `Upstream`, which answers as a test wants it to and records what it receives. Must not: assertions about
behaviour, or anything of the product's server.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from paceline.protos import inference_pb2 as pb
from paceline.protos import model_config_pb2 as config_pb
from paceline.protos.inference_pb2_grpc import (
    GRPCInferenceServiceServicer,
    add_GRPCInferenceServiceServicer_to_server,
)
from paceline.server.config import Settings
from paceline.server.models.upstream_settings import UpstreamSettings
from tests.integration.scripted import request, send
from tests.integration.serving import Served, serving
from tests.polling import eventually_async
from tests.wire import Array

__all__ = [
    "Call",
    "Upstream",
    "batch_of_patient_and_hasty",
    "behind",
    "calls_behind_a_busy_upstream",
    "fp32",
    "proxying",
    "tensors_of",
    "upstream",
]

NAMED = {"models": ("m",)}
Call = pb.ModelInferRequest
Answer = Callable[[pb.ModelInferRequest], pb.ModelInferResponse]


class Upstream(GRPCInferenceServiceServicer):
    """A server of the six RPCs and one model, `m`: FP32 [-1, 2], input `a`, outputs `x`, which is twice `a`, and `y`,
    which is `-a`.

    `calls` are the requests of ModelInfer; `headers` and `left_s` are the headers and the remaining time of each.
    `answer` makes answers; calls wait for `gate` first, and for the one of `gates` with their first row's mark; `abort`
    refuses instead. ModelConfig returns `config`; None: the server has no such RPC.
    """

    def __init__(self) -> None:
        self.ready = self.model_ready = True
        self.versions: Sequence[str] = ()
        self.inputs = {"a": ("FP32", [-1, 2])}
        self.outputs = {"x": ("FP32", [-1, 2]), "y": ("FP32", [-1, 2])}
        self.config: config_pb.ModelConfig | None = None
        self.index: Sequence[pb.RepositoryIndexResponse.ModelIndex] | None = None
        self.calls: list[pb.ModelInferRequest] = []
        self.headers: list[dict[str, str]] = []
        self.left_s: list[float | None] = []
        self.under_way = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.gates: dict[float, asyncio.Event] = {}
        self.abort: Callable[[pb.ModelInferRequest], tuple[grpc.StatusCode, str] | None] = lambda request: None
        self.answer: Answer = double

    async def ServerReady(self, request: Any, context: Any) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self.ready)

    async def ModelReady(self, request: Any, context: Any) -> pb.ModelReadyResponse:
        if request.name != "m":
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no model {request.name}")
        return pb.ModelReadyResponse(ready=self.model_ready)

    async def ModelMetadata(self, request: Any, context: Any) -> pb.ModelMetadataResponse:
        answer = pb.ModelMetadataResponse(name="m", versions=self.versions, platform="stub")
        for told, tensors in ((answer.inputs, self.inputs), (answer.outputs, self.outputs)):
            for name, (datatype, shape) in tensors.items():
                told.add(name=name, datatype=datatype, shape=shape)
        return answer

    async def ModelConfig(self, request: Any, context: Any) -> pb.ModelConfigResponse:
        if self.config is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "what is that?")
        return pb.ModelConfigResponse(config=self.config)

    async def RepositoryIndex(self, request: Any, context: Any) -> pb.RepositoryIndexResponse:
        if self.index is None:
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "what is that?")
        return pb.RepositoryIndexResponse(models=self.index)

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Any) -> pb.ModelInferResponse:
        self.calls.append(request)
        self.headers.append(dict(context.invocation_metadata()))
        self.left_s.append(context.time_remaining())
        self.under_way += 1
        try:
            await self.gate.wait()
            if self.gates and (own := self.gates.get(float(fp32(request)[0, 0]))):
                await own.wait()
        finally:
            self.under_way -= 1
        if refusal := self.abort(request):
            await context.abort(*refusal)
        return self.answer(request)

    @property
    def marks(self) -> list[list[float]]:
        """The first column of the first input, call by call."""
        return [[float(row[0]) for row in fp32(call)] for call in self.calls]


def fp32(request: pb.ModelInferRequest) -> Array:
    """The first input."""
    return np.frombuffer(request.raw_input_contents[0], "<f4").reshape(tuple(request.inputs[0].shape))


def double(request: pb.ModelInferRequest) -> pb.ModelInferResponse:
    """`x` = 2 a, `y` = -a; all outputs, or those requested."""
    results = {"x": 2 * fp32(request), "y": -fp32(request)}
    wanted = [output.name for output in request.outputs] or list(results)
    answer = pb.ModelInferResponse(model_name=request.model_name, model_version=request.model_version, id=request.id)
    for name in wanted:
        answer.outputs.add(name=name, datatype="FP32", shape=results[name].shape)
        answer.raw_output_contents.append(results[name].tobytes())
    return answer


def tensors_of(answer: pb.ModelInferResponse) -> Mapping[str, Array]:
    """The FP32 outputs of an answer."""
    return {
        output.name: np.frombuffer(data, "<f4").reshape(tuple(output.shape))
        for output, data in zip(answer.outputs, answer.raw_output_contents, strict=True)
    }


@asynccontextmanager
async def upstream(
    servicer: GRPCInferenceServiceServicer, port: int = 0, options: Sequence[tuple[str, Any]] = ()
) -> AsyncIterator[str]:
    """Serve `servicer`, and yield the target."""
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0), *options])
    add_GRPCInferenceServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    try:
        yield f"127.0.0.1:{bound}"
    finally:
        await server.stop(0)


@asynccontextmanager
async def proxying(
    tmp_path: Path, target: str, *, settings: Settings | None = None, **upstream: Any
) -> AsyncIterator[Served]:
    """The product in front of `target`; `upstream` are fields of UpstreamSettings. It checks health often."""
    given = UpstreamSettings(target, **{"health_secs": 0.02, "batches": 1, **upstream})
    async with serving(tmp_path, settings=replace(settings or Settings(paths=()), upstream=given)) as served:
        yield served


@asynccontextmanager
async def behind(tmp_path: Path, stub: Upstream, **given: Any) -> AsyncIterator[Served]:
    """The proxy in front of `stub`."""
    async with upstream(stub) as target, proxying(tmp_path, target, **{**NAMED, **given}) as served:
        yield served


async def calls_behind_a_busy_upstream(
    served: Served, stub: Upstream, *requests: pb.ModelInferRequest, **how: Any
) -> list[Any]:
    """Calls: the first one keeps the upstream busy, and the others, of `requests`, wait here in that order."""
    stub.gate.clear()
    before = stub.under_way
    calls = send(served, request(-1), timeout_s=None)
    await eventually_async(lambda: stub.under_way == before + 1, "the upstream is busy")
    for number, one in enumerate(requests):
        calls += send(served, one, **how)
        await eventually_async(lambda n=number: served.waiting("m") == n + 1, f"{number + 1} waiting")
    return calls


async def batch_of_patient_and_hasty(served: Served, stub: Upstream, order: Sequence[int] = (1, 2)) -> tuple[Any, Any]:
    """Two calls that the upstream has as one batch, which waits at `stub.gates[1]`: of mark 1, whose caller waits for a
    minute, and of mark 2, whose caller doesn't wait for long. `order` is that of their marks in the queue."""
    for timeout_s in (0.3, 3.0, 15.0):
        stub.gates[1] = stub.gates[2] = asyncio.Event()
        before = len(stub.calls)
        (blocker,) = await calls_behind_a_busy_upstream(served, stub)
        calls: dict[int, Any] = {}
        for mark in order:
            (calls[mark],) = send(served, request(mark), timeout_s={1: 60, 2: timeout_s}[mark])

            def waiting(calls: dict[int, Any] = calls) -> bool:
                return served.waiting("m") == len(calls) or any(call.done() for call in calls.values())

            await eventually_async(waiting, "waiting")
        stub.gate.set()
        await eventually_async(lambda n=before: len(stub.calls) >= n + 2, "the batch")
        if stub.marks[-1] == list(order):
            return calls[1], calls[2]
        stub.gates[1].set()  # on so busy a machine, the hasty one has left before
        await asyncio.gather(blocker, *calls.values(), return_exceptions=True)
    raise AssertionError("no batch of both")
