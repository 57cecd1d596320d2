"""What `/livez`, `/readyz` and `/` answer, found out on the event loop, since that is what has to be alive.

Lives here: the crossing of threads. Must not: HTTP, or what is asked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future

__all__ = ["LoopProbe"]


class LoopProbe:
    """Asks `question` on `loop`, from any other thread. If the loop doesn't answer within `patience_s`, the answer is a
    text that says so; a probe's `question` returns "" if all is well, else the reason why not."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, question: Callable[[], str] = lambda: "", patience_s: float = 5.0
    ) -> None:
        self._loop = loop
        self._question = question
        self._patience_s = patience_s

    def __call__(self) -> str:
        answer: Future[str] = Future()
        try:
            self._loop.call_soon_threadsafe(lambda: answer.set_result(self._question()))
        except RuntimeError:
            return "the server has ended"
        try:
            return answer.result(self._patience_s)
        except TimeoutError:
            return f"the server's event loop has not answered for {self._patience_s:g} s"
