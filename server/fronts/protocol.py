"""What fronts and the engine say to each other, and how errors and calls travel.

Lives here: kinds of messages with their fields, in order; what stands in for gRPC's context where a front's RPC is
handled. Must not: act on messages, or know any RPC. `id` is the front's number for what it waits for. Deadlines are on
the monotonic clock, which is the same for all processes of a machine.
"""

from __future__ import annotations

import logging
import time
from typing import NoReturn

import grpc

from paceline.backends.errors import WITH_STATUS, UpstreamFailed
from paceline.backends.transport.link import FIRST_KIND
from paceline.scheduler.errors import ExecutionFailed
from paceline.server.errors import STATUS_OF, InternalError, StepFailed, error_text, status_of


class Kind:
    """The kinds of messages, each with its fields; plain numbers, as `marshal` takes no others."""

    # From the front.
    LISTENS = FIRST_KIND  # port, or 0 and why not
    INFER = FIRST_KIND + 1  # id, as FrontSession._infer takes it
    CALL = FIRST_KIND + 2  # id, name of the RPC, deadline or None, headers, bytes of the request
    CANCEL = FIRST_KIND + 3  # id
    REFUSED = FIRST_KIND + 4  # name and version of a model; there was no room for a request to it
    TAKEN = FIRST_KIND + 5  # id, bytes of the oldest answer in NEXT that hasn't left, and has now
    USAGE = FIRST_KIND + 6  # calls and streams in progress, those refused by reason, how many connections may be

    # From the engine.
    HELLO = FIRST_KIND + 7  # pickled Greeting
    STATE = FIRST_KIND + 8  # whether it serves, is ready, stops, is live
    LOG = FIRST_KIND + 9  # pickled LogSettings
    LEAVE = FIRST_KIND + 10  # nothing: accept no more connections, and tell existing ones to go
    END = FIRST_KIND + 11  # seconds of grace
    # Replies, with all that follows.
    FAILED = FIRST_KIND + 12  # id, and the `packed_error`; to INFER and CALL
    ANSWER = FIRST_KIND + 13  # id, bytes of the response, empty if the last was in NEXT; to INFER and CALL
    PIECES = FIRST_KIND + 14  # id, parcel of what the response is joined of; to INFER, where that is large
    ABORTED = FIRST_KIND + 15  # id, name of the status, text; to CALL
    # What isn't the end of a request, with all that follows.
    OPENED = FIRST_KIND + 16  # id; to INFER: it may be answered more than once
    NEXT = FIRST_KIND + 17  # id, bytes of a response that isn't the last; to INFER
    NEXT_FAILED = FIRST_KIND + 18  # id, and the `packed_error` in place of one; to INFER


MAX_INLINE_BYTES = 2**13
"""Of requests and responses that go through the socket; larger ones go through shared memory."""
WHAT_IS_FULL = "bytes of tensors in transit between processes (--frontend-memory-mb)"

_log = logging.getLogger("paceline.server.fronts")
_BY_NAME = {kind.__name__: kind for kind in STATUS_OF}


def packed_error(error: BaseException) -> tuple[str, str, str]:
    """What to send of an error: the name of its class, or of its base that is in the table of statuses; its text; and
    the status that follows from its cause, or ""."""
    # Of another server's error, or of an execution that failed for a reason of its own, such as memory.
    cause = error.__cause__ if isinstance(error, ExecutionFailed) else error
    code = status_of(error) if isinstance(error, ExecutionFailed) else None
    status = "" if code in (None, STATUS_OF[ExecutionFailed]) else code.name
    if isinstance(cause, WITH_STATUS):
        status = cause.status
    if isinstance(cause, StepFailed):
        error = cause  # which names the model
    for kind in type(error).__mro__:
        if kind in STATUS_OF:
            return kind.__name__, error_text(error), status
    _log.error("a request failed with an internal error, a bug in paceline; please report it", exc_info=error)
    return InternalError.__name__, f"internal error: {type(error).__name__}: {error_text(error)}", ""


def unpacked_error(name: str, text: str, status: str) -> BaseException:
    """The error again, with its status and text; what else it had is lost."""
    kind = _BY_NAME[name]
    if issubclass(kind, WITH_STATUS):
        return kind(status, text)
    if kind is StepFailed:
        return StepFailed(text, grpc.StatusCode[status or "INTERNAL"])
    error = kind.__new__(kind)
    error.args = (text,)  # MemoryError's `__new__` doesn't take it
    if status:
        error.__cause__ = UpstreamFailed(status, text)
    return error


class Aborted(Exception):
    """A handler ended its call with a status."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code
        self.text = text


class CallContext:
    """What unary handlers use of their context: headers, the time that is left, and `abort`."""

    def __init__(self, headers: tuple[tuple[str, str | bytes], ...], deadline_ns: int | None) -> None:
        self._headers = headers
        self._deadline_ns = deadline_ns

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return self._headers

    def time_remaining(self) -> float | None:
        if self._deadline_ns is None:
            return None
        return max(0.0, (self._deadline_ns - time.monotonic_ns()) / 1e9)

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        raise Aborted(code, details)
