"""When a batcher asks its queue what to do: once the requests that arrive together have arrived.

Lives here: requests that have arrived and haven't been looked at, how long the turn is put off for others that are
likely to arrive right away, and what is learned about that. Must not: know what a turn does; that is `batcher`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from math import ceil
from typing import Any, NamedTuple

from paceline.scheduler.clock import Alarm, Clock

_Announced = list[Any]  # each source announces requests of a class of its own
Submit = Callable[[_Announced], None]
"""Submits requests, in order."""

_log = logging.getLogger("paceline.scheduler")

_UNSEEN_NS = 500_000
"""While others are waited for, those that come are known by number alone for this long: some may be urgent."""
_MIN_NS = 50_000
"""About how long an alarm takes to be noticed."""

_CROWD_WEIGHT = 0.1
_CROWD_OF_ONE = 1.05
_CROWD_OF_MANY = 3.0
"""From this many requests per batch on, it is worth waiting longest."""
_QUIET_COSTS = 8
"""The longest wait for a next request: the time in which this many requests are taken up and answered."""
_COSTS_OF_ALL = 1.5
"""The longest wait in all, as a multiple of what a batch of the usual size costs."""
_LONGEST_NS = 10_000_000
"""The longest wait in all, whatever a batch costs: callers have deadlines."""
_COST_WEIGHT = 0.1
_FIRST_COST_NS = 100_000
_MIN_COST_NS = 10_000
_MAX_COST_NS = 500_000
_FORGOTTEN_NS = 1_000_000_000
"""Callers that haven't come again for this long are gone."""
_STILL_THERE = 0.98
_BATCHES_FOR_ONE_MORE = 16
"""One in this many batches doesn't leave when all known callers are there, since there may be others. The wait for
these is shorter."""
_COSTS_FOR_ONE_MORE = 2
_PAUSE_WEIGHT = 0.2
_OVERLAP = 0.75
"""Half of a batch has to execute for more than this part of a pause, so that the other half comes back meanwhile."""


class ArrivalModel:
    """What an idle instance is kept waiting for, and how long.

    gRPC hands requests that have arrived to the loop one per iteration, and taking one up and answering it costs the
    loop more than a small model's execution does. So where batches have several requests, it is worth waiting until
    nobody has come for some time. That time is a multiple of what a request costs the loop, and the longer, the larger
    batches have been. The wait ends when as many requests wait as have lately been there at a time, and at the latest
    when a batch as large as usual would be there, if all came as fast as the loop can take them up. So callers who come
    by chance, and not because they were answered, hardly wait for each other while the loop has time to spare: fewer
    come in that time, batches get smaller, and with them the wait gets shorter.

    Where executions take long, half of the callers may be enough. Callers who come again as soon as they are answered
    may all get into one batch, and then stay together, with nothing executing while they are answered and come back.
    That is worth it as long as the pause is shorter than what a batch costs besides its rows. If it isn't, two groups
    that alternate do better: one comes back while the other executes.

    `alone` says that batches lately had one request, so nobody else is waited for; `cost_ns` is about what a request
    costs the loop.
    """

    def __init__(self) -> None:
        self._batch_requests = self._present = 1.0
        self.alone = True
        self._batches = 0
        self.cost_ns = float(_FIRST_COST_NS)
        self._busy_ns = -1
        self._executing = self._ended_ns = 0
        self._ended_requests = 1
        self._pause_ns = 0.0
        self._in_halves = False

    def on_start(self, requests: int, waiting: int, now_ns: int, busy_ns: int) -> None:
        """A batch of `requests` requests starts, while `waiting` others still wait. `busy_ns` is the processor time
        that the event loop has used so far."""
        self.forget(now_ns)
        if self._busy_ns >= 0:
            cost_ns = max(_MIN_COST_NS, min(_MAX_COST_NS, (busy_ns - self._busy_ns) / requests))
            self.cost_ns += _COST_WEIGHT * (cost_ns - self.cost_ns)
        self._busy_ns = busy_ns
        if not self._executing and self._ended_ns:
            # The pause in which a part of the callers was answered, scaled to all of them.
            pause_ns = (now_ns - self._ended_ns) * max(1.0, self._present / self._ended_requests)
            self._pause_ns += _PAUSE_WEIGHT * (pause_ns - self._pause_ns)
        self._executing += requests
        self._batches += 1
        self._batch_requests += _CROWD_WEIGHT * (requests - self._batch_requests)
        self.alone = self._batch_requests < _CROWD_OF_ONE
        self._present = max(self._executing + waiting, _STILL_THERE * self._present)

    def on_end(self, requests: int, now_ns: int) -> None:
        """A batch of `requests` requests is done."""
        self._executing -= requests
        self._ended_ns = now_ns
        self._ended_requests = requests

    def half_of_all(self, requests: int, rows: int) -> int:
        """The rows of half of the callers lately present, each with as many as in a batch like this."""
        return max(1, round(rows * self._present / (2 * requests)))

    def took(self, base_ns: int, half_ns: int) -> None:
        """Learn what a batch like the last costs besides its rows (0: unknown), and what a batch of half of the callers
        would take."""
        self._in_halves = 0 < base_ns < self._pause_ns and _OVERLAP * self._pause_ns < half_ns

    def forget(self, now_ns: int) -> None:
        """Forget the callers lately present, if that was long ago."""
        if not self._executing and now_ns - self._ended_ns > _FORGOTTEN_NS:
            self._batch_requests = self._present = 1.0
            self.alone = True

    def patience_ns(self, waiting: int, waited_ns: int) -> int:
        """For how long it is worth waiting for the next request, after a wait of `waited_ns` so far (0: not at all)."""
        missing = self.missing(waiting)
        if self.alone or not missing:
            return 0
        part = min(1.0, (self._batch_requests - 1) / (_CROWD_OF_MANY - 1))
        costs = part * part * (_QUIET_COSTS if waiting < self._present else _COSTS_FOR_ONE_MORE)
        left_ns = min(_LONGEST_NS, _COSTS_OF_ALL * self._batch_requests * self.cost_ns) - waited_ns
        return max(0, int(min(costs * self.cost_ns, left_ns)))

    def missing(self, waiting: int) -> int:
        """How many more requests have to come until nobody else is waited for."""
        if self._in_halves and not self._executing:
            return max(0, ceil(self._present / 2) - waiting)
        missing = max(0, ceil(self._present) - waiting)
        return missing if self._batches % _BATCHES_FOR_ONE_MORE else max(1, missing)


