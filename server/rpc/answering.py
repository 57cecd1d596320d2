"""The boundary at which an exception raised by an RPC becomes the status that its caller gets.

Lives here: `answering`, and the text of a status. Must not: know any RPC. The table itself: `server/errors.py`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import wraps
from itertools import accumulate
from typing import Any, TypeVar

import grpc
from google.protobuf.message import DecodeError

from scheduler.errors import SchedulerError
from server.codec.wire_request import AnyRequest
from server.errors import InvalidRequest, ServerStopping, status_of, words_of
from server.requests.quiet import TRY_AGAIN_MS

__all__ = ["Context", "answering", "status_and_text"]

_log = logging.getLogger("paceline.server.service")

_MAX_TEXT_BYTES = 3_000
"""Of a status's message as it is written: in a header, and there as three bytes what isn't printable ASCII. A client
that gets more than 8 KiB of headers drops the answer and reports RESOURCE_EXHAUSTED instead, and nginx, unless it is
told otherwise, one that gets 4 KiB, and reports that the server isn't available."""
_PLAIN = frozenset(range(0x20, 0x7F)) - {ord("%")}

_TRY_LATER = (("grpc-retry-pushback-ms", str(TRY_AGAIN_MS)),)

RequestT = TypeVar("RequestT")
ResponseT = TypeVar("ResponseT")
Context = Any
Method = Callable[[Any, RequestT, Context], Awaitable[ResponseT]]


def answering(method: Method[RequestT, ResponseT]) -> Method[RequestT, ResponseT]:
    """Turn whatever `method`, a unary RPC, raises into the status that the table gives it."""

    @wraps(method)
    async def answer(self: Any, request: RequestT, context: Context) -> ResponseT:
        try:
            if isinstance(request, DecodeError):
                raise InvalidRequest(str(request))
            return await method(self, request, context)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - the caller is owed an answer
            code, text = status_and_text(error, request, method.__name__)
            if isinstance(error, ServerStopping):
                context.set_trailing_metadata(_TRY_LATER)
        refusal = context.abort(code, text)
        # gRPC keeps what this raises with the call. Its traceback has this frame, which would keep the request, and by
        # its context the call: nothing of them would go before the garbage collector comes by.
        del request, context
        await refusal
        raise AssertionError("abort returned")

    return answer


def status_and_text(error: Exception, request: object, rpc: str) -> tuple[grpc.StatusCode, str]:
    """What the caller of `rpc` gets for `error`; what no table foresees is logged with its traceback."""
    code = status_of(error)
    if code is None:
        _log.error("%s failed on something unforeseen", rpc, exc_info=error)
        return grpc.StatusCode.INTERNAL, _sendable(f"internal error: {type(error).__name__}: {words_of(error)}")
    return code, _sendable(_text(request, error))


def _text(request: object, error: Exception) -> str:
    """What the caller reads. The batcher's own errors don't know the model's name."""
    if isinstance(error, SchedulerError) and isinstance(request, AnyRequest):
        return f"model '{request.model_name}': {words_of(error)}"
    return words_of(error)


def _sendable(text: str) -> str:
    """`text`, its middle left out if it is too long to arrive, and without what UTF-8 can't say."""
    data = text.encode(errors="backslashreplace")
    head, tail = _begin(data), _begin(data[-_MAX_TEXT_BYTES // 2 :][::-1])
    if len(head) + len(tail) < len(data):
        data = head + b" [...] " + tail[::-1]
    return data.decode(errors="ignore")


def _begin(data: bytes) -> bytes:
    """As much of its beginning as takes half of what a message may."""
    ends = accumulate(1 if byte in _PLAIN else 3 for byte in data[: _MAX_TEXT_BYTES // 2])
    return data[: sum(end <= _MAX_TEXT_BYTES // 2 for end in ends)]
