"""What has been idle for too long, where much is idle for a while and little for that long.

Lives here: since when each is idle, and which of them are due. Must not: know what they are, or what follows.
"""

from __future__ import annotations

from itertools import islice, takewhile
from typing import TypeVar

T = TypeVar("T")

_MOST_AT_ONCE = 500
"""Those that are due are given in turns of so many. To end one takes 5 us, and nobody else may wait for long."""
_LATE_NS = 2_000_000
_READING_NS = 100_000_000
"""Whoever looks this late may have stood still. Then those that are due get this much more, once each, in which what
has arrived for them meanwhile is read."""


class Idle(dict[T, int]):
    """What is idle, with the moment since when, in that order; due `limit_ns` later."""

    def __init__(self, limit_ns: int) -> None:
        self._limit_ns = limit_ns
        # Nothing is due before this. It isn't looked for at each change, as the first of a dict from whose beginning
        # many have gone is far to find.
        self._due_ns: int | None = None
        # What is idle since then or longer was looked at in time, or has got more time.
        self._timely_ns = -1

    # hot path
    def due_ns(self) -> int | None:
        """When `due` has to be called: it may give something then, and gives nothing before."""
        if self._due_ns is None and self:
            self._due_ns = self[next(iter(self))] + self._limit_ns
        return self._due_ns

    def due(self, now_ns: int) -> list[T]:
        """What was idle for too long, or much of it: then `due_ns` says that there is more. The caller removes it."""
        if self._due_ns is None or now_ns < self._due_ns:
            return []
        # In time, all that are due are given. Later, only those that were due at the look before; once none of these is
        # left, the others get their time.
        since_ns, until_ns = next(iter(self.values()), now_ns), now_ns - self._limit_ns
        if now_ns <= max(self._due_ns, since_ns + self._limit_ns) + _LATE_NS:
            self._timely_ns = until_ns
        due = [*takewhile(lambda one: self[one] <= self._timely_ns, islice(self, _MOST_AT_ONCE))]
        self._due_ns = None
        if not due and since_ns <= until_ns:
            self._timely_ns, self._due_ns = until_ns, now_ns + _READING_NS
        return due