class WaitBudget(NamedTuple):
    """What an instance may be kept waiting for: `max_more` besides the `waiting` requests, until `until_ns`."""

    waiting: int
    max_more: int
    until_ns: int


class Turns:
    """When one batcher takes its turns.

    `turn` asks the queue what to do, and does it. `wait_budget` is called once all requests that have arrived are
    submitted; it says what an instance may be kept waiting for (None: nothing). `is_due` says that a turn will be
    taken soon, as when there are announced requests; `is_submitting` that these are just being submitted.
    """

    _loop: asyncio.AbstractEventLoop
    _alarm: Alarm

    def __init__(
        self,
        turn: Callable[[], None],
        wait_budget: Callable[[], WaitBudget | None],
        arrivals: ArrivalModel,
        clock: Clock,
    ) -> None:
        self._turn = turn
        self._wait_budget = wait_budget
        self._arrivals = arrivals
        self._clock = clock
        # Announced requests by what submits them. The last group is `_latest`, which `_submit` submits.
        self._announced: list[tuple[Submit, _Announced]] = []
        self._submit: Submit | None = None
        self._latest: _Announced = []
        # A turn is due since `_due_ns`. Whether the loop's next iteration will check if it can be taken.
        self.is_due = self._is_looking = self.is_submitting = False
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
        """Note that a request was submitted, or will be: once for each."""
        self._came += 1
        if not self.is_due or (self._is_put_off and self._came >= self._missing):
            self.request()

    def request(self) -> None:
        """Have a turn taken once all that is ready on the loop has run: requests that arrive together share a batch."""
        if not self.is_due:
            self.is_due = True
            self._due_ns = 0
        if not self._is_looking:
            self._is_looking = True
            self._loop.call_soon(self._look)

    def take(self) -> None:
        """Take a turn now, due or not: first, what was announced is submitted."""
        self._is_put_off = False
        if self._announced:
            self.is_due = True  # this turn: nobody has to request another
            self.submit_announced()
        self.is_due = False
        if self._announced:
            self.request()
        self._turn()

    # hot path
    def submit_announced(self) -> None:
        """Have all announced requests submitted now, in order of arrival."""
        if not self._announced:
            return
        announced, self._announced = self._announced, []
        self._submit, self._latest = None, []
        self.is_submitting = True
        for submit, requests in announced:
            try:
                submit(requests)
            except Exception:  # noqa: BLE001 - logged; other requests must be submitted
                _log.exception("submitting requests that arrived together failed")
        self.is_submitting = False

    def _look(self) -> None:
        """Take the turn that is due, unless batches lately had several requests and more are likely to arrive right
        away. The sizes and deadlines of those that have arrived are known only once they are submitted."""
        # A turn may have been taken since this look was asked for, so it need not be due any more. If all requests came
        # alone lately, nobody else is waited for, whatever the instances do.
        self._is_looking = self._is_put_off = False
        if self.is_due:
            self.submit_announced()
            if self._arrivals.alone or not self._put_off():
                self.take()

    def _put_off(self) -> bool:
        """Put the turn off, until the alarm or enough requests, if more are worth waiting for. Whether it was."""
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
        self._alarm.set(min(self._until_ns, now_ns + _UNSEEN_NS))
        return True

    def _on_alarm(self) -> None:
        if not self._is_put_off or self._is_looking:
            return
        now_ns = self._clock.now_ns()
        if now_ns < self._until_ns and self._wait_on(now_ns):
            self._alarm.set(min(self._until_ns, now_ns + _UNSEEN_NS))
        elif now_ns >= self._until_ns and self._came:
            self._look()
        else:
            self.take()

    def _wait_on(self, now_ns: int) -> bool:
        """Whether what has arrived meanwhile may be kept waiting, too, if need be for less long than was meant."""
        if not self._came:
            return True
        self.submit_announced()
        budget = self._wait_budget()
        if budget is None or budget.until_ns < now_ns + _MIN_NS:
            return False
        self._until_ns = min(self._until_ns, budget.until_ns)
        return True
