"""When a batcher asks its queue what to do: once the requests that arrive together have arrived.

Lives here: requests that have arrived and haven't been looked at, and how long the turn is put off for others that are
likely to arrive right away (`arrival_model`). Must not: know what a turn does; that is `batcher`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from paceline.scheduler.arrival_model import ArrivalModel
from paceline.scheduler.clock import Alarm, Clock

__all__ = ["Submit", "Turns", "WaitBudget"]

_Announced = list[Any]  # each source announces requests of a class of its own
Submit = Callable[[_Announced], None]
"""Submits requests, in order."""

_log = logging.getLogger("paceline.scheduler")

_UNSEEN_NS = 500_000
"""While others are waited for, requests that arrive may be known by their number alone for this long: they may be
urgent."""
_MIN_NS = 50_000
"""About how long an alarm takes to be noticed."""


class WaitBudget(NamedTuple):
    """What an instance may be kept waiting for: besides the `waiting` requests, for at most `max_more` more, until
    `until_ns`, since some may have deadlines."""

    waiting: int
    max_more: int
    until_ns: int


class Turns:
    """When one batcher takes its turns.

    `take` takes a turn: it has to call `begin` first, and then asks the queue what to do. `wait_budget` is called once
    all requests that have arrived are submitted; it says what an instance may be kept waiting for (None: nothing).
    """

    __slots__ = (
        "_alarm",
        "_announced",
        "_arrivals",
        "_came",
        "_clock",
        "_due_ns",
        "_is_due",
        "_is_looking",
        "_is_put_off",
        "_latest",
        "_loop",
        "_missing",
        "_submit",
        "_take",
        "_until_ns",
        "_wait_budget",
    )

    _loop: asyncio.AbstractEventLoop
    _alarm: Alarm

    def __init__(
        self,
        take: Callable[[], None],
        wait_budget: Callable[[], WaitBudget | None],
        arrivals: ArrivalModel,
        clock: Clock,
    ) -> None:
        self._take = take
        self._wait_budget = wait_budget
        self._arrivals = arrivals
        self._clock = clock
        # Announced requests by what submits them. The last group is `_latest`, which `_submit` submits.
        self._announced: list[tuple[Submit, _Announced]] = []
        self._submit: Submit | None = None
        self._latest: _Announced = []
        # Whether a turn is due, since `_due_ns`, and whether the loop's next iteration will check if it can be taken.
        self._is_due = self._is_looking = False
        self._due_ns = 0
        # The turn is put off until `_until_ns`, and then again if requests have arrived meanwhile: `_came` of them.
        # Once `_missing` have, there is another look before the alarm rings.
        self._came = self._missing = self._until_ns = 0
        self._is_put_off = False

    @property
    def announced(self) -> int:
        """How many requests were announced and haven't been submitted."""
        return sum(len(requests) for _, requests in self._announced)

    def start(self) -> None:
        """Start, on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._alarm = self._clock.alarm(self._on_alarm)

    def close(self) -> None:
        """Stop: the alarm rings no more."""
        self._alarm.close()

    # hot path
    def announce(self, submit: Submit, request: object) -> None:
        """Note a request that `submit` will submit, with others."""
        if submit != self._submit:
            self._submit, self._latest = submit, []
            self._announced.append((submit, self._latest))
        self._latest.append(request)
        self.arrived()

    # hot path
    def arrived(self) -> None:
        """Note that a request was submitted, or will be."""
        self._came += 1
        if not self._is_due or (self._is_put_off and self._came >= self._missing):
            self.request()

    def request(self) -> None:
        """Have a turn taken once all that is ready on the loop has run: requests that arrive together share a batch."""
        if not self._is_due:
            self._is_due = True
            self._due_ns = 0
        if not self._is_looking:
            self._is_looking = True
            self._loop.call_soon(self._look)

    def begin(self) -> None:
        """Begin a turn, due or not: first, what was announced is submitted."""
        self._is_put_off = False
        if self._announced:
            self._is_due = True  # this turn: nobody has to request another
            self.submit_announced()
        self._is_due = False
        if self._announced:
            self.request()

    # hot path
    def submit_announced(self) -> None:
        """Have all announced requests submitted now, in order of arrival."""
        if not self._announced:
            return
        announced, self._announced = self._announced, []
        self._submit, self._latest = None, []
        for submit, requests in announced:
            try:
                submit(requests)
            except Exception:  # noqa: BLE001 - logged; other requests must be submitted
                _log.exception("submitting requests that arrived together failed")

    def _look(self) -> None:
        """Take the turn that is due, unless batches lately had several requests and more are likely to arrive right
        away. The sizes and deadlines of those that have arrived are known only once they are submitted."""
        self._is_looking = self._is_put_off = False
        if self._is_due:
            self.submit_announced()
            if not self._put_off():
                self._take()

    def _put_off(self) -> bool:
        """Put the turn off if more requests are worth waiting for; returns whether it did. There is another look at the
        alarm, or when enough requests have arrived."""
        budget = self._wait_budget()
        if budget is None:
            return False
        now_ns = self._clock.now_ns()
        self._due_ns = self._due_ns or now_ns
        self._arrivals.forget(now_ns)
        patience_ns = self._arrivals.patience_ns(budget.waiting, now_ns - self._due_ns)
        if not patience_ns or budget.until_ns < now_ns + _MIN_NS:
            return False
        self._until_ns = min(now_ns + patience_ns, budget.until_ns)
        self._came, self._missing = 0, min(budget.max_more, self._arrivals.missing(budget.waiting))
        self._is_put_off = True
        self._set_alarm(now_ns)
        return True

    def _set_alarm(self, now_ns: int) -> None:
        self._alarm.set(min(self._until_ns, now_ns + _UNSEEN_NS))

    def _on_alarm(self) -> None:
        if not self._is_put_off or self._is_looking:
            return
        now_ns = self._clock.now_ns()
        if now_ns < self._until_ns and self._wait_on(now_ns):
            self._set_alarm(now_ns)
        elif now_ns >= self._until_ns and self._came:
            self._look()
        else:
            self._take()

    def _wait_on(self, now_ns: int) -> bool:
        """Whether the requests that have arrived meanwhile may be kept waiting too, if need be for less long than was
        meant."""
        if not self._came:
            return True
        # Announced requests have been counted already.
        came, self._is_put_off = self._came, False
        self.submit_announced()
        self._came, self._is_put_off = came, True
        budget = self._wait_budget()
        if budget is None or budget.until_ns < now_ns + _MIN_NS:
            return False
        self._until_ns = min(self._until_ns, budget.until_ns)
        return True
