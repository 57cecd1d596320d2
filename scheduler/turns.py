"""When a batcher asks its queue what to do: once the requests that arrive together have arrived.

Lives here: what has arrived and nobody has looked at, and how long the turn is put off for what is likely to arrive
right away (`company`). Must not: know what a turn does; that is `batcher`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from scheduler.company import Company
from scheduler.rests import Rests

__all__ = ["Submit", "Turns"]

Submit = Callable[[list[Any]], None]
"""Submits requests, in order."""

_log = logging.getLogger("paceline.scheduler")


class Turns:
    """Those of one batcher.

    `take` takes a turn, and lets `begin` do so first. `kept_waiting` says how many requests wait, with so many that
    were announced, if an instance may be kept waiting for more; else None.
    """

    __slots__ = (
        "_announced",
        "_arrivals",
        "_company",
        "_granted",
        "_is_crowded",
        "_is_due",
        "_is_looking",
        "_kept_waiting",
        "_latest",
        "_left",
        "_looks",
        "_loop",
        "_rest",
        "_seen",
        "_submit",
        "_take",
    )

    _loop: asyncio.AbstractEventLoop

    def __init__(
        self,
        take: Callable[[], None],
        kept_waiting: Callable[[int], int | None],
        company: Company,
        rest: Rests,
    ) -> None:
        self._take = take
        self._kept_waiting = kept_waiting
        self._company = company
        self._rest = rest
        # By what submits them; those that do so for the latest ones are the `_latest`.
        self._announced: list[tuple[Submit, list[Any]]] = []
        self._submit: Submit | None = None
        self._latest: list[Any] = []
        self._arrivals = 0
        self._is_due = self._is_looking = self._is_crowded = False
        # How often it was looked whether to take the turn that is due; and of the looks granted when the arrivals were
        # those `_seen`, how many are left.
        self._looks = self._granted = self._left = self._seen = 0

    @property
    def announced(self) -> int:
        """How many requests were announced and haven't been submitted."""
        return sum(len(requests) for _, requests in self._announced)

    def start(self) -> None:
        """From now on, on the running event loop."""
        self._loop = asyncio.get_running_loop()

    # hot path
    def announce(self, submit: Submit, request: object) -> None:
        """`submit` will submit this request, with others."""
        if submit != self._submit:
            self._submit, self._latest = submit, []
            self._announced.append((submit, self._latest))
        self._latest.append(request)
        self._arrivals += 1
        if not self._is_due:
            self.request()

    # hot path
    def arrived(self) -> None:
        """A request was submitted."""
        self._arrivals += 1
        if not self._is_due:
            self.request()

    def request(self) -> None:
        """Have a turn taken once all that is ready on the loop has run: requests that arrive together share a batch."""
        if self._is_due:
            return
        self._is_due = True
        self._looks = self._granted = self._left = 0
        if not self._is_looking:
            self._is_looking = True
            self._loop.call_soon(self._look)

    def begin(self) -> None:
        """A turn is being taken, due or not."""
        if self._announced:
            self._is_due = True  # this one: nobody has to ask for another
            self.submit_announced()
        self._is_due = False
        if self._announced:
            self.request()

    # hot path
    def submit_announced(self) -> None:
        """Have submitted now what was announced, in order of arrival."""
        if not self._announced:
            return
        announced, self._announced = self._announced, []
        self._submit, self._latest = None, []
        for submit, requests in announced:
            try:
                submit(requests)
            except Exception:  # noqa: BLE001 - it is logged, and the others are owed theirs
                _log.exception("announced requests can't be submitted")

    # hot path: in each iteration of the event loop while an instance is kept waiting, most often for nobody
    def _look(self) -> None:
        """Take the turn that is due, unless batches had company lately and more requests are likely to come up right
        away."""
        if self._is_due:
            if self._left and self._seen == self._arrivals:
                self._left = max(0, self._left - (self._rest() if self._is_crowded else 1))
                self._loop.call_soon(self._look)
                return
            if self._is_worth_waiting():
                self._loop.call_soon(self._look)
                return
        self._is_looking = False
        if self._is_due:
            self._take()

    def _is_worth_waiting(self) -> bool:
        """Whether to look again. If so, `_left` looks don't need another thought until somebody arrives."""
        if self._granted and self._seen == self._arrivals:
            return False  # they were all for nobody
        waiting = self._kept_waiting(self.announced)
        if waiting is None:
            return False
        self._looks += 1 + self._granted - self._left
        self._granted = self._left = self._company.patience(waiting, self._looks)
        self._is_crowded = self._company.is_crowd
        self._rest.restart()
        self._seen = self._arrivals
        return self._granted > 0
