"""Calls into CUDA that others in the process have to know of: those that may keep the driver's lock for long, and those
that must not be made while a graph is captured.

Lives here: whether there are any now, and turns. Must not: make calls, or know what a session is.

Long calls. A call that only queues work needs the driver's lock for microseconds, so it is made without releasing the
GIL; but behind a call that loads a kernel, waits for the device to free memory, or waits for a kernel that hangs, it
would stop every Python thread for as long. So whoever makes such a call says so, and while there is one, calls that
queue release the GIL.

Captures. The rule is the driver's: while a stream is captured, nobody may wait for its whole device, on any thread and
in any capture mode (`driver.ignore_captures`); otherwise both fail, the capture and the wait. ONNX Runtime waits like
this when it opens a session; cuBLAS when its handles are destroyed, which is when a session is closed; and either
library may when its handles are created, which is when a thread executes a session for the first time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from time import monotonic_ns

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


_LONGEST_S = 600.0
"""Whatever takes longer is on a hanging device, unless TensorRT is building an engine."""


class Captures:
    """Either one capture at a time and nothing else, or any number of threads that synchronize a device. After
    `longest_s` the wait is given up: both may fail then, but nobody waits for ever. All of it counts as long calls."""

    def __init__(self, longest_s: float = _LONGEST_S) -> None:
        self._longest_s = longest_s
        self._turn = threading.Condition()
        self._capturing = 0  # id of the capturing thread, 0 if none
        self._synchronizing = self._given_up = 0

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Blocks until nobody captures or synchronizes."""
        with self._turn:
            if not self._turn.wait_for(self._is_free, self._longest_s):
                self._given_up = self._synchronizing
            self._capturing = thread = threading.get_ident()
        try:
            with long_calls.making():
                yield
        finally:
            with self._turn:
                if self._capturing == thread:
                    self._capturing = 0
                self._turn.notify_all()

    @contextmanager
    def synchronizing(self) -> Iterator[None]:
        """Blocks while another thread captures, which takes as long as an execution. The capturing thread itself can
        get here through the garbage collector; it then loses the capture rather than wait for itself."""
        with self._turn:
            mine = (0, threading.get_ident())
            if not self._turn.wait_for(lambda: self._capturing in mine, self._longest_s):
                self._capturing = 0
            self._synchronizing += 1
        try:
            with long_calls.making():
                yield
        finally:
            with self._turn:
                self._synchronizing -= 1
                self._given_up = min(self._given_up, self._synchronizing)
                self._turn.notify_all()

    def _is_free(self) -> bool:
        return not self._capturing and self._synchronizing <= self._given_up


captures = Captures()
"""One for the whole process: each load has a backend of its own, but all share the driver."""
