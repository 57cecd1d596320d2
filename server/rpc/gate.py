"""What comes before any RPC: who may call, and whether one more call may be in progress.

All handlers of a server are registered here, so that none can be reached past it. Calls are refused before their
message is read, which may be of any size.

A call whose message hasn't arrived has cost its client a few bytes, and costs the server a place. So such calls never
keep those of another connection out, however many there are: a connection behind which thousands of callers stand may
have all places, until another one needs some.

Lives here: refusing calls, counting those in progress, finding those that give up their place, and reading a call's one
request or answering if none comes. Must not: know what RPCs do, or check requests.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple, Protocol, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from paceline.server.rpc.calls import Context, status_and_text
from paceline.server.rpc.credentials import GROUP_OF, Restriction, Tokens

_MAX_PROBES = 1_024

Handler: TypeAlias = "grpc.RpcMethodHandler[object, object]"
Service: TypeAlias = "grpc.GenericRpcHandler[object, object]"
"""Both are generic only in the stubs."""
Headers = Sequence[tuple[str, str | bytes]]

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
_PROBES = {
    "grpc.health.v1.Health": ("Check",),
    "inference.GRPCInferenceService": ("ServerLive", "ServerReady"),
}
"""Those that are asked again and again, by service. gRPC hands them over apart from all other calls, which else they
would stand behind: thousands may arrive at once, and each takes a moment even to be refused."""

_NO_REQUEST = "expected one request message, got none"
_NO_TOKEN = "expected the header 'authorization: Bearer TOKEN' with a token that this server knows"

Task = asyncio.Task[object]
"""gRPC handles each call in its own task: it picks the handler, has the request read, and ends once the answer has been
sent or nobody wants it any more. A handler sees less than that, and callers may be slow to send a request and to take
an answer, and both have to be kept meanwhile."""


class Refused(Enum):
    """Why a call didn't get through. `UNREAD`: a front refused it, or a request of a stream, as the engine hangs."""

    UNAUTHENTICATED = "unauthenticated"
    RESTRICTED = "restricted"
    RPCS = "rpcs"
    STREAMS = "streams"
    NO_MESSAGE = "no_message"
    UNREAD = "unread"


class Ended(Enum):
    """Why a call without a message was ended; what its task is cancelled with."""

    TOO_LATE = "too late"
    GAVE_WAY = "gave way"


class Usage(NamedTuple):
    """Calls and streams in progress, how many were refused, in the order of `Refused`, and how many connections there
    may be."""

    rpcs: int = 0
    streams: int = 0
    refused: tuple[int, ...] = (0,) * len(Refused)
    max_connections: int = 0

    @property
    def refused_by_reason(self) -> dict[str, int]:
        return {reason.value: count for reason, count in zip(Refused, self.refused, strict=True)}

    def plus(self, other: Usage) -> Usage:
        """The sum of both."""
        refused = tuple(map(sum, zip(self.refused, other.refused, strict=True)))
        connections = self.max_connections + other.max_connections
        return Usage(self.rpcs + other.rpcs, self.streams + other.streams, refused, connections)


class Calls:
    """At most `most` calls at a time. Those that `enter` with their connection haven't brought a message until
    `arrived`; one whose task is cancelled with `Ended` gets no other notice."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.count = 0
        # By connection, each with when it entered; the earliest first.
        self._without_message: dict[str, dict[Task, int]] = defaultdict(dict)

    def hold(self, task: Task) -> bool:
        """Give a call that needn't bring a message a place until it ends; False if there is none."""
        if self.count >= self.most:
            return False
        self.count += 1
        task.add_done_callback(self._leave)
        return True

    # hot path
    def enter(self, task: Task, connection: str, now_ns: int) -> bool:
        """Give a call that has just begun a place until it ends; False if there is none."""
        if self.count >= self.most and not self._make_room(connection):
            return False
        self.count += 1
        task.add_done_callback(self._leave)
        self._without_message[connection][task] = now_ns
        return True

    # hot path
    def arrived(self, task: Task, connection: str) -> None:
        """The call's message is there, or won't come."""
        calls = self._without_message[connection]
        calls.pop(task, None)
        if not calls:
            del self._without_message[connection]

    def end_overdue(self, before_ns: int) -> None:
        """End the calls that entered before then, and haven't brought a message."""
        for calls in list(self._without_message.values()):
            overdue = [task for task, entered_ns in calls.items() if entered_ns < before_ns]
            for task in overdue:
                del calls[task]
                task.cancel(Ended.TOO_LATE)

    def _make_room(self, connection: str) -> bool:
        """Have the connection with the most calls without a message give up the latest of them, unless it is this one
        or would have fewer than this one then."""
        largest = max(self._without_message.values(), key=len, default={})
        if len(largest) < len(self._without_message.get(connection, ())) + 2:
            return False
        task, _ = largest.popitem()
        task.remove_done_callback(self._leave)
        self._leave(task)
        task.cancel(Ended.GAVE_WAY)
        return True

    def _leave(self, task: Task) -> None:
        self.count -= 1


