"""What the batcher tells the outside about its work, for metrics and logs.

Lives here: the protocol, and the values that an observer gets. Must not: count anything; observers do. They are called
on the event loop, on the hot path: they add to counters and return.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any, NamedTuple, Protocol

from paceline.scheduler.request import AnyRequest


class Drop(Enum):
    """Why a request left, or never entered, the queue without being executed: a bound of the queue was reached, the
    batcher closed, no instance is left to execute it, its time was up or would have been, its caller went away, its
    sequence has ended before it.

    Requests that a batcher gives up in the middle of an execution when it closes are CLOSED too.
    """

    FULL_REQUESTS = "queue_full_requests"
    FULL_ROWS = "queue_full_rows"
    FULL_BYTES = "queue_full_bytes"
    CLOSED = "closed"
    NO_INSTANCE = "no_instance"
    EXPIRED = "expired"
    UNREACHABLE = "unreachable"
    CANCELLED = "cancelled"
    SEQUENCE_ENDED = "sequence_ended"


FULL = {"requests": Drop.FULL_REQUESTS, "rows": Drop.FULL_ROWS, "bytes": Drop.FULL_BYTES}
"""By what a queue is full of."""


class BatchReport(NamedTuple):
    """One execution of `rows` rows, padded to `padded_rows`, of requests filled up to `sizes`. Without padding they
    have `elements`: rows times sizes.

    `execution` is what the instance returned, None if it raised. Each request of the batch is counted once: `waits_ns`
    holds the times in the queue of those that have results, `failed` counts those that were answered with an error,
    `cancelled` those whose callers had gone away meanwhile. Requests of a failed batch that will run again are in none
    of these. `number` is the batch's number, `requests` are all that it had; whoever keeps these keeps their tensors
    alive. `unfinished_rows` are those of requests that come back for another execution, and will be counted then.
    """

    rows: int
    padded_rows: int
    waits_ns: Sequence[int]
    started_ns: int
    finished_ns: int
    execution: Any  # an instance's own class
    error: BaseException | None
    failed: int
    cancelled: int = 0
    number: int = 0
    requests: Sequence[AnyRequest] = ()
    sizes: tuple[int, ...] = ()
    elements: int = 0
    unfinished_rows: int = 0


class Observer(Protocol):
    def on_drop(self, drop: Drop) -> None: ...

    def on_batch(self, report: BatchReport) -> None: ...
