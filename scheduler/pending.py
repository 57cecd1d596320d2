"""A submitted request, as seen by the code that awaits its result.

Lives here: the future, and what became of the request. Must not: decide anything; that is `batcher`.
"""

from __future__ import annotations

from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from paceline.scheduler.lane import Entry
from paceline.scheduler.notifying import NotifyingFuture

__all__ = ["BatchFacts", "Pending"]

P = TypeVar("P")
R = TypeVar("R")


class BatchFacts(NamedTuple):
    """What became of a request: the batch that it was executed in, how long it waited and executed, when its execution
    began on the monotonic clock, and what the instance returned."""

    number: int
    rows: int
    padded_rows: int
    queue_ns: int
    compute_ns: int
    started_ns: int
    executed: Any


class Pending(NotifyingFuture[R], Generic[P, R]):
    """The future result of a submitted request.

    Cancelling it, as a cancelled task does with what it awaits, takes the request out of the queue at once. Once the
    request executes, cancelling only discards its share of the answer; the execution is called off, if its runner can,
    when nobody is left who waits for it.

    `on_done` (of `NotifyingFuture`) is called once for all requests of a batch, after the batch was reported, with
    their subjects in the order in which answers leave. If a request ends otherwise, the event loop calls it.

    `facts` are available as soon as there is a result; few ask for them, so they are put together on demand.
    `answered`: there is a result. `refused`: there is an error for this request alone. `unbegun` is how many instances
    ended before they began on it. `tag` is whatever the caller wants an observer of batches to find here.
    """

    payload: P
    tag: Any = None
    batch_facts: BatchFacts | None = None
    waited_ns = unbegun = 0
    refused = answered = False
    entry: Entry[Pending[P, R]] | None = None
    batcher: _HearsOfCancelling

    def cancel(self, msg: Any | None = None) -> bool:
        cancelled = super().cancel(msg)
        if cancelled:
            entry, self.entry = self.entry, None
            self.batcher.on_cancel(self, entry)
        return cancelled

    @property
    def facts(self) -> BatchFacts | None:
        return self.batch_facts and self.batch_facts._replace(queue_ns=self.waited_ns)

    def left_queue(self) -> None:
        """Forget the entry, which refers back here: no cycle may be left for the garbage collector to find."""
        self.entry = None


class _HearsOfCancelling(Protocol):
    def on_cancel(self, pending: Pending[Any, Any], entry: Entry[Any] | None) -> None: ...
