"""What `/livez` and `/readyz` answer, found out on the event loop, since that is what has to be alive.

Lives here: the crossing of threads. Must not: HTTP, or what readiness is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future

__all__ = ["LoopProbe"]


class LoopProbe:
    """Asks `why_not` on `loop`, from any other thread: "" if all is well, else the reason why not. A loop that doesn't
    answer within `patience_s` is a reason too."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, why_not: Callable[[], str] = lambda: "", patience_s: float = 5.0
    ) -> None:
        self._loop = loop
        self._why_not = why_not
        self._patience_s = patience_s

    def __call__(self) -> str:
        answer: Future[str] = Future()
        try:
            self._loop.call_soon_threadsafe(lambda: answer.set_result(self._why_not()))
        except RuntimeError:
            return "the server has ended"
        try:
            return answer.result(self._patience_s)
        except TimeoutError:
            return f"the server's event loop has not answered for {self._patience_s:g} s"
