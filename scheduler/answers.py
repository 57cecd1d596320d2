"""Who gets an answer when: at once, or in the order of arrival.

Lives here: the delivery of results and errors to futures. The rule: a future is resolved at most once, and one that its
caller has cancelled is left alone.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
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

    def cancelled(self, future: Future) -> None:
        """Its caller has gone."""


class OrderedAnswers(Answers):
    """Holds an answer back until all requests that arrived before it have theirs, or were cancelled. Of those that were
    nothing is kept, however long the first one takes: a request holds on to its tensors."""

    def __init__(self) -> None:
        self._arrivals: OrderedDict[Future, None] = OrderedDict()
        self._results: dict[Future, object] = {}
        self._errors: dict[Future, Exception] = {}

    def expect(self, future: Future) -> None:
        self._arrivals[future] = None

    def succeed(self, future: Future, result: object) -> None:
        if not future.done():
            self._results[future] = result
        self._release()

    def fail(self, future: Future, error: Exception) -> None:
        if not future.done():
            self._errors[future] = error
        self._release()

    def cancelled(self, future: Future) -> None:
        for kept in (self._arrivals, self._results, self._errors):
            kept.pop(future, None)
        self._release()

    def _release(self) -> None:
        while self._arrivals:
            first = next(iter(self._arrivals))
            if first in self._results:
                super().succeed(first, self._results.pop(first))
            elif first in self._errors:
                super().fail(first, self._errors.pop(first))
            else:
                return
            del self._arrivals[first]
