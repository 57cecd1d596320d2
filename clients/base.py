"""What the blocking and the asyncio client share besides the calls: settings, opening, and the arithmetic of waiting.

Lives here: the constructor, channel options, the one channel and its end, per-call arguments, the pauses of
wait_ready. Must not live here: anything that waits, or reads a clock; callers pass `now_s`.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from types import EllipsisType, ModuleType
from typing import Any, ClassVar, Final

import grpc

from clients.calls import Call, Method, stubs
from clients.errors import ClientClosed, DeadlineExceeded
from clients.headers import Metadata, checked
from clients.messages import text
from clients.tls import Tls
from clients.tokens import authorization

__all__ = ["DEFAULT_TIMEOUT_S", "BaseClient", "Metadata", "ReadyWait", "Timeout"]

Timeout = float | None | EllipsisType
"""Seconds; None and infinity are no bound, 0 and less a time that has passed: DeadlineExceeded, whatever the server
does. `...`, the default, takes the client's own."""

DEFAULT_TIMEOUT_S: Final = 60.0

_CHANNEL_OPTIONS: Final[Mapping[str, Any]] = {
    # Tensors outgrow gRPC's 4 MiB; the server's own limit is the one that counts.
    "grpc.max_send_message_length": -1,
    "grpc.max_receive_message_length": -1,
    # gRPC's own back-off grows to two minutes, in which a restarted server would look dead.
    "grpc.initial_reconnect_backoff_ms": 100,
    "grpc.max_reconnect_backoff_ms": 1000,
}

# 31 years, and no bound beyond. gRPC's times are nanoseconds since 1970 in 64 bits; what is later counts as the past.
_LONGEST_S: Final = 1e9
_LARGEST_PORT: Final = 65_535

_FIRST_PAUSE_S: Final = 0.05
_LONGEST_PAUSE_S: Final = 1.0


