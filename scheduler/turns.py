"""When a batcher asks its queue what to do: once the requests that arrive together have arrived.

Lives here: requests that have arrived and haven't been looked at, and how long the turn is put off for others that are
likely to arrive right away (`company`). Must not: know what a turn does; that is `batcher`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

from scheduler.clock import Alarm, Clock
from scheduler.company import Company

__all__ = ["Kept", "Submit", "Turns"]

Submit = Callable[[list[Any]], None]
"""Submits requests, in order."""

_log = logging.getLogger("paceline.scheduler")

_UNSEEN_NS = 500_000
"""So long those who come while others are waited for may be unknown but by their number: they may be in a hurry."""
_LEAST_NS = 50_000
"""An alarm takes as long to be heard."""


class Kept(NamedTuple):
    """What an instance may be kept waiting for: besides those `waiting`, for so many more as there is `room` for, until
    `until_ns`, since somebody may have a deadline."""

    waiting: int
    room: int
    until_ns: int


class Turns:
    """Those of one batcher.

    `take` takes a turn: it has to call `begin` first, and then asks the queue what to do. `kept_waiting` says how long
    an instance may be kept waiting for more, when all who have come are submitted; None if not at all.
    """

    __slots__ = (
        "_alarm",
        "_announced",
        "_came",
        "_clock",
        "_company",
        "_due_ns",
        "_is_due",
        "_is_looking",
        "_is_put_off",
        "_kept_waiting",
        "_latest",
        "_loop",
        "_missing",
        "_submit",
        "_take",
        "_until_ns",
    )

    _loop: asyncio.AbstractEventLoop
    _alarm: Alarm

    def __init__(
        self,
        take: Callable[[], None],
        kept_waiting: Callable[[], Kept | None],
        company: Company,
        clock: Clock,
    ) -> None:
        self._take = take
        self._kept_waiting = kept_waiting
        self._company = company
        self._clock = clock
        # By what submits them; those that do so for the latest ones are the `_latest`.
        self._announced: list[tuple[Submit, list[Any]]] = []
        self._submit: Submit | None = None
        self._latest: list[Any] = []
        # Whether a turn is to be taken, since `_due_ns`, and whether the loop's next iteration looks after it.
        self._is_due = self._is_looking = False
        self._due_ns = 0
        # Put off until `_until_ns`, and again if somebody has come meanwhile; `_missing` are how many need to come for
        # another look before the alarm rings.
        self._came = self._missing = self._until_ns = 0
        self._is_put_off = False

    @property
    def announced(self) -> int:
        """How many requests were announced and haven't been submitted."""
        return sum(len(requests) for _, requests in self._announced)

    def start(self) -> None:
        """From now on, on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._alarm = self._clock.alarm(self._on_alarm)

    def close(self) -> None:
        """No more."""
        self._alarm.close()

    # hot path
    def announce(self, submit: Submit, request: object) -> None:
        """`submit` will submit this request, with others."""
        if submit != self._submit:
            self._submit, self._latest = submit, []
            self._announced.append((submit, self._latest))
        self._latest.append(request)
        self.arrived()

    # hot path
    def arrived(self) -> None:
        """A request was submitted, or will be."""
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
        """A turn is being taken, due or not."""
        self._is_put_off = False
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

    def _look(self) -> None:
        """Take the turn that is due, unless batches had company lately and more requests are likely to come up right
        away. Only when they are submitted it is known how large those are that have come, and how long they have."""
        self._is_looking = self._is_put_off = False
        if self._is_due:
            self.submit_announced()
            if not self._put_off():
                self._take()

    def _put_off(self) -> bool:
        """Whether the turn had better be taken later: then, or when enough have come, there will be another look."""
        kept = self._kept_waiting()
        if kept is None:
            return False
        now_ns = self._clock.now_ns()
        self._due_ns = self._due_ns or now_ns
        self._company.forget(now_ns)
        patience_ns = self._company.patience_ns(kept.waiting, now_ns - self._due_ns)
        if not patience_ns or kept.until_ns < now_ns + _LEAST_NS:
            return False
        self._until_ns = min(now_ns + patience_ns, kept.until_ns)
        self._came, self._missing = 0, min(kept.room, self._company.missing(kept.waiting))
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
        """Whether those who have come meanwhile may be kept waiting as long as it was meant."""
        if not self._came:
            return True
        # Those announced have been counted.
        came, self._is_put_off = self._came, False
        self.submit_announced()
        self._came, self._is_put_off = came, True
        kept = self._kept_waiting()
        if kept is None or kept.until_ns < now_ns + _LEAST_NS:
            return False
        self._until_ns = min(self._until_ns, kept.until_ns)
        return True
