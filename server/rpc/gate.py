"""What comes before any RPC: who may call, and how many calls may be in progress.

Lives here: refusing calls before their message is read, counting admitted calls, and reading their requests or
answering if none comes. Must not: know what RPCs do, or check requests. All handlers of a server are registered here,
so that none can be reached past it.

The message of a refused call isn't read: it may be of any size.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

import grpc
from google.protobuf.message import DecodeError

from server.rpc.restrictions import Restriction, group_of
from server.rpc.tokens import Tokens

__all__ = ["Admission", "Gate", "Refused", "Registry", "Usage"]

_Registered = Any
"""A service's `grpc.GenericRpcHandler`, which is generic only in the stubs."""
Headers = Sequence[tuple[str, str | bytes]]


class Refused(Enum):
    """Why a call didn't get through."""

    UNAUTHENTICATED = "unauthenticated"
    RESTRICTED = "restricted"
    RPCS = "rpcs"
    STREAMS = "streams"


class Usage(NamedTuple):
    """Calls and streams in progress, and how many were refused, in the order of `Refused`."""

    rpcs: int = 0
    streams: int = 0
    refused: tuple[int, ...] = (0,) * len(Refused)

    @property
    def refused_by_reason(self) -> dict[str, int]:
        return {reason.value: count for reason, count in zip(Refused, self.refused, strict=True)}

    def plus(self, other: Usage) -> Usage:
        """The sum of both."""
        refused = tuple(map(sum, zip(self.refused, other.refused, strict=True)))
        return Usage(self.rpcs + other.rpcs, self.streams + other.streams, refused)


@dataclass(slots=True)
class Admission:
    """Calls in progress, and those refused, to be used on the event loop only. `max_rpcs` bounds calls with one request
    and one answer, `max_streams` the calls of each RPC with more."""

    max_rpcs: int
    max_streams: int
    rpcs: int = 0
    streams: dict[str, int] = field(default_factory=dict)
    refused: dict[Refused, int] = field(default_factory=lambda: dict.fromkeys(Refused, 0))

    def usage(self) -> Usage:
        """The totals, as a front reports them to the engine."""
        return Usage(self.rpcs, sum(self.streams.values()), tuple(self.refused[reason] for reason in Refused))


_OPEN_TO_ALL = frozenset(
    (
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/List",
        "/grpc.health.v1.Health/Watch",
        "/inference.GRPCInferenceService/ServerLive",
        "/inference.GRPCInferenceService/ServerReady",
    )
)
"""RPCs that need no token: probes and load balancers have none, and learn only whether the server takes requests. Those
without a stream aren't counted either: a server at its limit is alive."""

_NO_REQUEST = "expected one request message, got none"
_NO_TOKEN = "expected the header 'authorization: Bearer TOKEN' with a token that this server knows"


class Registry(Protocol):
    """What services are registered with: gRPC's server, or a gate in front of it."""

    def add_generic_rpc_handlers(self, handlers: Any, /) -> None: ...


class _Entry(Protocol):
    def pick(self) -> Any:
        """The handler of a call that has just arrived."""


