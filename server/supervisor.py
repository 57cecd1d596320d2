"""Executions of a model that is being loaded, and a limit for each of them.

Lives here: the thread that they run on, and when one hangs. Must not: know what executes, or close what it uses. The
rule: nothing can interrupt native code, so what hangs stays on its thread, and nobody waits for that.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import wait
from threading import TIMEOUT_MAX
from typing import TypeVar

from backends.home import Home
from server.errors import LoadHangs

__all__ = ["Supervisor"]

T = TypeVar("T")


class Supervisor:
    """Runs functions one after the other, each for at most `limit_ns`; 0: for as long as it takes, where it is called.

    All of a load share one thread, as runtimes keep something for each that executes.
    """

    def __init__(self, limit_ns: int) -> None:
        self._limit_ns = limit_ns
        self._home = Home()

    def __call__(self, function: Callable[[], T]) -> T:
        """What `function` returns or raises. Blocks; raises LoadHangs if it takes too long, and then runs no more."""
        if not self._limit_ns:
            return function()
        future = self._home.submit(function)
        done, _ = wait([future], min(self._limit_ns / 1e9, TIMEOUT_MAX))
        if not done:
            raise LoadHangs(self._limit_ns, future)
        return future.result()

    def close(self) -> None:
        """End the thread when it has run what it was given."""
        self._home.close()
