"""When each caller gets its answer: at once, or in the order of arrival.

Lives here: the delivery of results and errors to requests, and telling their sources. The rule: a request ends at most
once, and one that its caller has cancelled is left alone.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter

from paceline.scheduler.request import AnyRequest, succeed_all

__all__ = ["Answers", "OrderedAnswers", "notify"]

_log = logging.getLogger("paceline.scheduler")

_ON_ANSWERS = attrgetter("on_answers")


class Answers:
    """Delivers answers as they come. `notify` then tells the sources of their requests: all that are done together at
    once, which costs the loop less than most of what they do, whereas callbacks of futures cost more."""

    def __init__(self) -> None:
        self._done: list[AnyRequest] = []

    def expect(self, request: AnyRequest) -> None:
        """Learn that a request has arrived."""

    # hot path
    def succeed(self, requests: Sequence[AnyRequest], results: Sequence[object]) -> None:
        """Each of `requests` has its result."""
        succeed_all(requests, results, self._done)

    def fail(self, request: AnyRequest, error: Exception) -> None:
        if not request.ended:
            request.fail(error)
            if request.on_answers is not None:
                self._done.append(request)
                self.notify_soon()

    def cancelled(self, request: AnyRequest) -> None:
        """Learn that the request's caller has gone."""
        if request.on_answers is not None:
            self._done.append(request)
            self.notify_soon()

    # hot path
    def notify(self) -> None:
        """Tell the sources of all requests that ended since the last time, in that order."""
        if self._done:
            done, self._done = self._done, []
            notify(done)

    def notify_soon(self) -> None:
        """Have the event loop call `notify` soon; that does nothing if all have been told by then."""
        asyncio.get_running_loop().call_soon(self.notify)


# hot path
def notify(done: list[AnyRequest]) -> None:
    """Tell the sources of requests that have ended, in this order."""
    for on_answers, group in groupby(done, _ON_ANSWERS):
        requests = list(group)
        for request in requests:
            # It leads back to the request, and no cycle may be left for the garbage collector to find.
            request.on_answers = None
        try:
            if on_answers is not None:
                on_answers(requests)
        except Exception:  # noqa: BLE001 - logged; other sources must be told
            _log.exception("a callback for finished requests failed")


class OrderedAnswers(Answers):
    """Holds an answer back until all requests that arrived before it have theirs, or were cancelled. Nothing is kept of
    cancelled requests, however long the first one takes: a request keeps its tensors alive."""

    def __init__(self) -> None:
        super().__init__()
        # Requests in order of arrival, each with what gives it its answer, once there is one.
        self._waiting: OrderedDict[AnyRequest, Callable[[], None] | None] = OrderedDict()

    def expect(self, request: AnyRequest) -> None:
        self._waiting[request] = None

    def succeed(self, requests: Sequence[AnyRequest], results: Sequence[object]) -> None:
        for request, result in zip(requests, results, strict=True):
            if not request.ended:
                self._waiting[request] = partial(super().succeed, (request,), (result,))
        self._release()

    def fail(self, request: AnyRequest, error: Exception) -> None:
        if not request.ended:
            self._waiting[request] = partial(super().fail, request, error)
        self._release()

    def cancelled(self, request: AnyRequest) -> None:
        self._waiting.pop(request, None)
        super().cancelled(request)
        self._release()

    def _release(self) -> None:
        while self._waiting:
            first, answer = next(iter(self._waiting.items()))
            if answer is None:
                break
            answer()
            del self._waiting[first]
            self.notify_soon()
