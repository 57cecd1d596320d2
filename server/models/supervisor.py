"""Executions of a model that is being loaded, and a time limit for each of them.

Lives here: the thread that they run on, and when one hangs. Must not: know what executes, or close what it uses. The
rule: nothing can interrupt native code, so a hanging execution stays on its thread, and nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from threading import TIMEOUT_MAX
from typing import TypeVar

from paceline.backends.worker_thread import WorkerThread
from paceline.server.errors import LoadHangs

__all__ = ["Supervisor"]

T = TypeVar("T")

_MIN_NS = 60 * 10**9
"""First executions take longer than any that follow: memory is allocated, algorithms are chosen, code is compiled."""

_LOOKS = 8
"""Waits per limit. While the whole process is stopped, at most one of them expires; the others are still to come."""


class Supervisor:
    """Runs functions one after the other, each for at most `limit_ns`, or a minute if that is more; 0: without limit,
    on the caller's thread.

    All functions of a load share one thread, as runtimes keep something for each thread that executes.
    """

    def __init__(self, limit_ns: int) -> None:
        self._limit_ns = max(limit_ns, _MIN_NS) if limit_ns else 0
        self._home = WorkerThread()

    def __call__(self, function: Callable[[], T]) -> T:
        """What `function` returns or raises. Blocks; raises LoadHangs if it takes too long, and then runs no more."""
        if not self._limit_ns:
            return function()
        future = self._home.submit(function)
        if not any(self._ends(future) for _ in range(_LOOKS)):
            raise LoadHangs(self._limit_ns, future)
        return future.result()

    def _ends(self, future: Future[T]) -> bool:
        done, _ = wait([future], min(self._limit_ns / _LOOKS / 1e9, TIMEOUT_MAX))
        return bool(done)

    def close(self) -> None:
        """End the thread once it has run what it was given."""
        self._home.close()
