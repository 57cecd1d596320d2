"""What comes before any RPC: who may call, and whether one more call may be in progress.

Lives here: refusing calls before their message is read, having admitted calls counted (`server.rpc.admission`), and
reading their requests or answering if none comes. Must not: know what RPCs do, or check requests. All handlers of a
server are registered here, so that none can be reached past it.

The message of a refused call isn't read: it may be of any size.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Protocol, TypeAlias

import grpc
from google.protobuf.message import DecodeError

from paceline.server.rpc.admission import Admission, Calls, Ended, Refused
from paceline.server.rpc.calls import Context, status_and_text
from paceline.server.rpc.restrictions import Restriction, group_of
from paceline.server.rpc.tokens import Tokens

__all__ = ["Gate", "Handler", "Registry"]

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
            picks = {name: self._find(path) for name, path in paths.items() if group_of(path) not in self._restrictions}
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
        restriction = self._restrictions.get(group_of(path) or "")
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
