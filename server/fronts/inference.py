"""Inference in a front: requests go to the engine as they came, and answers come from there as bytes.

Lives here: what stands in for `server.requests.inference.Inference`, step by step the same. Must not: RPCs, or read
what is in requests and answers: the engine has all of a batch, finds the right words, and counts.
"""

from __future__ import annotations

import asyncio
import logging
from typing import cast

import numpy as np

from paceline.backends.transport.link import Link
from paceline.backends.transport.memory import ALIGNMENT
from paceline.backends.transport.parcel import Message, Parcel
from paceline.protos.wire import Data
from paceline.scheduler.answering import notify
from paceline.scheduler.errors import QueueFull
from paceline.scheduler.request import AnyRequest, Request
from paceline.server.call_facts import NO_PASSED_HEADERS
from paceline.server.codec.answers import Pieces
from paceline.server.codec.codec import AnyResponse
from paceline.server.codec.wire_request import WireRequest, message_of
from paceline.server.errors import ServerStopping, as_value
from paceline.server.fronts.protocol import MAX_INLINE_BYTES, WHAT_IS_FULL, Kind, unpacked_error
from paceline.server.requests.in_flight import Failure, InFlight

_log = logging.getLogger("paceline.server.fronts")

_MAX_UNSENT_BYTES = 64 * 2**20
"""Messages that the engine doesn't take: it hangs, and new callers are better refused than kept waiting."""


class Reply(Request[None, bytes]):
    """The reply to an RPC other than inference. `number` is what the engine knows it by."""

    __slots__ = ("number",)

    number: int


class Replies:
    """All replies that a front waits for: requests, and other RPCs."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.last_number = self.refused = 0
        # By the numbers that they have.
        self._waiting: dict[int, InFlight | Reply] = {}

    def refuse_if_full(self) -> None:
        """Raise QueueFull, and count that, if the engine doesn't take messages."""
        if self._link.unsent_bytes > _MAX_UNSENT_BYTES:
            self.refused += 1
            raise QueueFull(
                _MAX_UNSENT_BYTES, "bytes of messages to the process with the models, which isn't reading them"
            )

    # hot path
    def expect(self, request: InFlight | Reply) -> int:
        """Wait for the reply to `request`. Returns its number, which must be sent along."""
        self.last_number = request.number = self.last_number + 1
        self._waiting[request.number] = request
        request.batcher = self
        return request.number

    # hot path
    def send(self, flight: InFlight) -> None:
        """Have the engine answer a request. Raises QueueFull."""
        self.refuse_if_full()
        message, passed = flight.message, flight.passed
        data = message.data if isinstance(message, WireRequest) else message_of(message).SerializeToString()
        sent: Data | Parcel | None = data
        if len(data) > MAX_INLINE_BYTES:
            # The largest tensor is aligned: alone in its batch, it would be copied once more, 150 us for 600 KB.
            places = message.form.raw if isinstance(message, WireRequest) else ()
            begin, _ = max(places, key=lambda place: place[1] - place[0], default=(0, 0))
            sent = self._link.pack((np.frombuffer(data, np.uint8),), -begin % ALIGNMENT)
            if sent is None:
                self._link.send((Kind.REFUSED, message.model_name, message.model_version))
                raise QueueFull(self._link.size_bytes, WHAT_IS_FULL)
        headers = None if passed is NO_PASSED_HEADERS else tuple(passed)
        times = flight.arrived_ns, flight.deadline_ns
        self._link.send((Kind.INFER, self.expect(flight), *times, flight.parent, headers, flight.takes_more, sent))

    def on_cancel(self, request: AnyRequest) -> None:
        """The caller of `request` has gone: the engine is told, and then its source."""
        number = cast("InFlight | Reply", request).number
        if self._waiting.pop(number, None) is not None:
            self._link.send((Kind.CANCEL, number))
        asyncio.get_running_loop().call_soon(notify, [request])

    # hot path
    def on_message(self, message: Message) -> AnyRequest | None:
        """Handle a message that brings a reply. Returns the request whose source must be told; None if nobody waits, or
        the reply is yet to come. Doesn't raise: whatever is wrong with the message is an error of its request alone."""
        kind, number = message[:2]
        request: AnyRequest | None = self._waiting.get(number)
        try:
            if kind >= Kind.OPENED:
                if isinstance(request, InFlight):
                    self._on_next(request, kind, message[2:])
                return None
            if kind == Kind.PIECES:
                # Even if nobody waits: only memory of what is unpacked is given back. It is as soon as they are joined:
                # callers that don't read would take all of it, and everybody else's answers would wait for room.
                pieces = cast("Pieces", self._link.unpack(message[2]))
                if isinstance(request, InFlight):
                    _answer(request, pieces)
            elif request is None:
                pass
            elif kind == Kind.FAILED:
                request.fail(unpacked_error(*message[2:]))
            elif isinstance(request, InFlight):
                _answer(request, (message[2],))
            else:
                request.succeed(message[2])
        except Exception as error:  # noqa: BLE001 - the messages behind it are others'
            if request is None:
                _log.error("a reply failed with an internal error, a bug in paceline", exc_info=error)
            else:
                request.fail(as_value(error))
            if kind >= Kind.OPENED:  # the engine goes on with it
                self._link.send((Kind.CANCEL, number))
        self._waiting.pop(number, None)
        return request

    def _on_next(self, flight: InFlight, kind: int, fields: Message) -> None:
        """A request may be answered more than once, or has an answer that isn't its last."""
        if kind == Kind.OPENED:
            flight.on_open()
            return
        answer = _NextAnswer(self._link, flight)
        if kind == Kind.NEXT_FAILED:
            flight.on_more(answer, unpacked_error(*fields))
            return
        envelope = flight.envelope_of_more
        assert envelope is not None
        answer.answer = envelope.around((fields[0],))
        flight.on_more(answer, None)


