"""Rests of the event loop's thread while a crowd is waited for.

Lives here: when the thread rests, and for how long. Must not: know what is waited for; that is `turns`.

gRPC's threads bring what has arrived one by one, and each time wake the loop up, which goes round for it. On a machine
whose cores are all in use, a loop that goes round for nothing in between takes from them, and from whoever sends, what
it waits for. Once nothing is left to do, the thread sleeps: what arrives meanwhile is done in one go.
"""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["Rests", "Slept"]

_REST_S = 30e-6
"""About 80 us, by what Linux adds to any sleep."""
_ITERATIONS = 10
"""That a rest counts for."""
_IDLE_BEFORE = 2
_TIMES_SHORTEST = 3
_SHORTEST_NS = 20_000
"""At most; where all iterations are longer, all of them have work."""


class Slept:
    """How long the thread has slept in all, whoever had it do so."""

    __slots__ = ("total_ns",)

    def __init__(self) -> None:
        self.total_ns = 0


_SLEPT = Slept()


class Rests:
    """Called in each iteration of the event loop in which nobody has arrived, it may rest for a moment. `restart` when
    somebody has.

    An iteration without work is told by its length: it takes hardly longer than the shortest one lately, whatever the
    machine. Several of them have to follow each other, as what gRPC has begun goes on in the next iteration. Where
    several wait for their crowds, the rest of one, as `slept` tells, is that of all: what they wait doesn't add up.
    """

    __slots__ = ("_idle", "_looked_ns", "_now_ns", "_seen_ns", "_shortest_ns", "_sleep", "_slept")

    def __init__(
        self, now_ns: Callable[[], int], sleep: Callable[[float], object] = time.sleep, slept: Slept = _SLEPT
    ) -> None:
        self._now_ns = now_ns
        self._sleep = sleep
        self._slept = slept
        self._idle = self._looked_ns = self._seen_ns = 0
        self._shortest_ns = _SHORTEST_NS

    def restart(self) -> None:
        self._idle = 0
        self._looked_ns = self._now_ns()
        self._seen_ns = self._slept.total_ns

    # hot path: in each iteration of the event loop while an instance is kept waiting for many
    def __call__(self) -> int:
        """For how many iterations without work this one counts."""
        now_ns, slept = self._now_ns(), self._slept
        others_ns = slept.total_ns - self._seen_ns
        took_ns = now_ns - self._looked_ns - others_ns
        self._looked_ns, self._seen_ns = now_ns, slept.total_ns
        # It creeps up, so that one odd iteration isn't the measure for ever.
        self._shortest_ns = shortest_ns = min(took_ns, self._shortest_ns + self._shortest_ns // 64 + 1, _SHORTEST_NS)
        if took_ns >= _TIMES_SHORTEST * shortest_ns:
            self._idle = 0
            return 1
        self._idle += 1
        if others_ns:
            return _ITERATIONS
        if self._idle <= _IDLE_BEFORE:
            return 1
        self._sleep(_REST_S)
        self._looked_ns = self._now_ns()
        slept.total_ns += self._looked_ns - now_ns
        self._seen_ns = slept.total_ns
        return _ITERATIONS
