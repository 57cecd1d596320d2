"""Requests to a batcher, what is known of each, and when they are taken to arrive: for `batching_world.py`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from paceline.scheduler.failures import Blame
from paceline.scheduler.request import Request as Submitted
from paceline.scheduler.turns import ArrivalModel

MS = 1_000_000
LIMIT_NS = 50 * MS
MAX_UNBEGUN, MAX_ENDS = 3, 4
"""How many instances may end before they begin on a request, and because of the requests of one batch."""
POISONS = (Blame.FATAL, Blame.REQUESTS, Blame.SIZE)


class Complaints(logging.Handler):
    """Records what the scheduler logs as an error: none of its callbacks may raise."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.all: list[Any] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.all.append((record.getMessage(), record.exc_info))


class Fault(Exception):
    def __init__(self, blame: Blame) -> None:
        super().__init__(blame.name)
        self.blame = blame


class Like(NamedTuple):
    """What requests may have in common. An execution with a poisoned one fails if it is to end "honestly"."""

    rows: int
    key: str
    size_bytes: int
    priority: int
    timeout_ns: int
    patience_ns: int
    poison: Blame | None


@dataclass(eq=False)
class Search:
    """Requests that once failed together, and how many instances have ended because of them."""

    members: Sequence[Request]
    ends: int = 0


@dataclass(eq=False)
class Request:
    """`answer` is what it must be answered with, as far as is known; `faults` are errors by which it may have failed.
    It is `vague` if nobody can see whether it still waits."""

    like: Like
    level: int
    arrived_ns: int
    deadline_ns: int
    timeout_at_ns: int
    future: Submitted[Request, Any]
    answer: object = None
    faults: list[Fault] = field(default_factory=list)
    is_over: bool = False
    vague: bool = False
    may_be_deadly: bool = False
    search: Search | None = None
    unbegun: int = 0

    @property
    def waits(self) -> bool:
        """As far as is known; executing counts."""
        return not (self.future.done() or self.is_over)


class Arrivals(ArrivalModel):
    """Counts the requests that execute. Instances wait for more requests only with `crowds`."""

    def __init__(self, *, crowds: bool) -> None:
        super().__init__()
        self.executing, self.crowds = 0, crowds
        for number in range(100):
            self.on_start(4, 0, 0, number * MS)
            self.on_end(4, 0)

    def on_start(self, requests: int, waiting: int, now_ns: int, busy_ns: int) -> None:
        super().on_start(requests, waiting, now_ns, busy_ns)
        self.executing += requests

    def on_end(self, requests: int, now_ns: int) -> None:
        super().on_end(requests, now_ns)
        self.executing -= requests

    def patience_ns(self, waiting: int, waited_ns: int) -> int:
        return super().patience_ns(waiting, waited_ns) if self.crowds else 0
