"""What all RPCs do with their call: read its deadline and headers, and end it with the status of an error.

Lives here: making the values of `server.call_facts` from gRPC's context; `answering`, the boundary at which an
exception becomes the status that its caller gets, and the text of a status. Must not: know any RPC. The table of
statuses: `server/errors.py`.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import wraps
from itertools import accumulate
from typing import Any, NoReturn, Protocol, TypeVar

import grpc

from paceline.protos import inference_pb2 as pb
from paceline.scheduler.policy import NEVER
from paceline.server.call_facts import NO_PASSED_HEADERS, PassedHeaders, TraceParent
from paceline.server.codec.parameters import is_reserved
from paceline.server.codec.wire_request import AnyMessage, Unread
from paceline.server.config import Settings
from paceline.server.errors import InvalidRequest, ServerStopping
from paceline.server.requests.in_flight import answer_deadline_ns, failure_of
from paceline.server.rpc.credentials import HEADER_PREFIX

_MAX_TEXT_BYTES = 3_000
"""The most bytes of a status's message as encoded in a header, where '%' and anything but printable ASCII take three
bytes. A client that gets more than 8 KiB of headers drops the answer and reports RESOURCE_EXHAUSTED instead; nginx,
unless configured otherwise, drops one with 4 KiB and reports that the server isn't available."""
_PLAIN = frozenset(range(0x20, 0x7F)) - {ord("%")}

TRY_AGAIN_MS = 300
"""How long a stopping server has clients wait that retry by gRPC's `retryPolicy`. With their own pauses they would use
up their attempts, of which gRPC allows five, before the server has told their connection to go. This way they use up
four at most."""
_TRY_LATER = (("grpc-retry-pushback-ms", str(TRY_AGAIN_MS)),)

GroupT = TypeVar("GroupT")
RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")


class Context(Protocol):
    """What RPCs use of gRPC's context of their call. Not the stubs' class: it has other types than gRPC returns."""

    def peer(self) -> str: ...

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]: ...

    def time_remaining(self) -> float | None: ...

    async def read(self) -> Any: ...  # what the RPC's deserializer makes of a message

    async def write(self, message: object, /) -> None: ...

    async def abort(self, code: grpc.StatusCode, details: str, /) -> NoReturn: ...

    def set_code(self, code: grpc.StatusCode, /) -> None: ...

    def set_details(self, details: str, /) -> None: ...

    def set_trailing_metadata(self, metadata: Sequence[tuple[str, str]], /) -> None: ...


Method = Callable[[GroupT, RequestT, Context], Awaitable[ResponseT]]


def answering(method: Method[GroupT, RequestT, ResponseT]) -> Method[GroupT, RequestT, ResponseT]:
    """Turn whatever `method`, an RPC's coroutine, raises into the status that the table gives it."""

    @wraps(method)
    async def answer(self: GroupT, request: RequestT, context: Context) -> ResponseT:
        try:
            if isinstance(request, Unread):
                raise request  # what was sent can't be read
            return await method(self, request, context)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - the caller must get an answer
            code, text = status_and_text(error, request, method.__name__)
            if isinstance(error, ServerStopping):
                context.set_trailing_metadata(_TRY_LATER)
        refusal = context.abort(code, text)
        # gRPC keeps the exception that this raises with the call. Its traceback holds this frame, which would hold the
        # request and, through its context, the call: none of them would be freed before the garbage collector runs.
        del request, context
        await refusal
        raise AssertionError("abort returned")

    return answer


def status_and_text(error: Exception, request: object, rpc: str) -> tuple[grpc.StatusCode, str]:
    """The status and text that the caller of `rpc` gets for `error`, as `failure_of` says; a text that arrives."""
    code, text = failure_of(error, request.model_name if isinstance(request, AnyMessage) else "", rpc)
    return code, _sendable(text)


