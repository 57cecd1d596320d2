"""What the blocking and the asyncio client share: settings, the channel, the calls, and the arithmetic of waiting.

Lives here: the constructor, channel options, the one channel and its closing, per-call arguments; the calls as values
(which method, what is sent, how the answer is read), so that the clients differ only in how they wait; the pauses of
wait_ready. Must not live here: anything that waits, or reads a clock; callers pass `now_s`.
"""

from __future__ import annotations

import math
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from numbers import Real
from operator import attrgetter
from types import EllipsisType, ModuleType
from typing import Any, ClassVar, Final, Generic, TypeVar

import grpc
from google.protobuf.message import Message
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.clients import messages
from paceline.clients.answers import Answers, enable_empty_final
from paceline.clients.connection import Metadata, Tls, authorization, checked_metadata, checked_target
from paceline.clients.errors import ClientClosed, DeadlineExceeded, InferenceError, ResponseError
from paceline.clients.messages import checked_text, infer_result
from paceline.protos import inference_pb2 as pb
from paceline.protos import inference_pb2_grpc
from paceline.protos.model_config_pb2 import ModelConfig

__all__ = [
    "DEFAULT_TIMEOUT_S",
    "REPOSITORY_INDEX",
    "SERVER_LIVE",
    "SERVER_METADATA",
    "SERVER_READY",
    "SERVER_READY_ONCE_CONNECTED",
    "BaseClient",
    "Call",
    "ReadyWait",
    "Stubs",
    "Timeout",
    "health_call",
    "infer_call",
    "model_config_call",
    "model_metadata_call",
    "model_ready_call",
    "models_call",
    "stream_infer_call",
]

T = TypeVar("T")

Timeout = float | None | EllipsisType
"""Seconds. None and infinity mean no timeout. 0 or less has already passed: the call raises DeadlineExceeded, whatever
the server does. `...`, the default, means the client's own timeout."""

Stubs = Mapping[str, Callable[..., Any]]
"""A channel's callables, by the names of their RPCs."""

DEFAULT_TIMEOUT_S: Final = 60.0

_CHANNEL_OPTIONS: Final[Mapping[str, Any]] = {
    # Tensors outgrow gRPC's 4 MiB; the server's own limit is the one that counts.
    "grpc.max_send_message_length": -1,
    "grpc.max_receive_message_length": -1,
    # gRPC's own back-off grows to two minutes, in which a restarted server would look dead.
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 1000,
}

# About 31 years; a longer timeout counts as none. gRPC's times are 64-bit nanoseconds since 1970, and what is later
# counts as the past.
_LONGEST_S: Final = 1e9

_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0


@dataclass(frozen=True, slots=True)
class Call(Generic[T]):
    """One call to be made.

    `method` is the RPC's name on the wire. `read` turns the response message into what the caller gets.
    `wait_for_ready` is gRPC's: if True, the call waits for a connection as long as its timeout allows; if None, the
    channel's service config decides, by default not to wait.
    """

    method: str
    request: Message | Iterator[Message]
    read: Callable[[Any], T]
    wait_for_ready: bool | None = None


_READY: Final[Callable[[Any], bool]] = attrgetter("ready")

SERVER_LIVE: Final[Call[bool]] = Call("ServerLive", pb.ServerLiveRequest(), attrgetter("live"))
SERVER_READY: Final = Call("ServerReady", pb.ServerReadyRequest(), _READY)
SERVER_READY_ONCE_CONNECTED: Final = Call("ServerReady", pb.ServerReadyRequest(), _READY, wait_for_ready=True)
SERVER_METADATA: Final = Call(
    "ServerMetadata",
    pb.ServerMetadataRequest(),
    lambda response: messages.ServerMetadata(response.name, response.version, tuple(response.extensions)),
)
REPOSITORY_INDEX: Final = Call(
    "RepositoryIndex",
    pb.RepositoryIndexRequest(),
    lambda response: tuple(
        messages.IndexEntry(each.name, each.version, each.state, each.reason) for each in response.models
    ),
)


def infer_call(request: pb.ModelInferRequest) -> Call[messages.InferResult]:
    """ModelInfer, with a request made by `clients.messages.infer_request`."""
    return Call("ModelInfer", request, infer_result)


def stream_infer_call(request: pb.ModelInferRequest, answers: Answers) -> Call[pb.ModelInferResponse | None]:
    """ModelStreamInfer for one request, after which nothing is sent; `read` is for each of the stream's messages."""
    enable_empty_final(request)
    return Call("ModelStreamInfer", iter((request,)), answers.read)


def model_ready_call(model: str, version: str) -> Call[bool]:
    """ModelReady: whether the model can take requests; with an empty version, the server chooses."""
    request = pb.ModelReadyRequest(name=checked_text("model", model), version=checked_text("version", version))
    return Call("ModelReady", request, _READY)


