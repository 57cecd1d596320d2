"""A thread that can be used before it gets its long-running work.

Lives here: running things on the thread that later executes batches, as captured graphs belong to their thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")


class WorkerThread:
    """Runs functions one after the other on a thread that starts with the first. RuntimeError if it can't, for now."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def call(self, function: Callable[[], T]) -> T:
        """Run `function` and return or raise its outcome. Blocks, for ever if what `start` was given never ends."""
        return self.submit(function).result()

    def submit(self, function: Callable[[], T]) -> Future[T]:
        """As `call`, but without blocking: the future is completed once `function` has run."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - passed to the caller
                future.set_exception(error)

        self._put(run)
        return future

    def start(self, name: str, function: Callable[[], None]) -> None:
        """Have the thread, from then on named `name`, run `function`, which must not raise. Doesn't block."""
        self._put(function).name = name

    def close(self) -> None:
        """End the thread after it has run everything it was given."""
        self._work.put(None)

    def _put(self, run: Callable[[], object]) -> threading.Thread:
        if self._thread is None:
            # A daemon, so that a hang there doesn't keep the process from ending.
            thread = threading.Thread(target=self._live, name="home", daemon=True)
            thread.start()
            self._thread = thread
        self._work.put(run)
        return self._thread

    def _live(self) -> None:
        while (run := self._work.get()) is not None:
            run()
            # The next one may come much later; what this one holds must not live until then.
            del run