class Probes(Calls):
    """Calls that are never refused for those that wait for an answer: they leave once their message is there."""

    def arrived(self, task: Task, connection: str) -> None:
        super().arrived(task, connection)
        if task.remove_done_callback(self._leave):
            self._leave(task)


class Admission:
    """Calls in progress, and those refused, to be used on the event loop only. `max_rpcs` bounds calls with one request
    and one answer, `max_streams` the calls of each RPC with more."""

    def __init__(self, max_rpcs: int, max_streams: int) -> None:
        self.rpcs = Calls(max_rpcs)
        self.probes = Probes(_MAX_PROBES)
        self.streams: dict[str, Calls] = defaultdict(lambda: Calls(max_streams))
        self.refused = dict.fromkeys(Refused, 0)

    def end_overdue(self, before_ns: int) -> None:
        """End all calls that began before then, and haven't brought the message that they have to bring."""
        for calls in (self.rpcs, self.probes, *self.streams.values()):
            calls.end_overdue(before_ns)

    def usage(self) -> Usage:
        """The totals, as a front reports them to the engine."""
        streams = sum(calls.count for calls in self.streams.values())
        return Usage(self.rpcs.count, streams, tuple(self.refused[reason] for reason in Refused))


class Registry(Protocol):
    """What services are registered with: gRPC's server, or a gate in front of it."""

    def add_generic_rpc_handlers(self, handlers: Sequence[Service], /) -> None: ...


class _Details(grpc.HandlerCallDetails):
    """What generated services look at to find a handler."""

    def __init__(self, method: str) -> None:
        self.method = method


