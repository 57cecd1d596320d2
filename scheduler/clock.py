"""Time as the batcher sees it: one monotonic clock in nanoseconds and one-shot alarms on the event loop.

Event loops round timers to milliseconds (uvloop to the nearest, so up to half of one early), while queue delays are
configured in microseconds. On Linux an alarm is therefore a timerfd that the loop watches; elsewhere it is a loop
timer.

Lives here: the clock's protocols and the system's implementations of them. Must not: know the batcher. The clock of
tests is in `testing`.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import time
from collections.abc import Callable
from typing import Protocol


class Alarm(Protocol):
    """Calls back on the event loop, once per setting."""

    def set(self, at_ns: int) -> None:
        """Ring at `at_ns`, or soon if that has passed; replaces an earlier setting."""

    def clear(self) -> None:
        """Don't ring."""

    def close(self) -> None:
        """Release the alarm's resources."""


class Clock(Protocol):
    """Source of the time, and of alarms."""

    def now_ns(self) -> int:
        """Monotonic nanoseconds."""

    def busy_ns(self) -> int:
        """The processor time that the calling thread has used, in nanoseconds from an arbitrary start."""

    def alarm(self, ring: Callable[[], None]) -> Alarm:
        """An alarm on the running event loop."""


class MonotonicClock:
    """The machine's CLOCK_MONOTONIC. No Python function stands between it and the callers."""

    now_ns = staticmethod(time.monotonic_ns)
    busy_ns = staticmethod(time.thread_time_ns)

    def alarm(self, ring: Callable[[], None]) -> Alarm:
        loop = asyncio.get_running_loop()
        if sys.platform == "linux":
            return _TimerFdAlarm(loop, ring)
        return _LoopAlarm(loop, ring)


class _LoopAlarm:
    """A loop timer; rings up to a millisecond late, never early as far as the loop allows."""

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._loop = loop
        self._ring = ring
        self._handle: asyncio.TimerHandle | None = None

    def set(self, at_ns: int) -> None:
        self.clear()
        delay_ms = -(-max(0, at_ns - time.monotonic_ns()) // 1_000_000)
        self._handle = self._loop.call_later(delay_ms / 1_000, self._ring)

    def clear(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def close(self) -> None:
        self.clear()


class _TimerFdAlarm:
    """A Linux timerfd; rings within the kernel's timer slack, about 50 us. Source: timerfd_create(2).

    Python wraps the calls from 3.13 on; before that they are reached through libc.
    """

    _CLOCK_MONOTONIC = 1
    _TFD_TIMER_ABSTIME = 1
    _TFD_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC

    def __init__(self, loop: asyncio.AbstractEventLoop, ring: Callable[[], None]) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)
        fd = self._libc.timerfd_create(self._CLOCK_MONOTONIC, self._TFD_FLAGS)
        if fd < 0:
            raise OSError(ctypes.get_errno(), "timerfd_create: " + os.strerror(ctypes.get_errno()))
        self._fd = int(fd)
        self._loop = loop
        self._ring = ring
        loop.add_reader(self._fd, self._on_readable)

    def set(self, at_ns: int) -> None:
        # An all-zero value would disarm; one nanosecond after the epoch has passed long ago and rings at once.
        self._arm(max(1, at_ns))

    def clear(self) -> None:
        self._arm(0)

    def close(self) -> None:
        self._loop.remove_reader(self._fd)
        os.close(self._fd)

    def _arm(self, at_ns: int) -> None:
        # A struct itimerspec: seconds and nanoseconds of the interval, which is none, and of the moment.
        value = (ctypes.c_long * 4)(0, 0, *divmod(at_ns, 1_000_000_000))
        if self._libc.timerfd_settime(self._fd, self._TFD_TIMER_ABSTIME, ctypes.byref(value), None) < 0:
            raise OSError(ctypes.get_errno(), "timerfd_settime: " + os.strerror(ctypes.get_errno()))

    def _on_readable(self) -> None:
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return  # set again between the ringing and this callback
        self._ring()
