"""The calls both clients make, as values: which method, what is sent, how the answer is read.

Lives here: the table of methods and one builder per call. Must not live here: channels, deadlines, waiting, gRPC
errors. Rule: a builder returns a `Call` and does no IO, so the blocking and the asyncio client differ only in how they
wait.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Generic, TypeVar

from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.clients.errors import ResponseError
from paceline.clients.messages import (
    IndexEntry,
    InferResult,
    ModelMetadata,
    ServerMetadata,
    checked_text,
    index_of,
    infer_result,
    model_metadata_of,
    server_metadata_of,
)
from paceline.protos import inference_pb2_grpc
from paceline.protos.inference_pb2 import (
    ModelInferRequest,
    ModelMetadataRequest,
    ModelReadyRequest,
    ModelReadyResponse,
    RepositoryIndexRequest,
    ServerLiveRequest,
    ServerMetadataRequest,
    ServerReadyRequest,
    ServerReadyResponse,
)

__all__ = [
    "Call",
    "Method",
    "health",
    "infer",
    "model_metadata",
    "model_ready",
    "repository_index",
    "server_live",
    "server_metadata",
    "server_ready",
    "server_ready_once_connected",
    "stubs",
]

T = TypeVar("T")


class Method(StrEnum):
    """The RPC methods in use, by their names on the wire."""

    MODEL_INFER = "ModelInfer"
    MODEL_STREAM_INFER = "ModelStreamInfer"
    SERVER_LIVE = "ServerLive"
    SERVER_READY = "ServerReady"
    MODEL_READY = "ModelReady"
    SERVER_METADATA = "ServerMetadata"
    MODEL_METADATA = "ModelMetadata"
    REPOSITORY_INDEX = "RepositoryIndex"
    HEALTH_CHECK = "Check"


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One call to be made.

    `read` turns the response message into what the caller gets. `wait_for_ready` is gRPC's: if True, the call waits for
    a connection as long as its timeout allows; if None, the channel's service config decides, by default not to wait.
    """

    method: Method
    request: Message
    read: Callable[[Any], T]
    wait_for_ready: bool | None = None


def stubs(channel: Any) -> dict[Method, Callable[..., Any]]:
    """One callable per method, on a grpc or a grpc.aio channel: the generated stubs serve both."""
    generated: tuple[Callable[[Any], Any], ...] = (
        inference_pb2_grpc.GRPCInferenceServiceStub,
        health_pb2_grpc.HealthStub,
    )
    inference, health_check = (stub(channel) for stub in generated)
    owners = dict.fromkeys(Method, inference) | {Method.HEALTH_CHECK: health_check}
    return {method: getattr(owner, method) for method, owner in owners.items()}


def infer(request: ModelInferRequest) -> Call[InferResult]:
    """ModelInfer, with a request made by `clients.messages.infer_request`."""
    return Call(Method.MODEL_INFER, request, infer_result)


def server_live() -> Call[bool]:
    """ServerLive: whether the server says it is alive."""
    return Call(Method.SERVER_LIVE, ServerLiveRequest(), lambda response: bool(response.live))


def server_ready() -> Call[bool]:
    """ServerReady: whether the server says it can take requests for its models."""
    return Call(Method.SERVER_READY, ServerReadyRequest(), _ready)


def server_ready_once_connected() -> Call[bool]:
    """ServerReady, waiting for a connection rather than failing without one."""
    return replace(server_ready(), wait_for_ready=True)


def model_ready(model: str, version: str) -> Call[bool]:
    """ModelReady: whether the model can take requests; with an empty version, the server chooses."""
    request = ModelReadyRequest(name=checked_text("model", model), version=checked_text("version", version))
    return Call(Method.MODEL_READY, request, _ready)


def server_metadata() -> Call[ServerMetadata]:
    """ServerMetadata: the server's name, version and extensions."""
    return Call(Method.SERVER_METADATA, ServerMetadataRequest(), server_metadata_of)


def model_metadata(model: str, version: str) -> Call[ModelMetadata]:
    """ModelMetadata: the model's versions, platform, inputs and outputs."""
    request = ModelMetadataRequest(name=checked_text("model", model), version=checked_text("version", version))
    return Call(Method.MODEL_METADATA, request, model_metadata_of)


def repository_index() -> Call[tuple[IndexEntry, ...]]:
    """RepositoryIndex, Triton's extension: the state of each version of each model."""
    return Call(Method.REPOSITORY_INDEX, RepositoryIndexRequest(), index_of)


def health(service: str) -> Call[str]:
    """Check of grpc.health.v1: the name of the status, such as SERVING; an empty service means the whole server."""
    return Call(
        Method.HEALTH_CHECK, health_pb2.HealthCheckRequest(service=checked_text("service", service)), _serving_status
    )


def _ready(response: ServerReadyResponse | ModelReadyResponse) -> bool:
    return response.ready


def _serving_status(response: health_pb2.HealthCheckResponse) -> str:
    try:
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))
    except ValueError as error:
        raise ResponseError(f"the health service answered with an unknown status: {response.status}") from error
