"""gRPC's standard services: health (Check, List, Watch), for the server as a whole and per service, and reflection,
which lets a client with no .proto file list, describe and call.

Lives here: the statuses and who watches them; the descriptors. Must not: decide whether the server is ready, as it
is told.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import TypeVar

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, text_format
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from paceline.protos import inference_pb2, model_config_pb2
from paceline.server.rpc.calls import Context
from paceline.server.rpc.gate import Registry

INFERENCE_SERVICE = "inference.GRPCInferenceService"
HEALTH_SERVICE = "grpc.health.v1.Health"
_REFLECTION_SERVICES = ("grpc.reflection.v1.ServerReflection", "grpc.reflection.v1alpha.ServerReflection")
SERVICES = (INFERENCE_SERVICE, HEALTH_SERVICE, *_REFLECTION_SERVICES)

T = TypeVar("T")

LIVENESS = "liveness"
"""The service that is SERVING as long as the server answers and a restart wouldn't help. It is for whoever restarts
servers that aren't live: one that isn't ready, because a model is missing or it is about to end, gains nothing from a
restart; one that has lost its devices does."""

_Response = health_pb2.HealthCheckResponse


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """All of `services`, and "" for the server, have the same status: SERVING once `set_serving(True)` was called.
    LIVENESS is SERVING from the beginning, unless `set_serving` says otherwise; its Watch streams also end at `close`.

    The messages are grpcio-health-checking's. Its servicer isn't used: it forgets every watcher of a service as soon as
    one of them goes, and its Watch streams never end, which would hold up each shutdown for the whole grace period.
    """

    def __init__(self, services: Iterable[str]) -> None:
        self._services = frozenset(("", LIVENESS, *services))
        self._serving = False
        self._live = True
        self._closed = False
        self._changed = asyncio.Event()

    def set_serving(self, serving: bool, live: bool = True) -> None:
        """Set the status, and that of LIVENESS, and tell the watchers. Has no effect after `close`."""
        if self._closed:
            return
        self._serving, self._live = serving, live
        self._tell()

    def close(self) -> None:
        """Set the status to NOT_SERVING for good; Watch streams report it and end."""
        self._serving = False
        self._closed = True
        self._tell()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        if request.service not in self._services:
            refusal = context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service '{request.service}'")
            # As in `answering`: the error that ends the call is kept with it, and its traceback holds this frame.
            del request, context
            await refusal
        return _Response(status=self._status(request.service))

    async def List(self, request: health_pb2.HealthListRequest, context: Context) -> health_pb2.HealthListResponse:
        """The status of each service. Called only if grpcio-health-checking has its messages, from 1.85 on."""
        statuses = {service: _Response(status=self._status(service)) for service in self._services}
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        """Send the status now and at each change. An unknown service is SERVICE_UNKNOWN, and stays so."""
        last: int | None = None
        while True:
            # Read these together: any of them may change while a response is being written.
            changed, closed = self._changed, self._closed
            status = self._status(request.service)
            if status != last:
                await context.write(_Response(status=status))
                last = status
            if closed:
                return
            await changed.wait()

    def _status(self, service: str) -> int:
        if service not in self._services:
            return int(_Response.SERVICE_UNKNOWN)
        serving = self._live if service == LIVENESS else self._serving
        status: int = _Response.SERVING if serving else _Response.NOT_SERVING
        return status

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


class Reflection:
    """Answers reflection streams until `close`, which ends those that are open. The service has both names that clients
    ask for: `grpc.reflection.v1`, which newer ones try first, and `v1alpha`; the messages are the same."""

    def __init__(self) -> None:
        self._servicer = reflection.aio.ReflectionServicer(SERVICES, pool=_Pool(_pool()))  # type: ignore[attr-defined]
        self._closed = asyncio.Event()

    def add_to(self, server: Registry) -> None:
        """Register both names with `server`."""
        for service in _REFLECTION_SERVICES:
            handler = grpc.stream_stream_rpc_method_handler(
                self._answer,
                request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
                response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
            )
            server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(service, {"ServerReflectionInfo": handler}),)
            )

    def close(self) -> None:
        self._closed.set()

    async def _answer(self, requests: AsyncIterator[Message], context: Context) -> AsyncIterator[Message]:
        try:
            async for response in self._servicer.ServerReflectionInfo(_until(self._closed, requests), context):
                yield response
            return
        except DecodeError as error:
            refusal = context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        # As in `answering`: the error that ends the call is kept with it, and its traceback holds this frame.
        del requests, context
        await refusal


async def _until(closed: asyncio.Event, items: AsyncIterator[T]) -> AsyncIterator[T]:
    """The items, up to the moment when `closed` is set."""
    closing = asyncio.ensure_future(closed.wait())
    try:
        while True:
            coming = asyncio.ensure_future(anext(items, None))
            await asyncio.wait((coming, closing), return_when=asyncio.FIRST_COMPLETED)
            if not coming.done() or (item := coming.result()) is None:
                coming.cancel()
                return
            yield item
    finally:
        closing.cancel()


class _Pool:
    """A descriptor pool that also finds the file of a method. Clients ask for it to describe a method, and protobuf's
    own pool (seen in 6.33) knows every kind of symbol but that."""

    def __init__(self, pool: descriptor_pool.DescriptorPool) -> None:
        self._pool = pool

    def FindFileContainingSymbol(self, symbol: str) -> FileDescriptor:
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            return self._pool.FindMethodByName(symbol).containing_service.file

    def __getattr__(self, name: str) -> object:
        return getattr(self._pool, name)


def _pool() -> descriptor_pool.DescriptorPool:
    """paceline's files and those of the standard services. No other pool is used: that of `protos` is private, and the
    default one may hold other people's files of the same names."""
    pool = descriptor_pool.DescriptorPool()
    for module in (model_config_pb2, inference_pb2, health_pb2, reflection_pb2):
        pool.AddSerializedFile(module.DESCRIPTOR.serialized_pb)
    pool.AddSerializedFile(_reflection_v1())
    return pool


def _reflection_v1() -> bytes:
    """The descriptor of `grpc.reflection.v1`: that of v1alpha under the other package name."""
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    text = text_format.MessageToString(file).replace(".v1alpha", ".v1")
    file = text_format.Parse(text, descriptor_pb2.FileDescriptorProto())
    file.name = "grpc/reflection/v1/reflection.proto"
    return file.SerializeToString()
