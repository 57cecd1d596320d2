"""Mutual exclusion of what must not happen while CUDA graphs are captured.

Lives here: the turns that captures and sessions take, in the whole process. Must not: know what a session is. The rule
is the driver's: while a stream is captured, nobody may wait for its whole device, on any thread and in any capture mode
(`cuda.context.ignore_captures`); otherwise both fail, the capture and the wait. ONNX Runtime waits like this when it
opens a session; cuBLAS when its handles are destroyed, which is when a session is closed; and either library may when
its handles are created, which is when a thread executes a session for the first time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.backends.cuda.long_calls import long_calls

__all__ = ["Captures", "captures"]


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
