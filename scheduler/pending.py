"""A request that was submitted, as whoever awaits its result has it.

Lives here: the future, and what became of the request. Must not: decide anything; that is `batcher`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from itertools import groupby
from operator import attrgetter
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from scheduler.lane import Entry

__all__ = ["BatchFacts", "Pending", "tell"]

_log = logging.getLogger("paceline.scheduler")

_TOLD = attrgetter("told")

P = TypeVar("P")
R = TypeVar("R")


class BatchFacts(NamedTuple):
    """What became of a request: the batch it was executed in, how long it waited and was executed, when that began on
    the monotonic clock, and what the instance returned."""

    number: int
    rows: int
    padded_rows: int
    queue_ns: int
    compute_ns: int
    started_ns: int
    executed: Any


class Pending(asyncio.Future[R], Generic[P, R]):
    """A submitted request's future result. Cancelling it, as a cancelled task does with what it awaits, takes the
    request out of the queue at once; once it executes, cancelling only discards its share of the answer, and calls the
    execution off, if its runner can, when nobody is left who waits for it.

    `told`, if there is one, is called once it is done, with a list of what requests are `about`: those of a batch
    together, after it was reported, in the order in which answers leave; those that end otherwise from the loop. It
    mustn't raise.

    `facts` are there as soon as there is a result; few ask, so they are put together then. `refused` says that there is
    an error for this request alone. `tag` is whatever the caller wants an observer of batches to find here.
    """

    payload: P
    tag: Any = None
    batch_facts: BatchFacts | None = None
    waited_ns = 0
    refused = False
    entry: Entry[Pending[P, R]] | None = None
    batcher: _HearsOfCancelling
    told: Callable[[list[Any]], None] | None = None
    about: Any = None

    def cancel(self, msg: Any | None = None) -> bool:
        cancelled = super().cancel(msg)
        if cancelled:
            entry, self.entry = self.entry, None
            self.batcher.on_cancel(self, entry)
            if self.told is not None:
                self.get_loop().call_soon(tell, [self])
        return cancelled

    @property
    def facts(self) -> BatchFacts | None:
        return self.batch_facts and self.batch_facts._replace(queue_ns=self.waited_ns)

    def left_queue(self) -> None:
        """Forget the entry, which points back here: no cycle may be left for the garbage collector to find."""
        self.entry = None


def tell(done: list[Pending[Any, Any]]) -> None:
    """Tell who waits for these."""
    for told, pendings in groupby(done, _TOLD):
        about = []
        for pending in pendings:
            about.append(pending.about)
            # They lead back here, and no cycle may be left for the garbage collector to find.
            pending.told = pending.about = None
        try:
            if told is not None:
                told(about)
        except Exception:  # noqa: BLE001 - it is logged, and others are owed theirs
            _log.exception("who waits for requests can't be told that they are done")


class _HearsOfCancelling(Protocol):
    def on_cancel(self, pending: Pending[Any, Any], entry: Entry[Any] | None) -> None: ...
