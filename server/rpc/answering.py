"""The boundary at which an exception raised by an RPC becomes the status that its caller gets.

Lives here: `answering`, and the text of a status. Must not: know any RPC. The table itself: `server/errors.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from functools import wraps
from itertools import accumulate
from typing import Any, NoReturn, Protocol, TypeVar

import grpc

from paceline.scheduler.errors import SchedulerError
from paceline.server.codec.wire_request import AnyRequest, Unread
from paceline.server.errors import ServerStopping, error_text, status_of
from paceline.server.requests.quiet import TRY_AGAIN_MS

__all__ = ["Context", "answering", "status_and_text"]

_log = logging.getLogger("paceline.server.service")

_MAX_TEXT_BYTES = 3_000
"""The most bytes of a status's message as encoded in a header, where '%' and anything but printable ASCII take three
bytes. A client that gets more than 8 KiB of headers drops the answer and reports RESOURCE_EXHAUSTED instead; nginx,
unless configured otherwise, drops one with 4 KiB and reports that the server isn't available."""
_PLAIN = frozenset(range(0x20, 0x7F)) - {ord("%")}

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
    """The status and text that the caller of `rpc` gets for `error`. An error that isn't in the table is logged with
    its traceback, and a lack of memory in a line."""
    code = status_of(error)
    if isinstance(error, MemoryError):
        text = _sendable(f"the server is short of memory: {error_text(error) or 'no room for what this request needs'}")
        _log.error("%s failed: %s", rpc, text)
        return grpc.StatusCode.RESOURCE_EXHAUSTED, text
    if code is None:
        _log.error("%s failed with an internal error, a bug in paceline; please report it", rpc, exc_info=error)
        return grpc.StatusCode.INTERNAL, _sendable(f"internal error: {type(error).__name__}: {error_text(error)}")
    return code, _sendable(_text(request, error))


def _text(request: object, error: Exception) -> str:
    """The text that the caller reads. It names the model for the batcher's own errors, which don't know it."""
    if isinstance(error, SchedulerError) and isinstance(request, AnyRequest):
        return f"model '{request.model_name}': {error_text(error)}"
    return error_text(error)


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
