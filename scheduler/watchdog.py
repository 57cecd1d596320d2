"""Which executions take too long, without an alarm for each.

Lives here: when to look, and whom to tell. Must not: know what executes, or what becomes of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from paceline.scheduler.clock import Clock

T = TypeVar("T")

_LOOKS = 8
"""How often the watchdog looks in a limit. Of lost time, the part before the next look was due isn't noticed."""


class Watchdog(Generic[T]):
    """Calls `on_late` with whatever began `limit_ns` ago and hasn't ended, once. On the event loop.

    Time in which nothing could run, because the process was stopped or its machine paused, doesn't count: the clock
    goes on meanwhile, and the alarm rings late. All that runs is due later by as much. The alarm is always set for some
    time ahead, so whatever hangs is late in the end, however often the alarm is late.
    """

    def __init__(self, limit_ns: int, clock: Clock, on_late: Callable[[T], None]) -> None:
        self._limit_ns = limit_ns
        self._look_ns = max(1, limit_ns // _LOOKS)
        self._clock = clock
        self._on_late = on_late
        # By the clock minus the time lost so far.
        self._due_ns: dict[T, int] = {}
        self._lost_ns = 0
        self._alarm = clock.alarm(self._ring)
        self._rings_ns = 0
        """When the alarm is to ring (0: not at all)."""

    # hot path: 0.6 us with its end and the clock
    def began(self, what: T) -> None:
        now_ns = self._clock.now_ns()
        if 0 < self._rings_ns < now_ns:
            self._lose(now_ns)
        self._due_ns[what] = now_ns - self._lost_ns + self._limit_ns
        if not self._rings_ns:
            self._set_alarm(now_ns)

    # hot path
    def ended(self, what: T) -> None:
        """The alarm stays set: it rings a few times in a limit, and mostly finds that nothing is late."""
        del self._due_ns[what]

    def close(self) -> None:
        self._due_ns.clear()
        self._alarm.close()

    def _set_alarm(self, now_ns: int) -> None:
        self._rings_ns = min(self._lost_ns + min(self._due_ns.values()), now_ns + self._look_ns)
        self._alarm.set(self._rings_ns)

    def _lose(self, now_ns: int) -> None:
        """Count as lost the time by which the alarm is late. Some loops' alarms are early by half a millisecond."""
        self._lost_ns += max(0, now_ns - self._rings_ns)
        self._rings_ns = now_ns

    def _ring(self) -> None:
        now_ns = self._clock.now_ns()
        self._lose(now_ns)
        self._rings_ns = 0
        for what in [one for one, due_ns in self._due_ns.items() if self._lost_ns + due_ns <= now_ns]:
            del self._due_ns[what]
            self._on_late(what)
        if self._due_ns and not self._rings_ns:
            self._set_alarm(now_ns)
