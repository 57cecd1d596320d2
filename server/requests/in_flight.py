"""Requests in flight, and the kind that has its own RPC, whose coroutine waits for the answer.

Lives here: what is known about a request from its arrival until it is answered. Must not: the steps in between; those
are in `inference`, which takes them for many requests at a time.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

import grpc

from paceline.scheduler.notifying import NotifyingFuture
from paceline.server.call_facts import PassedHeaders, TraceParent
from paceline.server.codec.codec import AnyResponse
from paceline.server.codec.shortcuts import Envelope
from paceline.server.codec.wire_request import AnyRequest
from paceline.server.errors import error_text, status_of
from paceline.server.telemetry.model_statistics import FailureReason, reason_of
from paceline.server.telemetry.watching import RequestWatch

__all__ = ["Call", "InFlight", "InferenceSteps", "follow"]

_log = logging.getLogger("paceline.server.inference")

_NO_FAULT_OF_THE_MODEL = frozenset(
    (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.OUT_OF_RANGE, grpc.StatusCode.DEADLINE_EXCEEDED)
)
"""Statuses of another server that executes the model which aren't the model's fault: the request is at fault, or its
caller's deadline was too short."""


class InFlight:
    """A request in flight. `deadline_ns` is when its answer has to leave to reach the caller in time, on the monotonic
    clock. `parent` is the caller's trace. `passed` are headers for another server, if one executes the request.

    `model` is set when it is looked up, `decoded` (a `DecodedRequest`) when the request is checked, and `pending` when
    it is submitted; the last two are kept until it ends. Then `on_done` is called, unless the request is `gone`: given
    up. By then it has an `answer`, or `fail` was called; if neither, `Inference.finish` makes the answer when it can
    leave, since it may be large. `watch` is set only if somebody wants to know about every request.
    """

    envelope: Envelope | None = None
    """The message that its answer travels in, if any."""

    model: Any = None
    decoded: Any = None
    pending: asyncio.Future[Any] | None = None
    watch: RequestWatch | None = None
    answer: AnyResponse | None = None
    gone = cancelled = False

    def __init__(
        self, request: AnyRequest, deadline_ns: int, parent: TraceParent | None, passed: PassedHeaders
    ) -> None:
        self.request = request
        self.deadline_ns = deadline_ns
        self.parent = parent
        self.passed = passed
        self.began_ns = time.monotonic_ns()

    def cancel(self) -> None:
        """End the request as soon as possible. `on_done` is still called."""
        self.cancelled = True
        if self.pending is not None:
            self.pending.cancel()

    def fail(self, error: BaseException) -> None:
        """The request has failed: `error` takes the place of its answer."""
        raise NotImplementedError

    def on_done(self) -> None:
        """The request has its answer, or has failed, or its answer can be made now."""
        raise NotImplementedError

    def count_failure(self, error: BaseException) -> None:
        """Count the request as ended by `error`; log the error if the model is at fault."""
        if self.model is not None:
            self.model.statistics.on_failure(error, time.monotonic_ns() - self.began_ns)
            if reason_of(error) is FailureReason.BACKEND and status_of(error) not in _NO_FAULT_OF_THE_MODEL:
                # Only its text: a handler that keeps the record would keep the error, and all that its traceback leads
                # to.
                _log.error("model '%s' version %s failed: %s", self.model.name, self.model.version, error_text(error))
        if self.watch is not None:
            self.watch.on_failure(error)


class Call(InFlight):
    """A request with its own RPC, whose coroutine awaits `response`. The requests of a batch are started together, and
    their answers are made together, so the coroutine has little left to do when it is woken between others of
    gRPC's."""

    def __init__(
        self,
        inference: InferenceSteps,
        request: AnyRequest,
        deadline_ns: int,
        parent: TraceParent | None,
        passed: PassedHeaders,
    ) -> None:
        super().__init__(request, deadline_ns, parent, passed)
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
        """The answer. Raises the error if the request fails. Cancelling this withdraws the request at once."""
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
            # Break the cycle: the error's traceback holds this frame, and this frame, through the call, would hold the
            # error and what the request used. Shared memory would stay open until the garbage collector runs.
            self._error = None
            del self

    def give_up(self) -> None:
        """Nobody waits for the answer any more; it may just have come."""
        self._error = self._done.call = None
        self._inference.give_up(self)


class _Done(asyncio.Future[None]):
    """Withdraws the call the moment it is cancelled; a cancelled task cancels what it awaits."""

    call: Call | None = None

    def cancel(self, msg: Any | None = None) -> bool:
        cancelled = super().cancel(msg)
        if cancelled and self.call is not None:
            self.call.give_up()
        return cancelled


class InferenceSteps(Protocol):
    """The steps of a request: `server.requests.inference`, or a front that passes requests on to another process."""

    @property
    def reads_parents(self) -> bool: ...

    def check_serving(self) -> None: ...

    def announce(self, flight: Any) -> None: ...

    def finish(self, flight: Any) -> None: ...

    def give_up(self, flight: Any) -> None: ...


# hot path: see bench/
def follow(flight: InFlight, pending: asyncio.Future[Any], on_done: Callable[[list[Any]], None]) -> None:
    """Have `on_done` called when `pending` is done, with `flight` and perhaps others that are done."""
    flight.pending = pending
    if isinstance(pending, NotifyingFuture):
        pending.on_done, pending.subject = on_done, flight
        return

    def tell(done: asyncio.Future[Any]) -> None:
        if flight.gone and not done.cancelled():
            # It failed while it was being cancelled. Somebody has to retrieve the error, or asyncio logs that nobody
            # did.
            done.exception()
        del done  # its error leads to this frame, which must not lead back to the error
        on_done([flight])

    pending.add_done_callback(tell)
