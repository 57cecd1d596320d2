"""What takes longer than it may.

Lives here: when each of several things that run becomes late, and one alarm for all. Must not: know what they are, or
what becomes of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from scheduler.clock import Clock

__all__ = ["Watchdog"]

T = TypeVar("T")


class Watchdog(Generic[T]):
    """Calls `on_late` with whatever began `limit_ns` ago and hasn't ended, once. On the event loop."""

    def __init__(self, limit_ns: int, clock: Clock, on_late: Callable[[T], None]) -> None:
        self._limit_ns = limit_ns
        self._clock = clock
        self._on_late = on_late
        # In the order in which they began, which is that in which they become late.
        self._due_ns: dict[T, int] = {}
        self._alarm = clock.alarm(self._ring)
        self._is_set = False

    # hot path: 0.6 us with its end and the clock
    def began(self, what: T) -> None:
        due_ns = self._clock.now_ns() + self._limit_ns
        self._due_ns[what] = due_ns
        if not self._is_set:
            self._is_set = True
            self._alarm.set(due_ns)

    # hot path
    def ended(self, what: T) -> None:
        """The alarm stays as it is: it rings at most once in a limit, and mostly finds that nothing is late."""
        del self._due_ns[what]

    def close(self) -> None:
        self._due_ns.clear()
        self._alarm.close()

    def _ring(self) -> None:
        self._is_set = False
        now_ns = self._clock.now_ns()
        for what in [one for one, due_ns in self._due_ns.items() if due_ns <= now_ns]:
            del self._due_ns[what]
            self._on_late(what)
        if self._due_ns:
            # Whoever was told may have begun others, which are due later.
            self._is_set = True
            self._alarm.set(next(iter(self._due_ns.values())))
