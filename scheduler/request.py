"""A request, from its arrival to its answer: one object that everybody on its way knows.

Lives here: what its caller asks of the batcher, where it stands in the queue, and what became of it. Must not: decide
anything; that is `batch_queue` and `batcher`. Whoever has more to remember about a request makes a subclass.

It is no future, as most requests are awaited by nobody: their source is told of all that ended together. Whoever does
await one gets a future for that.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Hashable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from paceline.scheduler.policy import NEVER

P = TypeVar("P")
R = TypeVar("R")


class BatchFacts(NamedTuple):
    """What became of a request: the batch that it was executed in with its common `sizes`, how long it waited and
    executed, when its execution began on the monotonic clock, and what the instance returned."""

    number: int
    rows: int
    padded_rows: int
    queue_ns: int
    compute_ns: int
    started_ns: int
    executed: object
    sizes: tuple[int, ...] = ()


class SequenceStep(NamedTuple):
    """Where a request stands in its sequence. The ids 5 and "5" are different; 0 and "": it is in none."""

    id: int | str
    start: bool = False
    end: bool = False


OnAnswers = Callable[[list[Any]], None]
"""Told of requests that have another answer or have ended: all of a batch at once, in the order in which their answers
leave. It takes the `value` of one that hasn't `ended`, as the next answer replaces it. It mustn't raise. Typed Any
because each source has a class of requests of its own, and is told only of its own requests."""


@dataclass(slots=True, eq=False, repr=False)
class Request(Generic[P, R]):
    """`rows` rows of a model's input in `payload`, as the batcher's runners take it. Only requests of equal `key` share
    a batch. They may differ in `sizes`, as many as the policy has `lengths`: they are filled up to common ones.

    `timeout_ns` is its own queue timeout (0: none), `deadline_ns` the moment its caller gives up. Its wait began at
    `arrived_ns` (0: when it is submitted). `tag` is whatever the caller wants an observer of batches to find. `step`:
    what it is in its sequence, of a model whose requests are steps.

    While it waits: `level` is what it is bounded and counted by, `order` alone decides when it is served, and the queue
    has to do something about it at `act_at_ns`: at its queue timeout, or at its deadline.

    `ended`: it has its last result (`answered`: as `value`), or an error, or was cancelled. Then `on_answers` is
    called, if set, with this request and others that ended together. For one that was cancelled, the event loop calls
    it. It is also called for each answer before the last, and if it needs another execution. Until it has ended, a
    request may come back into the queue, with another payload, once it neither waits nor executes: it stays one
    request, and ends once.
    """

    payload: P
    rows: int
    key: Hashable
    arrived_ns: int = 0
    _: KW_ONLY
    size_bytes: int = 0
    sizes: tuple[int, ...] = ()
    priority: int = 0
    timeout_ns: int = 0
    deadline_ns: int = NEVER
    tag: Any = None
    step: SequenceStep | None = field(init=False, default=None)
    waits: bool = field(init=False, default=False)
    level: int = field(init=False, default=0)
    order: int = field(init=False, default=0)
    act_at_ns: int = field(init=False, default=0)
    timer: Timer[Request[P, R]] | None = field(init=False, default=None)
    batcher: _HearsOfCancelling | None = field(init=False, default=None)
    unbegun: int = field(init=False, default=0)
    waited_ns: int = field(init=False, default=0)
    batch_facts: BatchFacts | None = field(init=False, default=None)
    on_answers: OnAnswers | None = field(init=False, default=None)
    ended: bool = field(init=False, default=False)
    answered: bool = field(init=False, default=False)
    refused: bool = field(init=False, default=False)
    value: R = field(init=False)
    _error: BaseException | None = field(init=False, default=None)
    _future: _Future | None = field(init=False, default=None)

    def done(self) -> bool:
        """As `ended`, for those who take it for a future."""
        return self.ended

    def cancelled(self) -> bool:
        return self.ended and not self.answered and self._error is None

    def result(self) -> R:
        """The result. Raises the error if there is one, CancelledError if it was cancelled."""
        if self.answered:
            return self.value
        error = self.exception()
        assert error is not None
        try:
            raise error
        finally:
            # The error's traceback refers to this frame, which must not lead back to the error.
            del error, self

    def exception(self) -> BaseException | None:
        """The error, if it has failed. Raises CancelledError if it was cancelled."""
        if not self.ended:
            raise asyncio.InvalidStateError("the request hasn't ended")
        if not self.answered and self._error is None:
            raise asyncio.CancelledError
        return self._error

    @property
    def facts(self) -> BatchFacts | None:
        """As soon as there is a result; few ask, so they are put together on demand."""
        return self.batch_facts and self.batch_facts._replace(queue_ns=self.waited_ns)

    # hot path
    def succeed(self, result: R) -> None:
        self.value = result
        self.ended = self.answered = True
        if self._future is not None:
            self._future.end()

    def fail(self, error: BaseException) -> None:
        self._error = error
        self.ended = True
        if self._future is not None:
            self._future.end()

    def cancel(self) -> bool:
        """Withdraw the request; False if it has ended already. It leaves the queue at once. Once it executes, this only
        discards its share of the answer; the execution is called off, if its runner can, when nobody is left who waits
        for it."""
        if self.ended:
            return False
        self.ended = True
        if self._future is not None:
            self._future.end()
        if self.batcher is not None:
            self.batcher.on_cancel(self)
        return True

    def __await__(self) -> Generator[object, None, R]:
        """Cancelling whoever awaits it cancels it, as with a future."""
        try:
            if not self.ended:
                self._future = self._future or _Future(self)
                yield from self._future
            return self.result()
        finally:
            del self  # as in `result`


AnyRequest = Request[Any, Any]
RequestT = TypeVar("RequestT", bound=AnyRequest)
RequestT_co = TypeVar("RequestT_co", bound=AnyRequest, covariant=True)


class Batch(NamedTuple, Generic[RequestT]):
    """Requests that execute together; all of one `key`, in the order of service. `padded_rows` is what the model sees:
    `rows`, or more where only some sizes are allowed; likewise `sizes`, those that its requests are filled up to.
    `elements` is what the requests have without that: rows times sizes. `number` counts the batches of the queue, from
    1. `expected_ns` is how long it is likely to execute (0: not known well enough)."""

    number: int
    key: Hashable
    rows: int
    padded_rows: int
    requests: tuple[RequestT, ...]
    expected_ns: int = 0
    sizes: tuple[int, ...] = ()
    elements: int = 0


class Timer(Generic[RequestT_co]):
    """Stands for a request in the heap of timers. What stays there after the request has left is then small, whereas
    the request would keep its tensors alive."""

    __slots__ = ("request",)

    def __init__(self, request: RequestT_co) -> None:
        self.request: RequestT_co | None = request

    def __lt__(self, other: object) -> bool:
        """Called only for equal rank and token: of a put-back request's timer and the dead one from before."""
        return False


class _Future(asyncio.Future[None]):
    """Done when its request has ended. A cancelled task cancels what it awaits, and with it the request."""

    def __init__(self, request: AnyRequest) -> None:
        super().__init__()
        self._request: AnyRequest | None = request

    def end(self) -> None:
        """Wake whoever awaits it."""
        self._request = None  # no cycle may be left for the garbage collector to find
        if not self.done():
            self.set_result(None)

    def cancel(self, msg: object = None) -> bool:
        request, self._request = self._request, None
        cancelled = super().cancel(msg)
        if cancelled and request is not None:
            request.cancel()
        return cancelled


class _HearsOfCancelling(Protocol):
    def on_cancel(self, request: AnyRequest) -> None: ...
