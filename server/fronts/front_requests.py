"""Requests of a front, in the engine: those that it has decoded, and those that it has passed on as they came.

Lives here: what each of them does when it has an answer or fails. Must not: send anything but what becomes of one.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from paceline.backends.transport.parcel import Message
from paceline.server.call_facts import PassedHeaders, TraceParent
from paceline.server.codec.wire_request import AnyRequest
from paceline.server.fronts.protocol import Kind, packed_error
from paceline.server.requests.in_flight import InFlight, NextAnswer
from paceline.server.rpc.handlers import serialized

__all__ = ["FrontRequest", "Whole"]


class _Session(Protocol):
    """What is said to the front of one request."""

    def send(self, message: Message) -> None: ...

    def fail(self, number: int, error: BaseException) -> None: ...

    def on_done(self, whole: Whole) -> None: ...


class FrontRequest(InFlight):
    """A request of the front, which has numbered it, read it at `arrived_ns`, and decoded it; it makes the answer."""

    __slots__ = ("failed", "session")

    def __init__(
        self,
        session: _Session,
        number: int,
        message: AnyRequest,
        deadline_ns: int,
        parent: TraceParent | None,
        passed: PassedHeaders,
        arrived_ns: int,
    ) -> None:
        super().__init__(message, deadline_ns, parent, passed, arrived_ns)
        self.session = session
        self.number = number
        self.failed = False

    def on_failure(self, error: BaseException) -> None:
        self.failed = True
        self.session.fail(self.number, error)


class Whole(FrontRequest):
    """One that the front has passed on as it came. If it `takes_more` answers than one, these go through the socket, in
    front of the last: they are few at a time. `_held` are those that haven't left the front."""

    __slots__ = ("_held", "takes_more")

    takes_more: bool
    _held: deque[NextAnswer]

    # hot path
    def on_done(self) -> None:
        self.session.on_done(self)

    def on_open(self) -> None:
        self._held = deque()
        self.session.send((Kind.OPENED, self.number))

    def on_more(self, answer: NextAnswer, error: Exception | None) -> None:
        self._held.append(answer)
        if error is not None:
            self.session.send((Kind.NEXT_FAILED, self.number, *packed_error(error)))
            return
        assert answer.answer is not None
        self.session.send((Kind.NEXT, self.number, serialized(answer.answer)))

    def end_of_answers(self) -> bytes:
        """The front makes what its caller gets."""
        return b""

    def on_sent(self, answers: int, size_bytes: int) -> None:
        """The oldest `answers` answers, with so many bytes in all, have left the front."""
        for _ in range(answers):
            self._held.popleft().sent(size_bytes // answers)
