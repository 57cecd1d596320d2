"""One thread per model instance.

Lives here: the border between the event loop and blocking code. The rule: whatever the instance does, `done` is called
on the loop exactly once per batch handed over, and nothing else crosses threads.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

__all__ = ["Done", "Executed", "Outcome", "Runner", "ThreadRunner"]

P = TypeVar("P")
P_contra = TypeVar("P_contra", contravariant=True)
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)


class Executed(Protocol[R_co]):
    """What an instance returns: at least the results, one per payload and in their order. An exception in the place of
    a result is for that payload alone."""

    @property
    def results(self) -> Sequence[R_co | Exception]: ...


@dataclass(frozen=True, slots=True)
class Outcome(Generic[R]):
    """How one execution went: either `executed` or `error` is set. Times are monotonic nanoseconds."""

    started_ns: int
    finished_ns: int
    executed: Executed[R] | None = None
    error: BaseException | None = None


Done = Callable[[Outcome[R]], None]


class Runner(Protocol[P_contra, R]):
    """Executes one batch at a time."""

    def start(self) -> None:
        """Get ready, on the running event loop."""

    def run(self, payloads: Sequence[P_contra], padded_rows: int, done: Done[R]) -> None:
        """Execute `payloads` as one batch of `padded_rows` rows; `done` is called later on the loop. Never before the
        previous one's `done`."""

    def stop(self) -> None:
        """Finish what runs and end. Doesn't wait."""


class ThreadRunner(Generic[P, R]):
    """Runs `execute(payloads, padded_rows)`, which may block, on a thread of its own."""

    def __init__(self, name: str, execute: Callable[[Sequence[P], int], Executed[R]]) -> None:
        self._execute = execute
        self._work: SimpleQueue[tuple[Sequence[P], int, Done[R]] | None] = SimpleQueue()
        # A daemon: an instance that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._loop_forever, name=name, daemon=True)
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def run(self, payloads: Sequence[P], padded_rows: int, done: Done[R]) -> None:
        self._work.put((payloads, padded_rows, done))

    def stop(self) -> None:
        self._work.put(None)

    def _loop_forever(self) -> None:
        while (item := self._work.get()) is not None:
            payloads, padded_rows, done = item
            outcome = self._run_one(payloads, padded_rows)
            assert self._loop is not None
            if self._loop.is_closed():
                return
            self._loop.call_soon_threadsafe(done, outcome)
            # The next batch may be long in coming; its predecessor's tensors must not wait here for it.
            del item, payloads, done, outcome

    def _run_one(self, payloads: Sequence[P], padded_rows: int) -> Outcome[R]:
        started_ns = time.monotonic_ns()
        try:
            executed = self._execute(payloads, padded_rows)
            if len(executed.results) != len(payloads):
                raise RuntimeError(f"instance returned {len(executed.results)} results for {len(payloads)} requests")
        except BaseException as error:  # noqa: BLE001 - whatever it is, the waiting requests are owed an answer
            return Outcome(started_ns, time.monotonic_ns(), error=error)
        return Outcome(started_ns, time.monotonic_ns(), executed=executed)
