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
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from backends.base import Tensors, TensorSpec
from protos import inference_pb2 as pb
from protos.inference_pb2_grpc import GRPCInferenceServiceServicer
from scheduler.batcher import BatchFacts, Pending
from scheduler.errors import SchedulerError
from scheduler.policy import NEVER
from server.codec import DecodedRequest, tensor_bytes
from server.errors import InvalidRequest, ModelNotReady, NotSupported, status_of
from server.repository import Repository, ServedModel
from server.splitting import submit_parts

__all__ = ["InferenceService"]

_log = logging.getLogger("paceline.server.service")

_MAX_TEXT_BYTES = 2_000
"""Of a status's message. It travels in a header, each byte written as up to three, and a client that gets more than
8 KiB of headers drops the answer and reports RESOURCE_EXHAUSTED instead."""

_QUIET_S = 0.05
_QUIET_TRIES = 20

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
Context = Any
Method = Callable[[Any, RequestT, Context], Awaitable[ResponseT]]


def _answering(method: Method[RequestT, ResponseT]) -> Method[RequestT, ResponseT]:
    """Turn whatever `method` raises into the status that the table gives it."""

    @wraps(method)
    async def answer(self: Any, request: RequestT, context: Context) -> ResponseT:
        try:
            if isinstance(request, DecodeError):
                raise InvalidRequest(str(request))
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
        await context.abort(code, _sendable(text))
        raise AssertionError("abort returned")

    return answer


def _text(request: object, error: Exception) -> str:
    """What the caller reads. The batcher's own errors don't know the model's name."""
    if isinstance(error, SchedulerError) and isinstance(request, pb.ModelInferRequest):
        return f"model '{request.model_name}': {error}"
    return str(error)


def _sendable(text: str) -> str:
    """`text`, its middle left out if it is too long to arrive, and without what UTF-8 can't say."""
    data = text.encode(errors="backslashreplace")
    if len(data) > _MAX_TEXT_BYTES:
        half = _MAX_TEXT_BYTES // 2
        data = data[:half] + b" [...] " + data[-half:]
    return data.decode(errors="ignore")


class InferenceService(GRPCInferenceServiceServicer):
    """The RPCs of the Open Inference Protocol over a repository of models."""

    def __init__(self, repository: Repository, server_id: str, version: str) -> None:
        self._repository = repository
        self._server_id = server_id
        self._version = version
        self.serving = False
        self._refused = 0

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the service with `server`, like the generated function, but for bytes that are no message: gRPC
        would answer those with UNKNOWN and a traceback in the log, this service does with INVALID_ARGUMENT."""
        service = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
        handlers = {method.name: _handler(method, getattr(self, method.name)) for method in service.methods}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))

    async def refuse_until_quiet(self) -> None:
        """Refuse requests until none has come for a moment, or for a second. gRPC takes up one call at a time; those
        that have arrived and wait for their turn when its server stops would be told CANCELLED, for no doing of their
        own, and their clients wouldn't try elsewhere."""
        self.serving = False
        for _ in range(_QUIET_TRIES):
            seen = self._refused
            await asyncio.sleep(_QUIET_S)
            if self._refused == seen:
                return

    # hot path: see bench/
    @_answering
    async def ModelInfer(self, request: pb.ModelInferRequest, context: Context) -> pb.ModelInferResponse:
        if not self.serving:
            self._refused += 1
            raise ModelNotReady("the server is stopping")
        model = self._repository.get(request.model_name, request.model_version)
        decoded = model.codec.decode(request)
        results, pending = await _execute(model, decoded, _deadline_ns(context))
        response = model.codec.encode(request, decoded, results)
        if decoded.parameters.batch_info and pending.facts is not None:
            _tell_facts(response, model.batch_id_prefix, pending.facts)
        return response

    @_answering
    async def ServerLive(self, request: pb.ServerLiveRequest, context: Context) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    @_answering
    async def ServerReady(self, request: pb.ServerReadyRequest, context: Context) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self.serving and self._repository.ready)

    @_answering
    async def ModelReady(self, request: pb.ModelReadyRequest, context: Context) -> pb.ModelReadyResponse:
        ready = self._repository.is_ready(request.name, request.version)
        return pb.ModelReadyResponse(ready=ready and self.serving)

    @_answering
    async def ServerMetadata(self, request: pb.ServerMetadataRequest, context: Context) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(name=self._server_id, version=self._version, extensions=["binary_tensor_data"])

    @_answering
    async def ModelMetadata(self, request: pb.ModelMetadataRequest, context: Context) -> pb.ModelMetadataResponse:
        model = self._repository.get(request.name, request.version)
        versions = [model.version] if request.version else self._repository.versions(model.name)
        return _metadata(model, versions)


def _handler(method: MethodDescriptor, behaviour: Callable[..., Any]) -> Any:
    streams = method.client_streaming and method.server_streaming
    make = grpc.stream_stream_rpc_method_handler if streams else grpc.unary_unary_rpc_method_handler
    request, response = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
    return make(behaviour, _tolerant(request.FromString), response.SerializeToString)


def _tolerant(parse: Callable[[bytes], Message]) -> Callable[[bytes], Message | DecodeError]:
    def read(data: bytes) -> Message | DecodeError:
        try:
            return parse(data)
        except DecodeError as error:
            return error

    return read


async def _execute(
    model: ServedModel, decoded: DecodedRequest, rpc_deadline_ns: int
) -> tuple[Tensors, Pending[Tensors, Tensors]]:
    """Have the batcher run the request; the results, and what was waited for (of a split request, the last part)."""
    how = {
        "size_bytes": sum(map(tensor_bytes, decoded.inputs)) if model.counts_bytes else 0,
        "priority": decoded.parameters.priority,
        "timeout_ns": decoded.parameters.timeout_ns,
        "rpc_deadline_ns": rpc_deadline_ns,
    }
    if model.max_batch_rows and decoded.rows > model.max_batch_rows:
        return await submit_parts(model.batcher, decoded.inputs, decoded.rows, decoded.key, **how)
    pending = model.batcher.submit(decoded.inputs, decoded.rows, decoded.key, **how)
    return await pending, pending


def _tell_facts(response: pb.ModelInferResponse, batch_id_prefix: str, facts: BatchFacts) -> None:
    told = response.parameters
    told["paceline_batch_id"].string_param = f"{batch_id_prefix}-{facts.number}"
    told["paceline_batch_rows"].int64_param = facts.rows
    told["paceline_batch_padded_rows"].int64_param = facts.padded_rows
    told["paceline_queue_us"].int64_param = facts.queue_ns // 1_000
    told["paceline_compute_us"].int64_param = facts.compute_ns // 1_000


def _metadata(model: ServedModel, versions: list[str]) -> pb.ModelMetadataResponse:
    return pb.ModelMetadataResponse(
        name=model.name,
        versions=versions,
        platform=model.platform,
        inputs=[_tensor_metadata(one, model.spec.batched) for one in model.spec.inputs],
        outputs=[_tensor_metadata(one, model.spec.batched) for one in model.spec.outputs],
    )


def _tensor_metadata(tensor: TensorSpec, batched: bool) -> pb.ModelMetadataResponse.TensorMetadata:
    lead = [-1] if batched and not tensor.shape_tensor else []
    return pb.ModelMetadataResponse.TensorMetadata(
        name=tensor.name, datatype=tensor.datatype, shape=[*lead, *tensor.dims]
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
