"""What the blocking and the asyncio client share: settings, the channel, and what methods.py asks of either.

Lives here: the constructor, channel options, the one channel and its closing, per-call arguments; how methods that are
written once block in the blocking client. Must not live here: anything that waits, or reads a clock.
"""

from __future__ import annotations

import math
import secrets
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from functools import wraps
from inspect import signature
from itertools import count
from numbers import Real
from types import EllipsisType, ModuleType
from typing import Any, ClassVar, Final, Generic, ParamSpec, TypeVar

import grpc
from grpc_health.v1 import health_pb2_grpc

from paceline.clients.connection import Metadata, Tls, authorization, checked_metadata, checked_target
from paceline.clients.errors import ClientClosed, InferenceError
from paceline.clients.messages import InferResult, checked_text
from paceline.protos import inference_pb2 as pb
from paceline.protos import inference_pb2_grpc

P = ParamSpec("P")
T = TypeVar("T")
S = TypeVar("S")

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


def at_once(coroutine: Coroutine[Any, Any, T]) -> T:
    """The result of a coroutine that has nothing to wait for. Raises RuntimeError if it has."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        value: T = stop.value
        return value
    coroutine.close()
    raise RuntimeError("expected a coroutine that has nothing to wait for")


def blocking(method: Callable[P, Coroutine[Any, Any, T]]) -> Callable[P, T]:
    """`method` for a client whose calls block: it is at its end when it first returns."""

    @wraps(method)
    def run(*args: P.args, **given: P.kwargs) -> T:
        return at_once(method(*args, **given))

    return run


def blocking_each(method: Callable[P, AsyncGenerator[T, None]]) -> Callable[P, Generator[T, None, None]]:
    """The same for a method that yields."""

    @wraps(method)
    def run(*args: P.args, **given: P.kwargs) -> Generator[T, None, None]:
        each = method(*args, **given)
        try:
            while True:
                try:
                    one = at_once(anext(each))
                except StopAsyncIteration:
                    return
                yield one
        finally:
            at_once(each.aclose())

    what = signature(method)
    kind = what.return_annotation.removeprefix("Async")
    run.__signature__ = what.replace(return_annotation=kind)  # type: ignore[attr-defined]
    return run


class BaseClient(ABC, Generic[S]):
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
    _new_sequence: Callable[..., S]

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
        self._timeout_s = bounded_s(timeout_s)
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

    @abstractmethod
    async def _call(
        self, method: str, request: object, timeout_s: Timeout, metadata: Metadata, wait_for_ready: bool | None = None
    ) -> Any:
        """The response to `request`, by the RPC's name on the wire. `wait_for_ready` is gRPC's: if True, the call waits
        for a connection as long as its timeout allows; if None, the channel's service config decides, by default not to
        wait. Raises InferenceError."""

    @abstractmethod
    async def _infer(
        self, request: pb.ModelInferRequest, timeout_s: Timeout, metadata: Metadata, turn: Any
    ) -> InferResult:
        """The answer to `request`, of a step of a sequence in its turn. Raises InferenceError."""

    @abstractmethod
    def _answers(
        self, request: pb.ModelInferRequest, timeout_s: Timeout, metadata: Metadata
    ) -> AsyncGenerator[pb.ModelInferResponse, None]:
        """The answers to `request`, over a stream of its own. Raises InferenceError."""

    @abstractmethod
    async def _sleep(self, pause_s: float) -> None:
        pass

    async def _datatypes_of(
        self, model: str, version: str, timeout_s: Timeout, metadata: Metadata
    ) -> Mapping[str, str]:
        """Of the model's inputs, by name."""
        known = self._datatypes.get((model, version))
        if known is None:
            request = pb.ModelMetadataRequest(**named(model, version))
            response = await self._call("ModelMetadata", request, timeout_s, metadata)
            known = self._datatypes[model, version] = {tensor.name: tensor.datatype for tensor in response.inputs}
        return known

    def _start(
        self, method: str, request: object, timeout_s: Timeout, metadata: Metadata, wait_for_ready: bool | None = None
    ) -> Any:
        """Starts the call. With grpc, it returns the response; with grpc.aio, an awaitable for it."""
        bound_s = self._bound_s(timeout_s)
        start = self._open()[method]
        pairs = (*self._metadata, *checked_metadata(metadata))
        # gRPC rounds timeouts up: with 0, a fast server might answer in time.
        bound_s = bound_s if bound_s is None or bound_s > 0 else bound_s - 1.0
        try:
            return start(request, timeout=bound_s, metadata=pairs, wait_for_ready=wait_for_ready)
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
        return self._timeout_s if isinstance(timeout_s, EllipsisType) else bounded_s(timeout_s)


def named(model: str, version: str) -> dict[str, str]:
    """A model in the messages that ask about it. Raises ValueError and TypeError."""
    return {"name": checked_text("model", model), "version": checked_text("version", version)}


def bounded_s(timeout_s: float | None) -> float | None:
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
