"""A request in flight, and one with an RPC of its own, whose coroutine waits for it.

Lives here: what is known of a request from when it has arrived until it is answered. Must not: the steps in between;
those are `inference`, which does them for many requests at a time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

import grpc

from scheduler.telling import Telling
from server.call_facts import Sent, TraceParent
from server.codec.codec import AnyResponse
from server.codec.shortcuts import Envelope
from server.codec.wire_request import AnyRequest
from server.errors import status_of, words_of
from server.telemetry.model_statistics import FailureReason, reason_of
from server.telemetry.watching import RequestWatch

__all__ = ["Call", "InFlight", "Inferring", "follow"]

_log = logging.getLogger("paceline.server.inference")

_NO_FAULT_OF_THE_MODEL = frozenset(
    (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.DEADLINE_EXCEEDED)
)
"""As another server may say that executes it: a request is at fault, or its caller was in a hurry."""


class InFlight:
    """A request in flight. Its caller gives up at `deadline_ns` on the monotonic clock, and traces it as part of
    `parent`; `sent` are headers for another server, should one execute it.

    `model` is there once it is looked up, `decoded`, a `DecodedRequest`, once it is checked, and `pending` once it was
    submitted; these two until it ends. Then `on_done` is called, unless it is `gone`: given up. By then it has an
    `answer`, or was told to `fail`; if neither, its answer is so large that it is better made when it can leave, by
    `Inference.finish`. There is a `watch` if somebody wants to know of every request.
    """

    envelope: Envelope | None = None
    """What its answer travels in."""

    model: Any = None
    decoded: Any = None
    pending: asyncio.Future[Any] | None = None
    watch: RequestWatch | None = None
    answer: AnyResponse | None = None
    gone = cancelled = False

    def __init__(self, request: AnyRequest, deadline_ns: int, parent: TraceParent | None, sent: Sent) -> None:
        self.request = request
        self.deadline_ns = deadline_ns
        self.parent = parent
        self.sent = sent
        self.began_ns = time.monotonic_ns()

    def cancel(self) -> None:
        """Have it end as soon as it can. `on_done` is called all the same."""
        self.cancelled = True
        if self.pending is not None:
            self.pending.cancel()

    def fail(self, error: BaseException) -> None:
        """There will be no answer, but this."""
        raise NotImplementedError

    def on_done(self) -> None:
        """It is answered, or has failed."""
        raise NotImplementedError

    def count_failure(self, error: BaseException) -> None:
        """Count it as one that ended with `error`."""
        if self.model is not None:
            self.model.statistics.on_failure(error, time.monotonic_ns() - self.began_ns)
            if reason_of(error) is FailureReason.BACKEND and status_of(error) not in _NO_FAULT_OF_THE_MODEL:
                # Its words alone: whoever keeps the record would keep the error, and all that its traceback leads to.
                _log.error("model '%s' version %s failed: %s", self.model.name, self.model.version, words_of(error))
        if self.watch is not None:
            self.watch.on_failure(error)


class Call(InFlight):
    """A request with an RPC of its own, whose coroutine awaits `response`. As those of a batch are started together,
    and their answers made, that has little left to do when it is woken up in between others of gRPC's."""

    def __init__(
        self, inference: Inferring, request: AnyRequest, deadline_ns: int, parent: TraceParent | None, sent: Sent
    ) -> None:
        super().__init__(request, deadline_ns, parent, sent)
        self._inference = inference
        self._error: BaseException | None = None
        self._done = _Done()
        self._done.call = self

    def fail(self, error: BaseException) -> None:
        self._error = error

    # hot path: see bench/
    def on_done(self) -> None:
        done = self._done
        done.call = None
        if not done.done():
            done.set_result(None)

    # hot path: see bench/
    async def response(self) -> AnyResponse:
        """The answer. Raises what comes instead. Cancelling it takes the request back at once."""
        self._inference.announce(self)
        try:
            await self._done
            if self.answer is None and self._error is None:
                self._inference.finish(self)
            if self._error is not None:
                raise self._error
            assert self.answer is not None
            return self.answer
        except asyncio.CancelledError:
            self.give_up()
            raise
        finally:
            # An error has a traceback, that this frame, and this frame, by the call, would have the error, and what the
            # request used: shared memory would stay open until the garbage collector comes by.
            self._error = None
            del self

    def give_up(self) -> None:
        """Nobody waits for the answer any more, which may just have come."""
        self._error = self._done.call = None
        self._inference.give_up(self)


class _Done(asyncio.Future[None]):
    """Cancelled, as a cancelled task does with what it awaits, it takes the call back in that moment."""

    call: Call | None = None

    def cancel(self, msg: Any | None = None) -> bool:
        cancelled = super().cancel(msg)
        if cancelled and self.call is not None:
            self.call.give_up()
        return cancelled


class Inferring(Protocol):
    """The steps of a request, as `server.requests.inference` has them, or a process that hands them on."""

    @property
    def reads_parents(self) -> bool: ...

    def check_serving(self) -> None: ...

    def announce(self, flight: Any) -> None: ...

    def finish(self, flight: Any) -> None: ...

    def give_up(self, flight: Any) -> None: ...


# hot path: see bench/
def follow(flight: InFlight, pending: asyncio.Future[Any], told: Callable[[list[Any]], None]) -> None:
    """Have `told` called with the request, and others, when `pending` is done."""
    flight.pending = pending
    if isinstance(pending, Telling):
        pending.told, pending.about = told, flight
        return

    def tell(done: asyncio.Future[Any]) -> None:
        if flight.gone and not done.cancelled():
            # It has failed while it was being cancelled. Somebody has to look, or asyncio logs that nobody did.
            done.exception()
        del done  # an error that it has leads to this frame, and it mustn't lead back to the error
        told([flight])

    pending.add_done_callback(tell)
