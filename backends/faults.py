"""Switches that make a `MemoryModel` fail, and a gate that holds it, for tests of the server above.

Lives here: state behind a lock, set by a test and acting on executions on other threads. Must not: a wait without a
limit, so that a test that goes wrong fails instead of hanging.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

import numpy as np

from paceline.backends.errors import ExecutionError
from paceline.backends.spec import Tensors

__all__ = ["Faults", "Gate", "change_datatype", "lose_output", "lose_row"]

Distortion = Callable[[Tensors], Tensors]


def lose_row(outputs: Tensors) -> Tensors:
    """Every output without its last row."""
    return [output[:-1] for output in outputs]


def lose_output(outputs: Tensors) -> Tensors:
    """All outputs but the last."""
    return outputs[:-1]


def change_datatype(outputs: Tensors) -> Tensors:
    """Every output as complex numbers, which no datatype of the protocol is."""
    return [np.zeros(output.shape, np.complex64) for output in outputs]


class Faults:
    """What goes wrong, and in which executions. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._errors: deque[Exception] = deque()
        self._distortions: deque[Distortion] = deque()
        self._conditions: list[tuple[Callable[[Tensors], bool], Exception]] = []

    def raise_next(self, error: Exception, times: int = 1) -> None:
        """The next `times` executions raise `error` instead of computing."""
        with self._lock:
            self._errors.extend([error] * times)

    def raise_when(self, condition: Callable[[Tensors], bool], error: Exception) -> None:
        """From now on executions raise `error` if `condition` holds for their stacked inputs."""
        with self._lock:
            self._conditions.append((condition, error))

    def distort_next(self, distortion: Distortion, times: int = 1) -> None:
        """The next `times` executions that compute return `distortion(outputs)`."""
        with self._lock:
            self._distortions.extend([distortion] * times)

    def clear(self) -> None:
        """Remove all faults."""
        with self._lock:
            self._errors.clear()
            self._distortions.clear()
            self._conditions.clear()

    def before(self, inputs: Tensors) -> None:
        """Raise what this execution is to raise (called by the model)."""
        with self._lock:
            error = self._errors.popleft() if self._errors else None
            conditions = list(self._conditions)
        if error is not None:
            raise error
        for condition, consequence in conditions:
            if condition(inputs):
                raise consequence

    def after(self, outputs: Tensors) -> Tensors:
        """`outputs`, distorted if this execution is due for it (called by the model)."""
        with self._lock:
            distortion = self._distortions.popleft() if self._distortions else None
        return outputs if distortion is None else distortion(outputs)


class Gate:
    """Holds executions at their beginning. Open at first; thread-safe.

    `hold_limit_s` is how long an execution waits before it gives up with an ExecutionError.
    """

    def __init__(self, hold_limit_s: float = 60.0) -> None:
        self._hold_limit_s = hold_limit_s
        self._changed = threading.Condition()
        self._open = True
        self._passes = 0
        self._entered = 0

    @property
    def entered(self) -> int:
        """How many executions have reached the gate so far, whether it held them or not."""
        return self._entered

    def close(self) -> None:
        """Hold executions that arrive from now on."""
        with self._changed:
            self._open = False
            self._passes = 0

    def open(self) -> None:
        """Let all held executions go, and all that arrive."""
        with self._changed:
            self._open = True
            self._changed.notify_all()

    def release(self, count: int = 1) -> None:
        """Let `count` executions through a closed gate: those held first, then those that arrive."""
        with self._changed:
            self._passes += count
            self._changed.notify_all()

    def wait_entered(self, count: int, timeout_s: float = 60.0) -> None:
        """Block until `count` executions have reached the gate since it was made; TimeoutError if they don't.

        Not for an event loop's thread, which would keep what it waits for from being sent: use `asyncio.to_thread`.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self._entered >= count, timeout_s):
                raise TimeoutError(f"expected {count} executions within {timeout_s} s, got {self._entered}")

    def enter(self) -> None:
        """Wait until let through (called by the model)."""
        with self._changed:
            self._entered += 1
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._open or self._passes > 0, self._hold_limit_s):
                raise ExecutionError(f"held at a closed gate for {self._hold_limit_s} s")
            if not self._open:
                self._passes -= 1
