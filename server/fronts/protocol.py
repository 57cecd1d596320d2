"""What fronts and the engine say to each other, and how errors and calls travel.

Lives here: kinds of messages with their fields, in order; what stands in for gRPC's context where a front's RPC is
handled. Must not: act on messages, or know any RPC. `id` is the front's number for what it waits for. Deadlines are on
the monotonic clock, which is the same for all processes of a machine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NoReturn

import grpc

from paceline.backends.transport.link import FIRST_KIND
from paceline.server.errors import Aborted, ServerStopping
from paceline.server.requests.in_flight import failure_of


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
    # What isn't the end of a request, with all that follows.
    OPENED = FIRST_KIND + 15  # id; to INFER: it may be answered more than once
    NEXT = FIRST_KIND + 16  # id, bytes of a response that isn't the last; to INFER
    NEXT_FAILED = FIRST_KIND + 17  # id, and the `packed_error` in place of one; to INFER


MAX_INLINE_BYTES = 2**13
"""Of requests and responses that go through the socket; larger ones go through shared memory."""
WHAT_IS_FULL = "bytes of tensors in transit between processes (--frontend-memory-mb)"


def packed_error(error: BaseException, model: str = "") -> tuple[str, str]:
    """What to send of an error: the name of the status, and the text, that whoever has asked `model` is told. Without a
    status: that the server stops, as its callers are also told to try again."""
    if isinstance(error, ServerStopping):
        return "", ""
    status, text = failure_of(error, model, "a request")
    return status.name, text


def unpacked_error(status: str, text: str) -> Aborted | ServerStopping:
    """An error of which callers are told the same."""
    return Aborted(grpc.StatusCode[status], text) if status else ServerStopping()


class CallContext:
    """What unary handlers use of their context: headers, the time that is left, and how they end."""

    def __init__(self, headers: tuple[tuple[str, str | bytes], ...], deadline_ns: int | None) -> None:
        self._headers = headers
        self._deadline_ns = deadline_ns

    def invocation_metadata(self) -> tuple[tuple[str, str | bytes], ...]:
        return self._headers

    def time_remaining(self) -> float | None:
        if self._deadline_ns is None:
            return None
        return max(0.0, (self._deadline_ns - time.monotonic_ns()) / 1e9)

    def set_trailing_metadata(self, metadata: Sequence[tuple[str, str]]) -> None:
        """Nothing: only a status and a text go to the front."""

    async def abort(self, code: grpc.StatusCode, details: str = "") -> NoReturn:
        raise Aborted(code, details)
