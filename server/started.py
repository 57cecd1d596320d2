"""A request on its way, and one with an RPC of its own, whose coroutine waits for it.

Lives here: what is known of a request between `Inference.start` and `Inference.finish`, and who calls these for a call.
Must not: what they do.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from backends.shares import Share
from server.codec import AnyResponse
from server.decoded import DecodedRequest
from server.model_statistics import FailureReason, reason_of
from server.served_model import ServedModel
from server.watching import RequestWatch
from server.wire_request import AnyRequest

__all__ = ["Call", "Started"]

_log = logging.getLogger("paceline.server.inference")

_MOST_MADE_BYTES = 2**17
"""Of a batch's outputs, of which all answers are made before the first one leaves."""


class Started:
    """A request on its way. Cancelling `pending` takes it back; once it is done, `Inference.finish` has the answer.
    There is a `watch` if somebody wants to know of every request."""

    __slots__ = ("began_ns", "decoded", "model", "pending", "request", "watch")

    def __init__(
        self,
        request: AnyRequest,
        model: ServedModel,
        decoded: DecodedRequest,
        pending: asyncio.Future[Any],
        began_ns: int,
        watch: RequestWatch | None,
    ) -> None:
        self.request = request
        self.model = model
        self.decoded = decoded
        self.pending = pending
        self.began_ns = began_ns
        self.watch = watch

    def on_failure(self, error: BaseException) -> None:
        """Count the request as one that ended with `error`."""
        self.model.statistics.on_failure(error, time.monotonic_ns() - self.began_ns)
        if reason_of(error) is FailureReason.BACKEND:
            # Its words alone: whoever keeps the record would keep the error, and all that its traceback leads to.
            _log.error("model '%s' version %s failed: %s", self.model.name, self.model.version, str(error))
        if self.watch is not None:
            self.watch.on_failure(error)


class Call(asyncio.Future[None]):
    """A request with an RPC of its own, done when there is an answer. As those of a batch are started together, and
    their answers made, the coroutine that waits has little left to do when it is woken up in between others of gRPC's.
    Cancelling it, as a cancelled task does with what it awaits, takes the request back at once."""

    def __init__(self, inference: _Finishing, begin: Callable[[], Started]) -> None:
        """`begin` is the request's `Inference.start`."""
        super().__init__()
        self._inference = inference
        self._begin = begin
        self._started: Started | None = None
        self._response: AnyResponse | None = None
        self._error: BaseException | None = None

    def cancel(self, msg: Any | None = None) -> bool:
        cancelled = super().cancel(msg)
        if cancelled:
            self.give_up()
        return cancelled

    # hot path: see bench/
    def start(self) -> None:
        try:
            started = self._begin()
        except Exception as error:  # noqa: BLE001 - the caller is told
            if not self.done():
                self._error = error
                self.set_result(None)
            return
        if self.done():
            self._inference.give_up(started)
            return
        self._started = started
        started.pending.add_done_callback(self._on_done)

    # hot path: see bench/
    def _on_done(self, pending: asyncio.Future[Any]) -> None:
        del pending  # an error that it has leads to this frame, and it mustn't lead back to the error
        if self.done():
            return
        if self._started is not None and _is_small(self._started):
            self._make()
        self.set_result(None)

    def _make(self) -> None:
        started, self._started = self._started, None
        assert started is not None
        try:
            self._response = self._inference.finish(started)
        except BaseException as error:  # noqa: BLE001 - the caller is told
            self._error = error
        finally:
            del started

    def answer(self) -> AnyResponse:
        """The response, once that is there. Raises what came instead."""
        if self._started is not None:
            self._make()
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
            assert self._response is not None
            return self._response
        finally:
            del error

    def give_up(self) -> None:
        """Nobody waits for the answer any more, which may just have come."""
        self._error = None
        started, self._started = self._started, None
        if started is not None:
            self._inference.give_up(started)


class _Finishing(Protocol):
    """What `Inference` does with what it has started."""

    def finish(self, started: Started) -> AnyResponse: ...

    def give_up(self, started: Started) -> None: ...


def _is_small(started: Started) -> bool:
    pending = started.pending
    if pending.cancelled() or pending.exception() is not None:
        return True
    results = pending.result()
    return isinstance(results, Share) and results.outputs.size_bytes <= _MOST_MADE_BYTES