class BaseClient:
    """What both clients are told when made, and their one channel.

    `target` is a gRPC name such as `127.0.0.1:8001`, `dns:///host:8001` or `unix:/path`. `timeout_s` bounds each call
    that names no timeout of its own, in seconds; None and infinity are no bound, and 0 is one that nothing keeps: each
    call raises DeadlineExceeded. `tls` makes the connection TLS: True, believing the authorities that gRPC brings
    along, or `Tls` with files of one's own. `token` goes with every call, in the header `authorization`; without TLS
    whoever is on the way reads it. `credentials` are gRPC's own, for what `tls` can't say; one of the two. `options`
    are gRPC channel options and override ours: message sizes are unlimited, and reconnecting is tried at least once a
    second. `metadata` goes with every call, before the call's own.

    Raises ValueError or TypeError for a target that is none, and for a timeout, a token, metadata or anything else that
    can't be used, as each call does for its own.

    Making a client opens nothing; the first call does, or entering it as a context manager, and raises ValueError for
    files of `tls` that are no good. No failed call is repeated: it raises at once, and whether to try again is the
    caller's decision.
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
        self._target = _target(target)
        self._timeout_s = _bounded_s(timeout_s)
        self._tls = _tls(tls)
        self._credentials = _credentials(credentials)
        self._options = _options(options)
        self._metadata = (*([authorization(token)] if token is not None else []), *checked(metadata))
        self._lock = threading.Lock()
        self._closed = False
        self._channel: Any = None
        self._stubs: Mapping[Method, Callable[..., Any]] = {}

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._target!r})"

    def _open(self) -> Mapping[Method, Callable[..., Any]]:
        """The callables of the channel, which is made at the first use. Raises ClientClosed."""
        with self._lock:
            if self._closed:
                raise self._has_closed()
            if self._channel is None:
                self._channel = self._new_channel()
                self._stubs = stubs(self._channel)
            return self._stubs

    def _has_closed(self) -> ClientClosed:
        return ClientClosed(f"{self!r} is closed; make a new one")

    def _new_channel(self) -> Any:
        of_tls = self._tls.channel_options() if self._tls is not None else ()
        options = list({**_CHANNEL_OPTIONS, **dict(of_tls), **self._options}.items())
        credentials = self._tls.credentials() if self._tls is not None else self._credentials
        if credentials is None:
            return self._transport.insecure_channel(self._target, options=options)
        return self._transport.secure_channel(self._target, credentials, options=options)

    def _detach(self) -> Any:
        """Marks the client as closed; returns the channel to be closed, None where there is none (any more)."""
        with self._lock:
            self._closed = True
            channel, self._channel = self._channel, None
            return channel

    def _start(self, call: Call[Any], timeout_s: Timeout, metadata: Metadata) -> Any:
        """Starts the call: returns its response with grpc, what is to be awaited for it with grpc.aio."""
        bound_s = self._bound_s(timeout_s)
        start = self._open()[call.method]
        pairs = (*self._metadata, *checked(metadata))
        # gRPC rounds up: with 0 a fast server might answer.
        bound_s = bound_s if bound_s is None or bound_s > 0 else bound_s - 1.0
        try:
            return start(call.request, timeout=bound_s, metadata=pairs, wait_for_ready=call.wait_for_ready)
        except ValueError as error:
            # What is given has been checked: another thread has closed the channel since it was opened.
            if self._closed:
                raise self._has_closed() from error
            raise

    def _bound_s(self, timeout_s: Timeout) -> float | None:
        """What is told to gRPC. Raises ValueError and TypeError."""
        return self._timeout_s if isinstance(timeout_s, EllipsisType) else _bounded_s(timeout_s)


def _target(target: str) -> str:
    expected = "target: expected a gRPC name such as '127.0.0.1:8001'"
    if not text("target", target):
        raise ValueError(f"{expected}, got ''")
    if target.startswith(("http://", "https://", "grpc://", "grpcs://")):
        raise ValueError(f"{expected}, got {target!r}: leave out what is before the host; tls=True makes it TLS")
    # gRPC would take what is left of the port by 65536.
    port = "" if target.startswith(("unix:", "vsock:")) else target.rpartition(":")[2]
    if port.isdecimal() and int(port) > _LARGEST_PORT:
        raise ValueError(f"{expected}, got {target!r}, whose port is above {_LARGEST_PORT}")
    return target


def _tls(tls: bool | Tls) -> Tls | None:
    if isinstance(tls, Tls):
        return tls
    # The path of a file here would be believed to be asked for, and the world's authorities be believed instead.
    if not isinstance(tls, bool | None):
        raise TypeError(f"tls: expected True, False or clients.Tls, got {tls!r}")
    return Tls() if tls else None


def _credentials(credentials: grpc.ChannelCredentials | None) -> grpc.ChannelCredentials | None:
    if not isinstance(credentials, grpc.ChannelCredentials | None):
        raise TypeError(f"credentials: expected grpc.ChannelCredentials, got {type(credentials).__name__}")
    return credentials


def _options(options: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    try:
        return dict(options)
    except (TypeError, ValueError):
        raise TypeError(f"options: expected pairs of name and value, got {options!r}") from None


def _bounded_s(timeout_s: float | None) -> float | None:
    """The seconds, None where they are no bound. Raises ValueError and TypeError."""
    if timeout_s is None:
        return None
    if not isinstance(timeout_s, (float, int, Real)):
        raise TypeError(f"timeout_s: expected a number of seconds, or None, got {timeout_s!r}")
    if timeout_s >= _LONGEST_S:
        return None
    if math.isnan(timeout_s):
        raise ValueError("timeout_s: expected a number of seconds, got nan")
    # numpy's float32 added to the time of day would be off by a minute.
    return max(float(timeout_s), -_LONGEST_S)


class ReadyWait:
    """When to ask again whether the server is ready, and when to give up.

    Pauses double from 50 ms to 1 s. Times are seconds of one monotonic clock, read by the caller. Raises ValueError for
    a `timeout_s` that is none.
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
