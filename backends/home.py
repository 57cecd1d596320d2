"""A thread that is known before it has its work.

Lives here: what has to happen on the very thread that later executes batches, as captured graphs belong to the thread
that captured them. Must not: know what that is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

__all__ = ["Home"]

T = TypeVar("T")


class Home:
    """Runs functions one after the other, all on one thread, which starts with the first. If it can't, that raises
    RuntimeError, and the next one is the first."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def call(self, function: Callable[[], T]) -> T:
        """What `function` returns or raises. Blocks; behind a function of `start` that never ends, for ever."""
        return self.submit(function).result()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """The same without blocking: what is told once it has run."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - it is the caller's
                future.set_exception(error)

        self._put(run)
        return future

    def start(self, name: str, function: Callable[[], None]) -> None:
        """Have the thread, called `name` from then on, run `function`, which raises nothing. Doesn't block."""
        self._put(function).name = name

    def close(self) -> None:
        """End the thread when it has run what it was given."""
        self._work.put(None)

    def _put(self, run: Callable[[], object]) -> threading.Thread:
        if self._thread is None:
            # A daemon: what hangs there must not keep the process from ending.
            thread = threading.Thread(target=self._live, name="home", daemon=True)
            thread.start()
            self._thread = thread
        self._work.put(run)
        return self._thread

    def _live(self) -> None:
        while (run := self._work.get()) is not None:
            run()
            # What it did may be long ago when the next comes; what it held must not wait for that.
            del run
