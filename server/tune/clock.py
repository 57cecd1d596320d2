"""The time of a simulation: it passes only where something takes time.

Lives here: what becomes due when, and the event loop that does it. Must not: know what that is. Everything that the
event loop does takes its turn: what becomes due while it handles a request is late by that. Whoever calls may be on any
loop, of which only turns are used, never the time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count
from random import Random

from paceline.server.tuning import SWITCH_INTERVAL_S

__all__ = ["ARRIVAL", "END", "SENDING", "SimulatedClock"]

ALARM, END, ARRIVAL, SENDING = range(4)
"""What is due at the same moment is done in this order."""
_WAIT_NS = SWITCH_INTERVAL_S * 1e9
"""A wait of the event loop, on average, if there is one: whoever computes in Python keeps the lock for so long."""


_Due = tuple[int, int, int, Callable[[int], None]]
"""When, of which kind, the how manyth that was asked for, and what to do then."""


class SimulatedClock:
    """A time in which only what is due happens, and only what takes time lets it pass."""

    def __init__(self, random: Random) -> None:
        self._random = random
        self._now_ns = 0
        self._busy_ns = 0
        self._arrivals: list[_Due] = []
        self._others: list[_Due] = []
        self._numbers = count()

    def now_ns(self) -> int:
        return self._now_ns

    def busy_ns(self) -> int:
        return self._busy_ns

    def alarm(self, ring: Callable[[], None]) -> _Alarm:
        return _Alarm(self, ring)

    def at(self, at_ns: int, kind: int, do: Callable[[int], None]) -> None:
        """Call `do` with `at_ns` then, or as soon after that as there is time."""
        heappush(self._arrivals if kind == ARRIVAL else self._others, (at_ns, kind, next(self._numbers), do))

    def spend(self, ns: float, waits: float) -> None:
        """Let the event loop compute for so long, and wait meanwhile, so many times as long on average."""
        self._now_ns += round(ns)
        self._busy_ns += round(ns)
        share = min(1.0, ns * waits / _WAIT_NS)
        if self._random.random() < share:
            self._now_ns += round(self._random.expovariate(share / (ns * waits)))

    async def go_on(self) -> None:
        """Do what is due next, and what follows at once. Something has to be."""
        due = [self._others, self._arrivals]
        self._now_ns = until_ns = max(self._now_ns, min(heap[0][0] for heap in due if heap))
        # An iteration of the loop: what becomes due while this is done is left for the next one. So are all arrivals
        # after one that took time: gRPC hands them over one per iteration. Others don't look at those that wait.
        while ready := [heap for heap in due if heap and heap[0][0] <= until_ns]:
            at_ns, kind, _, do = heappop(min(ready))
            began_ns = self._now_ns
            do(at_ns)
            if kind == ARRIVAL and self._now_ns > began_ns:
                due = [self._others]
        await asyncio.sleep(0)


class _Alarm:
    def __init__(self, clock: SimulatedClock, ring: Callable[[], None]) -> None:
        self._clock, self._ring = clock, ring
        self._at_ns = -1

    def set(self, at_ns: int) -> None:
        self._at_ns = max(at_ns, self._clock.now_ns())
        self._clock.at(self._at_ns, ALARM, self._on_due)

    def clear(self) -> None:
        self._at_ns = -1

    close = clear

    def _on_due(self, at_ns: int) -> None:
        if at_ns == self._at_ns:  # it wasn't set anew since
            self._at_ns = -1
            self._ring()