class _NextAnswer:
    """`NextAnswer`, from the engine."""

    def __init__(self, link: Link, flight: InFlight) -> None:
        self._link = link
        self._number = flight.number
        self.message = flight.message
        self.answer: AnyResponse | None = None
        self.failure: Failure | None = None

    def sent(self, size_bytes: int) -> None:
        self._link.send((Kind.TAKEN, self._number, size_bytes))


class FrontInference:
    """Answers inference requests; `serving`, and whether it `reads_parents`, are set as the engine says."""

    def __init__(self, replies: Replies) -> None:
        self._replies = replies
        self.serving = self.reads_parents = False

    # hot path: see bench/
    def announce(self, flight: InFlight) -> None:
        """A request has arrived. It is sent to the engine at once: the link gathers what it sends."""
        flight.on_answers = self._on_done
        try:
            self._replies.send(flight)
        except Exception as error:  # noqa: BLE001 - the caller must get an answer
            flight.counted = True
            flight.on_failure(error)
            flight.on_done()

    # hot path: see bench/
    def _on_done(self, flights: list[InFlight]) -> None:
        for flight in flights:
            if not flight.gone:
                try:
                    self.finish(flight)
                    flight.on_done()
                except Exception:  # noqa: BLE001 - logged; others are owed their answers
                    _log.exception("a request's answer could not be handed on, a bug in paceline")

    # hot path: see bench/
    def finish(self, flight: InFlight) -> None:
        """A request has ended: it has its answer, or else its `on_failure` is called."""
        if flight.answered:
            flight.let_go()
            return
        error = asyncio.CancelledError() if flight.cancelled() else flight.exception()
        assert error is not None
        flight.let_go()
        flight.on_failure(error)

    def give_up(self, flight: InFlight) -> None:
        """Nobody waits for the answer any more."""
        flight.gone = True
        flight.cancel()

    def check_serving(self) -> None:
        """Raises ServerStopping while no requests are accepted."""
        if not self.serving:
            raise ServerStopping


# hot path: see bench/
def _answer(flight: InFlight, pieces: Pieces) -> None:
    """End the request with the answer that `pieces` are joined to, as its caller gets it."""
    try:
        if flight.takes_more and not len(pieces[0]):
            flight.answer = flight.end_of_answers()
        else:
            flight.answer = b"".join(pieces) if flight.envelope is None else flight.envelope.around(pieces)
    except Exception as error:  # noqa: BLE001 - passed to the caller
        flight.fail(as_value(error))
    else:
        flight.succeed(())