def _sendable(text: str) -> str:
    """`text` without its middle if it is too long to arrive, and with what UTF-8 can't encode escaped."""
    data = text.encode(errors="backslashreplace")
    head, tail = _begin(data), _begin(data[-_MAX_TEXT_BYTES // 2 :][::-1])
    if len(head) + len(tail) < len(data):
        data = head + b" [...] " + tail[::-1]
    return data.decode(errors="ignore")


def _begin(data: bytes) -> bytes:
    """The longest beginning of `data` that takes at most half of what a message may."""
    ends = accumulate(1 if byte in _PLAIN else 3 for byte in data[: _MAX_TEXT_BYTES // 2])
    return data[: sum(end <= _MAX_TEXT_BYTES // 2 for end in ends)]


def deadline_of(context: Context) -> int:
    """When an answer has to leave to reach the caller in time, on the monotonic clock."""
    remaining_s = context.time_remaining()
    return NEVER if remaining_s is None else answer_deadline_ns(remaining_s)


def traceparent_of(context: Context) -> TraceParent | None:
    """The values of the call's `traceparent` and `tracestate` headers, unparsed; None if there is no `traceparent`."""
    parent, states = "", []
    for key, value in context.invocation_metadata():
        if key == "traceparent":
            parent = str(value)
        elif key == "tracestate":
            states.append(str(value))
    return (parent, ",".join(states)) if parent else None


class HeaderRules:
    """What becomes of the headers of calls. Those in whose names `pattern`, a regular expression, is found are
    *forwarded*: they become parameters of the call's requests. *Passed* on to another server are `headers`, which keep
    requests with different values apart, and `tracing`, which don't. gRPC hands names over in lower case."""

    def __init__(self, pattern: str = "", headers: Iterable[str] = (), tracing: Iterable[str] = ()) -> None:
        self.forwards = bool(pattern)
        self._pattern = re.compile(pattern)
        self._headers = frozenset(map(str.lower, headers))
        self._tracing = frozenset(map(str.lower, tracing)) - self._headers
        self.passes = bool(self._headers or self._tracing)

    @classmethod
    def of(cls, settings: Settings) -> HeaderRules:
        """The rules that the user has given."""
        upstream = settings.upstream
        passed = (upstream.headers, upstream.tracing_headers) if upstream else ()
        return cls(settings.grpc_header_forward_pattern, *passed)

    def forwarded(self, context: Context) -> dict[str, str]:
        """The headers to forward. The values of a repeated header are joined by commas, as in gRPC. Headers with bytes
        are left out, since a parameter is text, and so are those for this server alone: parameters are seen by others.

        Raises InvalidRequest for a name that is reserved for parameters: a header must not set priorities.
        """
        found: dict[str, str] = {}
        for key, value in context.invocation_metadata() if self.forwards else ():
            is_secret = key == "authorization" or key.startswith(HEADER_PREFIX)
            if not isinstance(value, str) or is_secret or not self._pattern.search(key):
                continue
            if is_reserved(key):
                raise InvalidRequest(f"header '{key}' is reserved and can't be forwarded as a parameter")
            found[key] = f"{found[key]},{value}" if key in found else value
        return found

    def passed(self, context: Context) -> PassedHeaders:
        """The headers of a call to pass on, in its order. Raises InvalidRequest for one that can't be sent; a tracing
        header that can't be sent is left out."""
        if not self.passes:
            return NO_PASSED_HEADERS
        metadata = context.invocation_metadata()
        headers = tuple((key, value) for key, value in metadata if key in self._headers)
        for key, value in headers:
            if not _can_be_sent(value):
                raise InvalidRequest(f"header '{key}' can't be passed on: expected printable ASCII characters")
        tracing = tuple((key, value) for key, value in metadata if key in self._tracing and _can_be_sent(value))
        return PassedHeaders(headers, tracing)


def _can_be_sent(value: str | bytes) -> bool:
    """Whether gRPC sends this value. It receives more than it sends, and would end the call with its own text, and
    write to stderr."""
    return isinstance(value, bytes) or (value.isascii() and value.isprintable())


def add_headers(request: pb.ModelInferRequest, headers: Mapping[str, str]) -> None:
    """Add `headers` to the parameters of `request`. They override existing ones: a proxy sets headers, its clients
    don't."""
    for key, value in headers.items():
        request.parameters[key].string_param = value