def model_metadata_call(model: str, version: str) -> Call[messages.ModelMetadata]:
    """ModelMetadata: the model's versions, platform, inputs and outputs."""
    request = pb.ModelMetadataRequest(name=checked_text("model", model), version=checked_text("version", version))
    return Call("ModelMetadata", request, _model_metadata)


def _model_metadata(response: pb.ModelMetadataResponse) -> messages.ModelMetadata:
    inputs, outputs = (
        tuple(messages.TensorMetadata(each.name, each.datatype, tuple(each.shape)) for each in tensors)
        for tensors in (response.inputs, response.outputs)
    )
    versions, properties = tuple(response.versions), dict(response.properties)
    return messages.ModelMetadata(response.name, versions, response.platform, inputs, outputs, properties)


def model_config_call(model: str, version: str) -> Call[ModelConfig]:
    """ModelConfig: how the model is served, with nothing left open."""
    request = pb.ModelConfigRequest(name=checked_text("model", model), version=checked_text("version", version))
    return Call("ModelConfig", request, attrgetter("config"))


def models_call(ready_only: bool) -> Call[tuple[messages.IndexEntry, ...]]:
    """RepositoryIndex, by name and then by version: of versions that serve alone, if `ready_only`."""
    return Call("RepositoryIndex", pb.RepositoryIndexRequest(ready=ready_only), _sorted_index)


def _sorted_index(response: pb.RepositoryIndexResponse) -> tuple[messages.IndexEntry, ...]:
    def by_number(entry: messages.IndexEntry) -> tuple[str, int, str]:
        return entry.name, len(entry.version), entry.version

    return tuple(sorted(REPOSITORY_INDEX.read(response), key=by_number))


def health_call(service: str) -> Call[str]:
    """Check of grpc.health.v1: the name of the status, such as SERVING; an empty service means the whole server."""
    request = health_pb2.HealthCheckRequest(service=checked_text("service", service))
    return Call("Check", request, _serving_status)


def _serving_status(response: health_pb2.HealthCheckResponse) -> str:
    try:
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(response.status))
    except ValueError as error:
        raise ResponseError(f"the health service answered with an unknown status: {response.status}") from error


