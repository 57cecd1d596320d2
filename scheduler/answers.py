"""When each caller gets its answer: at once, or in the order of arrival.

Lives here: the delivery of results and errors to futures. The rule: a future is resolved at most once, and one that its
caller has cancelled is left alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

from paceline.scheduler.notifying import notify
from paceline.scheduler.pending import Pending

__all__ = ["Answers", "OrderedAnswers"]

Future = Pending[Any, Any]


class Answers:
    """Delivers answers as they come. `notify` then calls the `on_done` of their futures."""

    def __init__(self) -> None:
        self._done: list[Future] = []

    def expect(self, future: Future) -> None:
        """Learn that a request has arrived."""

    # hot path
    def succeed(self, future: Future, result: object) -> None:
        if not future.done():
            future.answered = True
            future.set_result(result)
            if future.on_done is not None:
                self._done.append(future)

    def fail(self, future: Future, error: Exception) -> None:
        if not future.done():
            future.set_exception(error)
            if future.on_done is not None:
                self._done.append(future)
                self.notify_soon(future)

    def cancelled(self, future: Future) -> None:
        """Learn that the future's caller has gone."""

    # hot path
    def notify(self) -> None:
        """Call the `on_done` of all futures that got answers since the last time, in that order."""
        if self._done:
            done, self._done = self._done, []
            notify(done)

    def notify_soon(self, future: Future) -> None:
        """Have the event loop, which is that of `future`, call `notify` soon; that does nothing if everything has
        been notified by then."""
        future.get_loop().call_soon(self.notify)


class OrderedAnswers(Answers):
    """Holds an answer back until all requests that arrived before it have theirs, or were cancelled. Nothing is kept of
    cancelled requests, however long the first one takes: a request keeps its tensors alive."""

    def __init__(self) -> None:
        super().__init__()
        # Futures in order of arrival, each with what gives it its answer, once there is one.
        self._waiting: OrderedDict[Future, Callable[[], None] | None] = OrderedDict()

    def expect(self, future: Future) -> None:
        self._waiting[future] = None

    def succeed(self, future: Future, result: object) -> None:
        if not future.done():
            self._waiting[future] = partial(super().succeed, future, result)
        self._release()

    def fail(self, future: Future, error: Exception) -> None:
        if not future.done():
            self._waiting[future] = partial(super().fail, future, error)
        self._release()

    def cancelled(self, future: Future) -> None:
        self._waiting.pop(future, None)
        self._release()

    def _release(self) -> None:
        while self._waiting:
            first, answer = next(iter(self._waiting.items()))
            if answer is None:
                break
            answer()
            del self._waiting[first]
            self.notify_soon(first)