class Gate(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs alone
    """Lets calls through to the handlers that were added. Without `tokens` and `restrictions`, callers need no
    credentials."""

    def __init__(
        self, admission: Admission, tokens: Tokens | None = None, restrictions: Mapping[str, Restriction] | None = None
    ) -> None:
        self._admission = admission
        self._tokens = tokens
        self._restrictions = restrictions or {}
        self._asks = tokens is not None or bool(self._restrictions)
        self._handlers: list[_Registered] = []
        # By path; at most one per RPC.
        self._entries: dict[str, _Entry] = {}

    def add_generic_rpc_handlers(self, handlers: Sequence[_Registered]) -> None:
        """What generated code calls to register a service."""
        self._handlers.extend(handlers)

    def add_registered_method_handlers(self, service: str, handlers: object) -> None:
        """Generated code calls this too. Ignored: gRPC would find those handlers past this gate."""

    # hot path: 0.3 us if nobody is asked, 1.3 us with tokens, 2.6 us with a restriction
    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        path = handler_call_details.method
        if self._asks and (refusal := self._refusal(path, handler_call_details.invocation_metadata)) is not None:
            return refusal
        entry = self._entries.get(path) or self._find(path, handler_call_details)
        if entry is None:
            return None
        return entry.pick()

    def _refusal(self, path: str, metadata: Any) -> Any:
        """A handler that refuses the call, if its caller lacks what it needs; else None."""
        headers: Headers = metadata or ()
        if self._tokens is not None and path not in _OPEN_TO_ALL:
            # Several are a mistake, or an attempt to have another component look at the other one.
            given = [value for key, value in headers if key == "authorization"]
            if len(given) != 1 or self._tokens.name_of(str(given[0])) is None:
                return self._refuse(Refused.UNAUTHENTICATED, grpc.StatusCode.UNAUTHENTICATED, _NO_TOKEN)
        restriction = self._restrictions.get(group_of(path) or "")
        if restriction is None or _has(headers, restriction):
            return None
        # Triton's clients look for these words.
        text = f"This protocol is restricted, expecting header '{restriction.header}'"
        return self._refuse(Refused.RESTRICTED, grpc.StatusCode.UNAVAILABLE, text)

    def _refuse(self, reason: Refused, code: grpc.StatusCode, text: str) -> Any:
        self._admission.refused[reason] += 1
        return _refusing(code, text)

    def _find(self, path: str, details: grpc.HandlerCallDetails) -> _Entry | None:
        for registered in self._handlers:
            handler = registered.service(details)
            if handler is not None:
                entry = self._entries[path] = _entry(self._admission, path, handler)
                return entry
        return None


def _entry(admission: Admission, path: str, registered: Any) -> _Entry:
    handler = registered if registered.request_streaming else _reading_one_request(registered)
    if registered.request_streaming or registered.response_streaming:
        return _Streams(admission, path, handler)
    return _Uncounted(handler) if path in _OPEN_TO_ALL else _Calls(admission, handler)


def _reading_one_request(handler: Any) -> Any:
    """`handler`, which takes one request, as a handler of a stream that reads one request from it. If gRPC were to read
    it, a call that ends without a request would be left as it is: never answered, and counted by nobody."""
    answers = handler.unary_stream if handler.response_streaming else handler.unary_unary

    # hot path
    async def read_and_answer(requests: object, context: Any) -> Any:
        request: Any = None
        try:
            request = await context.read()
        except DecodeError as error:
            answer = context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        else:
            if request is grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
                answer = context.abort(grpc.StatusCode.UNIMPLEMENTED, _NO_REQUEST)  # gRPC's own status for such calls
            else:
                answer = answers(request, context)
        # An error that ends the call is kept with the call, and its traceback holds this frame.
        del requests, request, context
        return await answer

    streams = handler.response_streaming
    make = grpc.stream_stream_rpc_method_handler if streams else grpc.stream_unary_rpc_method_handler
    return make(read_and_answer, handler.request_deserializer, handler.response_serializer)


class _Uncounted:
    def __init__(self, handler: Any) -> None:
        self._handler = handler

    def pick(self) -> Any:
        return self._handler


class _Calls:
    """Calls with one request and one answer."""

    def __init__(self, admission: Admission, handler: Any) -> None:
        self._admission = admission
        self._handler = handler
        text = f"the server has {admission.max_rpcs} calls in progress, which is the limit"
        self._too_many = _refusing(grpc.StatusCode.RESOURCE_EXHAUSTED, text)

    # hot path
    def pick(self) -> Any:
        admission = self._admission
        if admission.rpcs >= admission.max_rpcs:
            admission.refused[Refused.RPCS] += 1
            return self._too_many
        _when_call_ends(self._left)
        admission.rpcs += 1
        return self._handler

    def _left(self, task: asyncio.Task[Any]) -> None:
        self._admission.rpcs -= 1


class _Streams:
    """Calls of one RPC with many requests or answers."""

    def __init__(self, admission: Admission, path: str, handler: Any) -> None:
        self._admission = admission
        self._path = path
        admission.streams[path] = 0
        self._handler = handler
        name = path.rpartition("/")[2]
        text = f"the server has {admission.max_streams} streams of {name} open, which is the limit"
        self._too_many = _refusing(grpc.StatusCode.RESOURCE_EXHAUSTED, text)

    def pick(self) -> Any:
        admission = self._admission
        if admission.streams[self._path] >= admission.max_streams:
            admission.refused[Refused.STREAMS] += 1
            return self._too_many
        _when_call_ends(self._left)
        admission.streams[self._path] += 1
        return self._handler

    def _left(self, task: asyncio.Task[Any]) -> None:
        self._admission.streams[self._path] -= 1


# hot path
def _when_call_ends(do: Callable[[asyncio.Task[Any]], None]) -> None:
    """Have `do` called when the current call has ended. gRPC handles each call in its own task, which is the current
    one: it picks the handler, has the request read, and ends once the answer has been sent or nobody wants it any more.
    A handler sees less than that, and callers may be slow to send a request and to take an answer, and both have to be
    kept meanwhile."""
    task = asyncio.current_task()
    assert task is not None
    task.add_done_callback(do)


def _refusing(code: grpc.StatusCode, text: str) -> Any:
    """A handler that answers any call with a status. As it takes a stream, gRPC reads no request for it."""

    async def refuse(requests: Any, context: Any) -> None:
        await context.abort(code, text)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _has(headers: Headers, restriction: Restriction) -> bool:
    given = [value for key, value in headers if key == restriction.header]
    return len(given) == 1 and hmac.compare_digest(
        str(given[0]).encode(errors="backslashreplace"), restriction.value.encode()
    )
