"""What has to keep away from each other while CUDA graphs are captured.

Lives here: the turns that captures and sessions take, in the whole process. Must not: know what a session is. The rule
is the driver's: while a stream is captured nobody may wait for its whole device, on whichever thread and in whichever
mode (`cuda_context.ignore_captures`); both fail then, the capture and whoever waits. ONNX Runtime waits so when it
opens a session, and cuBLAS when its handles go, which is when a session is closed.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Captures", "captures"]


_LONGEST_S = 600.0
"""What takes longer is on a device that hangs, but for an engine that TensorRT builds."""


class Captures:
    """One capture at a time and nothing beside it, or any number of those that synchronize a device. What has been
    waited for for `longest_s` is no longer: both may fail then, but nobody else waits for ever."""

    def __init__(self, longest_s: float = _LONGEST_S) -> None:
        self._longest_s = longest_s
        self._turn = threading.Condition()
        self._capturing = 0  # the thread that does
        self._synchronizing = self._given_up = 0

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Blocks until nobody else is in here."""
        with self._turn:
            if not self._turn.wait_for(self._is_free, self._longest_s):
                self._given_up = self._synchronizing
            self._capturing = thread = threading.get_ident()
        try:
            yield
        finally:
            with self._turn:
                if self._capturing == thread:
                    self._capturing = 0
                self._turn.notify_all()

    @contextmanager
    def synchronizing(self) -> Iterator[None]:
        """Blocks while another thread captures: for as long as an execution takes. The thread that captures gets here
        by the garbage collector, and had better lose the capture than wait for itself."""
        with self._turn:
            mine = (0, threading.get_ident())
            if not self._turn.wait_for(lambda: self._capturing in mine, self._longest_s):
                self._capturing = 0
            self._synchronizing += 1
        try:
            yield
        finally:
            with self._turn:
                self._synchronizing -= 1
                self._given_up = min(self._given_up, self._synchronizing)
                self._turn.notify_all()

    def _is_free(self) -> bool:
        return not self._capturing and self._synchronizing <= self._given_up


captures = Captures()
"""Those of the process: each load has a backend of its own, the driver is everybody's."""
