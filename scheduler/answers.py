"""Who gets an answer when: at once, or in the order of arrival.

Lives here: the delivery of results and errors to futures. The rule: a future is resolved at most once, and one that its
caller has cancelled is left alone.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

__all__ = ["Answers", "OrderedAnswers"]

Future = asyncio.Future[Any]


class Answers:
    """Hands answers over as they come."""

    def expect(self, future: Future) -> None:
        """A request has arrived."""

    def succeed(self, future: Future, result: object) -> None:
        if not future.done():
            future.set_result(result)

    def fail(self, future: Future, error: Exception) -> None:
        if not future.done():
            future.set_exception(error)

    def release(self) -> None:
        """Somebody was cancelled: whoever waited for that need wait no longer."""


class OrderedAnswers(Answers):
    """Holds an answer back until all requests that arrived before it have theirs, or were cancelled."""

    def __init__(self) -> None:
        self._arrivals: deque[Future] = deque()
        self._results: dict[Future, object] = {}
        self._errors: dict[Future, Exception] = {}

    def expect(self, future: Future) -> None:
        self._arrivals.append(future)

    def succeed(self, future: Future, result: object) -> None:
        # One that was cancelled may be out of the line already; nobody would ever fetch what is kept for it.
        if not future.done():
            self._results[future] = result
        self.release()

    def fail(self, future: Future, error: Exception) -> None:
        if not future.done():
            self._errors[future] = error
        self.release()

    def release(self) -> None:
        arrivals = self._arrivals
        while arrivals:
            first = arrivals[0]
            if first in self._results:
                super().succeed(first, self._results.pop(first))
            elif first in self._errors:
                super().fail(first, self._errors.pop(first))
            elif not first.done():
                return
            arrivals.popleft()
