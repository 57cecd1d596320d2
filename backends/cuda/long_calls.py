"""Calls into CUDA that may keep the driver's lock for long, in the whole process.

Lives here: whether there are any now. Must not: make calls, or wait. The rule: a call that only queues work needs that
lock for microseconds, so it is made without releasing the GIL; but behind a call that loads a kernel, waits for the
device to free memory, or waits for a kernel that hangs, it would stop every Python thread for as long. So whoever makes
such a call says so, and while there is one, calls that queue release the GIL.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from time import monotonic_ns

__all__ = ["LongCalls", "long_calls"]

_OVERDUE_NS = 10**9
"""Executions rarely take so long; beside one that does, batches are half a millisecond slower."""


class LongCalls:
    """How many long calls are `expected` to be in progress, and whether any wait has become `overdue`: one that has
    lasted for `overdue_ns`. Both are for reading."""

    __slots__ = ("_lock", "_now_ns", "_overdue_ns", "_since_ns", "expected", "overdue")

    def __init__(self, overdue_ns: int = _OVERDUE_NS, now_ns: Callable[[], int] = monotonic_ns) -> None:
        self._overdue_ns = overdue_ns
        self._now_ns = now_ns
        # Reentrant: the garbage collector may free memory at any time, which is a long call.
        self._lock = threading.RLock()
        self._since_ns: dict[int, int] = {}  # by the thread that waits
        self.expected = 0
        self.overdue = False

    @contextmanager
    def making(self) -> Iterator[None]:
        """To be made within: a call that may be long."""
        with self._lock:
            self.expected += 1
        try:
            yield
        finally:
            with self._lock:
                self.expected -= 1

    # hot path: these three together 1 us per batch
    def wait_began(self) -> None:
        """The calling thread begins to wait for a device, which is long only if that hangs."""
        self._since_ns[threading.get_ident()] = self._now_ns()

    def wait_ended(self) -> None:
        self._since_ns.pop(threading.get_ident(), None)

    def look(self) -> None:
        """See whether any wait is overdue; every thread does before each batch, as a wait can't say so by itself."""
        # No lock: if two look at once, the earlier result may stay, until the next one looks.
        self.overdue = min(self._since_ns.values(), default=inf) <= self._now_ns() - self._overdue_ns


long_calls = LongCalls()
"""One for the whole process: every load has an accelerator of its own, but all share the driver."""
