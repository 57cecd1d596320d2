"""`inference.GRPCInferenceService`: convert, call, convert.

Lives here: the RPCs and the boundary at which exceptions become statuses. Must not: checks (codec), look-ups
(repository) or waiting policy (batcher).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any, TypeVar

import grpc

from protos import inference_pb2 as pb
from protos.inference_pb2_grpc import GRPCInferenceServiceServicer
from scheduler.errors import SchedulerError
from scheduler.policy import NEVER
from server.errors import NotSupported, status_of
from server.repository import Repository, ServedModel

__all__ = ["InferenceService"]

_log = logging.getLogger("paceline.server.service")

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
Context = Any
Method = Callable[[Any, RequestT, Context], Awaitable[ResponseT]]


def _answering(method: Method[RequestT, ResponseT]) -> Method[RequestT, ResponseT]:
    """Turn whatever `method` raises into the status that the table gives it."""

    @wraps(method)
    async def answer(self: Any, request: RequestT, context: Context) -> ResponseT:
        try:
            return await method(self, request, context)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - the caller is owed an answer
            code = status_of(error)
            if code is None:
                _log.exception("%s failed on something unforeseen", method.__name__)
                code, text = grpc.StatusCode.INTERNAL, f"internal error: {type(error).__name__}: {error}"
            else:
                text = _text(request, error)
        await context.abort(code, text)
        raise AssertionError("abort returned")

    return answer


def _text(request: object, error: Exception) -> str:
    """What the caller reads. The batcher's own errors don't know the model's name."""
    if isinstance(error, SchedulerError) and isinstance(request, pb.ModelInferRequest):
        return f"model '{request.model_name}': {error}"
    return str(error)


class InferenceService(GRPCInferenceServiceServicer):
    """The RPCs of the Open Inference Protocol over a repository of models."""

    def __init__(self, repository: Repository, server_id: str, version: str) -> None:
        self._repository = repository
        self._server_id = server_id
        self._version = version
        self.serving = False

    # hot path: see bench/
    @_answering
    async def ModelInfer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        model = self._repository.get(request.model_name, request.model_version)
        decoded = model.codec.decode(request)
        results = await model.batcher.submit(
            decoded.inputs,
            decoded.rows,
            decoded.key,
            timeout_ns=decoded.timeout_ns,
            rpc_deadline_ns=_deadline_ns(context),
        )
        return model.codec.encode(request, decoded, results)

    @_answering
    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    @_answering
    async def ServerReady(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self.serving and self._repository.ready)

    @_answering
    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
        return pb.ModelReadyResponse(ready=self._repository.is_ready(request.name, request.version))

    @_answering
    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Context) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name=self._server_id, version=self._version, extensions=["binary_tensor_data"])

    @_answering
    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:
        model = self._repository.get(request.name, request.version)
        versions = [request.version] if request.version else self._repository.versions(model.name)
        return _metadata(model, versions)


def _metadata(model: ServedModel, versions: list[str]) -> pb.ModelMetadataResponse:
    lead = [-1] if model.spec.batched else []
    tensor = pb.ModelMetadataResponse.TensorMetadata
    return pb.ModelMetadataResponse(
        name=model.name,
        versions=versions,
        platform=model.platform,
        inputs=[tensor(name=one.name, datatype=one.datatype, shape=[*lead, *one.dims]) for one in model.spec.inputs],
        outputs=[tensor(name=one.name, datatype=one.datatype, shape=[*lead, *one.dims]) for one in model.spec.outputs],
    )


def _deadline_ns(context: Context) -> int:
    """When the caller gives up, on the monotonic clock."""
    remaining_s = context.time_remaining()
    return NEVER if remaining_s is None else time.monotonic_ns() + int(remaining_s * 1e9)


def _unsupported(name: str) -> Method[Any, Any]:
    async def refuse(self: Any, request: Any, context: Context) -> Any:
        raise NotSupported(f"{name} is not supported by this build")

    refuse.__name__ = name
    return _answering(refuse)


_LATER = (
    "ModelConfig",
    "ModelStatistics",
    "ModelStreamInfer",
    "RepositoryIndex",
    "RepositoryModelLoad",
    "RepositoryModelUnload",
    "SystemSharedMemoryStatus",
    "SystemSharedMemoryRegister",
    "SystemSharedMemoryUnregister",
    "CudaSharedMemoryStatus",
    "CudaSharedMemoryRegister",
    "CudaSharedMemoryUnregister",
    "TraceSetting",
    "LogSettings",
)
for _name in _LATER:
    setattr(InferenceService, _name, _unsupported(_name))