class BaseClient:
    """The settings and the one channel of both clients.

    `target` is a gRPC name such as `127.0.0.1:8001`, `dns:///host:8001` or `unix:/path`; the port of a mere host is
    8001. `timeout_s` is the timeout, in seconds, of each call that is given none of its own. None and infinity mean no
    timeout; with 0 or less, each call raises DeadlineExceeded. `tls` makes the connection TLS: True trusts the
    certificate authorities that come with gRPC, `Tls` names files of your own. `token` is sent with every call, in the
    header `authorization`; without TLS, anybody on the network path can read it. `credentials` are gRPC's own, for what
    `tls` can't express; only one of the two may be given. `options` are gRPC channel options. They override the
    client's, by which message sizes are unlimited and reconnecting is tried at least once a second. `metadata` is sent
    with every call, before the call's own.

    Raises ValueError or TypeError for a target, timeout, token, metadata or anything else that can't be used; each call
    does so for its own arguments.

    Creating a client opens nothing. The first call, or entering it as a context manager, opens the channel, and raises
    ValueError for `tls` files that can't be used. No failed call is repeated: it raises at once, and the caller decides
    whether to try again.
    """

    _transport: ClassVar[ModuleType]
    """The module that makes the channel: grpc or grpc.aio."""

    def __init__(
        self,
        target: str,
        *,
        timeout_s: float | None = DEFAULT_TIMEOUT_S,
        tls: bool | Tls = False,
        token: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        options: Sequence[tuple[str, Any]] = (),
        metadata: Metadata = (),
    ) -> None:
        if tls and credentials is not None:
            raise ValueError("expected one of tls and credentials, got both")
        self._target = checked_target("target", checked_text("target", target), "tls=True")
        self._timeout_s = _bounded_s(timeout_s)
        # The path of a file would count as True here, and public authorities would be trusted instead of that file.
        if not isinstance(tls, bool | Tls | None):
            raise TypeError(f"tls: expected True, False or clients.Tls, got {tls!r}")
        self._tls = Tls() if tls is True else tls or None
        if not isinstance(credentials, grpc.ChannelCredentials | None):
            raise TypeError(f"credentials: expected grpc.ChannelCredentials, got {type(credentials).__name__}")
        self._credentials = credentials
        try:
            self._options = dict(options)
        except (TypeError, ValueError):
            raise TypeError(f"options: expected pairs of name and value, got {options!r}") from None
        self._metadata = (*([authorization(token)] if token is not None else []), *checked_metadata(metadata))
        # Of inputs, by model and version and then by name: of models that were given Python's numbers.
        self._datatypes: dict[tuple[str, str], Mapping[str, str]] = {}
        # Of sequences without an id of their own: two clients hardly begin with the same.
        self._sequence_ids = count(1 + secrets.randbits(62))
        self._lock = threading.Lock()
        self._closed = False
        self._channel: Any = None
        self._stubs: Stubs = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._target!r})"

    def _open(self) -> Stubs:
        """The channel's callables; the first use creates the channel. Raises ClientClosed, and ValueError for `tls`
        files that can't be used."""
        with self._lock:
            if self._closed:
                raise self._has_closed()
            if self._channel is None:
                self._channel = self._new_channel()
                # The generated stubs serve channels of grpc and of grpc.aio.
                inference: Any = inference_pb2_grpc.GRPCInferenceServiceStub
                self._stubs = {**vars(inference(self._channel)), **vars(health_pb2_grpc.HealthStub(self._channel))}
            return self._stubs

    def _has_closed(self) -> ClientClosed:
        return ClientClosed(f"{self!r} is closed; make a new one")

    def _new_channel(self) -> Any:
        of_tls = self._tls.channel_options(self._target) if self._tls is not None else ()
        options = list({**_CHANNEL_OPTIONS, **dict(of_tls), **self._options}.items())
        credentials = self._tls.credentials() if self._tls is not None else self._credentials
        if credentials is None:
            return self._transport.insecure_channel(self._target, options=options)
        return self._transport.secure_channel(self._target, credentials, options=options)

    def _detach(self) -> Any:
        """Marks the client as closed. Returns the channel to close, None if there is none (any more)."""
        with self._lock:
            self._closed = True
            channel, self._channel = self._channel, None
            return channel

    def _start(self, call: Call[Any], timeout_s: Timeout, metadata: Metadata) -> Any:
        """Starts the call. With grpc, it returns the response; with grpc.aio, an awaitable for it."""
        bound_s = self._bound_s(timeout_s)
        start = self._open()[call.method]
        pairs = (*self._metadata, *checked_metadata(metadata))
        # gRPC rounds timeouts up: with 0, a fast server might answer in time.
        bound_s = bound_s if bound_s is None or bound_s > 0 else bound_s - 1.0
        try:
            return start(call.request, timeout=bound_s, metadata=pairs, wait_for_ready=call.wait_for_ready)
        except ValueError as error:
            # The arguments were checked above, so another thread closed the channel after it was opened.
            if self._closed:
                raise self._has_closed() from error
            raise

    def _forget_datatypes(self, model: str, version: str, error: InferenceError) -> None:
        """If the request was at fault, another model may have taken this one's place, with other datatypes."""
        if error.status in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNKNOWN):
            self._datatypes.pop((model, version), None)

    def _left_s(self, timeout_s: Timeout, spent_s: float) -> float | None:
        """What is left of a timeout. Raises ValueError and TypeError."""
        bound_s = self._bound_s(timeout_s)
        return None if bound_s is None else bound_s - spent_s

    def _bound_s(self, timeout_s: Timeout) -> float | None:
        """The timeout to give to gRPC, in seconds. Raises ValueError and TypeError."""
        return self._timeout_s if isinstance(timeout_s, EllipsisType) else _bounded_s(timeout_s)


def _bounded_s(timeout_s: float | None) -> float | None:
    """The timeout as a float of seconds, None if it is no bound. Raises ValueError and TypeError."""
    if timeout_s is None:
        return None
    if not isinstance(timeout_s, (float, int, Real)):
        raise TypeError(f"timeout_s: expected a number of seconds, or None, got {timeout_s!r}")
    if timeout_s >= _LONGEST_S:
        return None
    if math.isnan(timeout_s):
        raise ValueError("timeout_s: expected a number of seconds, got nan")
    # A numpy float32 added to the time of day would be off by up to a minute.
    return max(float(timeout_s), -_LONGEST_S)


class ReadyWait:
    """When to ask again whether the server is ready, and when to give up.

    Pauses double from 50 ms to 1 s. Times are seconds of one monotonic clock, read by the caller. Raises ValueError or
    TypeError for a `timeout_s` that isn't a number of seconds.
    """

    def __init__(self, target: str, timeout_s: float, now_s: float) -> None:
        bounded_s = _bounded_s(timeout_s)
        self._target = target
        self._timeout_s = timeout_s
        self._until_s = math.inf if bounded_s is None else now_s + bounded_s
        self._pause_s = _FIRST_PAUSE_S

    def left_s(self, now_s: float) -> float:
        """Seconds left, at least 0."""
        return max(self._until_s - now_s, 0.0)

    def pause_s(self, now_s: float) -> float:
        """How long to pause before the next attempt. Raises DeadlineExceeded when no time is left."""
        left_s = self.left_s(now_s)
        if not left_s:
            raise DeadlineExceeded(
                grpc.StatusCode.DEADLINE_EXCEEDED, f"{self._target} was not ready within {self._timeout_s:g} s"
            )
        pause_s = min(self._pause_s, left_s)
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
        return pause_s