class Gate(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # generic in the stubs alone
    """Lets calls through to the handlers that were added. Without `tokens` and `restrictions`, callers need no
    credentials. A request has to arrive within `patience_s` (0: no limit) once `end_overdue_calls` runs."""

    def __init__(
        self,
        admission: Admission,
        tokens: Tokens | None = None,
        restrictions: Mapping[str, Restriction] | None = None,
        patience_s: float = 0,
    ) -> None:
        self._admission = admission
        self._patience_s = patience_s
        self._tokens = tokens
        self._restrictions = restrictions or {}
        self._asks = tokens is not None or bool(self._restrictions)
        self._handlers: list[Service] = []
        # By path; at most one per RPC. Each returns the handler of a call that has just arrived.
        self._picks: dict[str, Callable[[], Handler]] = {}

    def add_generic_rpc_handlers(self, handlers: Sequence[Service]) -> None:
        """What generated code calls to register a service."""
        self._handlers.extend(handlers)

    def add_registered_method_handlers(self, service: str, handlers: object) -> None:
        """Generated code calls this too. Ignored: gRPC would find those handlers past this gate."""

    def add_to(self, server: grpc.aio.Server) -> None:
        """Have `server` send all calls here; probes by a way of their own, where nobody is asked for credentials."""
        server.add_generic_rpc_handlers((self,))
        for service, names in _PROBES.items():
            paths = {name: f"/{service}/{name}" for name in names}
            picks = {
                name: self._find(path) for name, path in paths.items() if GROUP_OF.get(path) not in self._restrictions
            }
            server.add_registered_method_handlers(  # type: ignore[attr-defined]  # the stubs lack it
                service, {name: pick() for name, pick in picks.items() if pick}
            )

    async def end_overdue_calls(self) -> None:
        """End calls whose request doesn't arrive in time, up to an eighth later."""
        patience_ns = int(self._patience_s * 1e9)
        while patience_ns:
            await asyncio.sleep(self._patience_s / 8)
            self._admission.end_overdue(time.monotonic_ns() - patience_ns)

    # hot path: 0.3 us if nobody is asked, 1.3 us with tokens, 2.6 us with a restriction
    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        path = handler_call_details.method
        if self._asks and (refusal := self._refusal(path, handler_call_details.invocation_metadata)) is not None:
            return refusal
        pick = self._picks.get(path) or self._find(path)
        return pick and pick()

    def _refusal(self, path: str, headers: Headers) -> Handler | None:
        """A handler that refuses the call, if its caller lacks what it needs; else None."""
        if self._tokens is not None and path not in _OPEN_TO_ALL:
            # Several are a mistake, or an attempt to have another component look at the other one.
            given = [value for key, value in headers if key == "authorization"]
            if len(given) != 1 or self._tokens.name_of(str(given[0])) is None:
                return self._refuse(Refused.UNAUTHENTICATED, grpc.StatusCode.UNAUTHENTICATED, _NO_TOKEN)
        restriction = self._restrictions.get(GROUP_OF.get(path, ""))
        if restriction is None or _has(headers, restriction):
            return None
        # Triton's clients look for these words.
        text = f"This protocol is restricted, expecting header '{restriction.header}'"
        return self._refuse(Refused.RESTRICTED, grpc.StatusCode.UNAVAILABLE, text)

    def _refuse(self, reason: Refused, code: grpc.StatusCode, text: str) -> Handler:
        self._admission.refused[reason] += 1
        return _refusing(code, text)

    def _find(self, path: str) -> Callable[[], Handler] | None:
        for registered in self._handlers:
            handler = registered.service(_Details(path))
            if handler is not None:
                pick = self._picks[path] = self._pick_of(path, handler)
                return pick
        return None

    def _pick_of(self, path: str, handler: Handler) -> Callable[[], Handler]:
        admission = self._admission
        name = path.rpartition("/")[2]
        if handler.request_streaming or handler.response_streaming:
            calls, reason = admission.streams[path], Refused.STREAMS
            text = f"the server has {calls.most} streams of {name} open, which is the limit"
        elif path in _OPEN_TO_ALL:
            calls, reason = admission.probes, Refused.NO_MESSAGE
            text = f"the server has {calls.most} calls of {name} and the like without a message, which is the limit"
        else:
            calls, reason = admission.rpcs, Refused.RPCS
            text = f"the server has {calls.most} calls in progress, which is the limit"
        if handler.request_streaming:
            return self._holding(calls, handler, reason, text)
        reading = self._reading_one_request(calls, handler, reason, text)
        return lambda: reading

    def _holding(self, calls: Calls, handler: Handler, reason: Refused, text: str) -> Callable[[], Handler]:
        """Picks `handler`, of calls with any number of requests."""
        too_many = _refusing(grpc.StatusCode.RESOURCE_EXHAUSTED, text)

        def pick() -> Handler:
            if calls.hold(_current_task()):
                return handler
            self._admission.refused[reason] += 1
            return too_many

        return pick

    def _reading_one_request(self, calls: Calls, handler: Handler, reason: Refused, text: str) -> Handler:
        """`handler`, which takes one request, as a handler of a stream that reads one request from it. If gRPC were to
        read it, a call that ends without a request would be left as it is: never answered, and counted by nobody."""
        # The stubs have only handlers that block, with the context of those.
        answers: Callable[[object, Context], Awaitable[object]] = (
            handler.unary_stream if handler.response_streaming else handler.unary_unary  # type: ignore[assignment]
        )
        refused = self._admission.refused
        gave_way = f"{text}, and this connection had the most without a message"
        too_late = f"expected the request within {self._patience_s:g} s (--grpc-message-timeout-secs), got none"
        ends: Mapping[object, tuple[grpc.StatusCode, str]] = {
            Ended.GAVE_WAY: (grpc.StatusCode.RESOURCE_EXHAUSTED, gave_way),
            Ended.TOO_LATE: (grpc.StatusCode.DEADLINE_EXCEEDED, too_late),
        }

        # hot path
        async def read_and_answer(requests: object, context: Context) -> object:
            request = None
            answer: Awaitable[object]
            task, connection = _current_task(), context.peer()
            if not calls.enter(task, connection, time.monotonic_ns()):
                refused[reason] += 1
                answer = context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
            else:
                try:
                    request = await context.read()
                except DecodeError as error:
                    answer = context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
                except MemoryError as error:
                    answer = context.abort(*status_and_text(error, None, "reading a request"))
                except asyncio.CancelledError as error:
                    end = ends.get(*error.args) if error.args else None
                    if end is None:
                        raise  # gRPC has cancelled it: the caller has gone
                    refused[Refused.NO_MESSAGE] += 1
                    answer = context.abort(*end)
                else:
                    if request is grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs lack it
                        # gRPC's own status for such calls.
                        answer = context.abort(grpc.StatusCode.UNIMPLEMENTED, _NO_REQUEST)
                    else:
                        answer = answers(request, context)
                finally:
                    calls.arrived(task, connection)
            # An error that ends the call is kept with the call, and its traceback holds this frame.
            del requests, request, context, task
            return await answer

        streams = handler.response_streaming
        make = grpc.stream_stream_rpc_method_handler if streams else grpc.stream_unary_rpc_method_handler
        return make(read_and_answer, handler.request_deserializer, handler.response_serializer)


# hot path
def _current_task() -> asyncio.Task[object]:
    task = asyncio.current_task()
    assert task is not None
    return task


def _refusing(code: grpc.StatusCode, text: str) -> Handler:
    """A handler that answers any call with a status. As it takes a stream, gRPC reads no request for it."""

    async def refuse(requests: object, context: Context) -> None:
        await context.abort(code, text)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _has(headers: Headers, restriction: Restriction) -> bool:
    given = [value for key, value in headers if key == restriction.header]
    return len(given) == 1 and hmac.compare_digest(
        str(given[0]).encode(errors="backslashreplace"), restriction.value.encode()
    )
