"""How requests end, and who is told: their callers, at once or in the order of arrival, and the observer.

Lives here: delivering results and errors, telling the requests' sources, and the reports that an observer gets. Must
not: decide how anything ends; that is `batcher`. The rules: a request ends at most once, and one that its caller has
cancelled is left alone. An observer is told of every request once, as dropped or in the report of its batch.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from operator import attrgetter

from paceline.scheduler.errors import ExecutionFailed, ExecutionTimeout, QueueTimeout, SchedulerError
from paceline.scheduler.observer import BatchReport, Drop, Observer
from paceline.scheduler.request import AnyRequest, Batch, BatchFacts, RequestT
from paceline.scheduler.runner import ANSWERED_ELSEWHERE, NO_ANSWER, NoAnswer, Outcome

_log = logging.getLogger("paceline.scheduler")

_ON_ANSWERS = attrgetter("on_answers")

Requests = Sequence[AnyRequest]

OnLeft = Callable[[Requests, Drop | None, bool], None]
"""Told of requests that a batcher had taken and has done with, each once, before their sources are. None: they were
executed, whether that succeeded or not and whether somebody still waited for it; if the last is true, it took too long,
and nothing that may still come of it counts. It mustn't raise."""


FailedNote = Callable[[AnyRequest, BaseException | None], str]
"""What the text of an execution's error ends with for a request; None: it took too long."""


def no_note(request: AnyRequest, error: BaseException | None) -> str:
    return ""


@dataclass(eq=False)
class Answers:
    """Delivers answers as they come, and reports to `observer`. What that raises is logged: no request may be lost
    because an observer can't count it.

    `notify` tells the sources of requests: all that are done together at once, which costs the loop less than most of
    what they do, whereas callbacks of futures cost more. `failed_note` says what errors of executions end with."""

    observer: Observer | None = None
    on_left: OnLeft | None = None
    failed_note: FailedNote = no_note
    _done: list[AnyRequest] = field(init=False, default_factory=list)

    def expect(self, request: AnyRequest) -> None:
        """Learn that a request has arrived."""

    # hot path
    def succeed(self, requests: Requests, results: Sequence[object]) -> None:
        """Each of `requests` has its result, unless it has ended by now."""
        for request, result in zip(requests, results, strict=True):
            if not request.ended:
                request.succeed(result)
                if request.on_answers is not None:
                    self._done.append(request)

    def fail(self, request: AnyRequest, error: Exception) -> None:
        if not request.ended:
            request.fail(error)
            self._tell_soon(request)

    def elsewhere(self, request: AnyRequest) -> None:
        """Learn that a request was executed, and is answered by other ways."""

    def cancelled(self, request: AnyRequest, *, waited: bool = False) -> None:
        """Learn that the request's caller has gone. `waited`: it was still in the queue, which it has left."""
        if waited:
            self.count(Drop.CANCELLED)
            self._left((request,), Drop.CANCELLED)
        self._tell_soon(request)

    def count(self, drop: Drop) -> None:
        """Report that a request leaves without an execution, or doesn't enter."""
        if self.observer is not None:
            try:
                self.observer.on_drop(drop)
            except Exception:  # noqa: BLE001 - logged; requests must not be affected
                _log.exception("recording a dropped request failed; metrics may lack it")

    def drop(self, request: AnyRequest, drop: Drop, error: SchedulerError) -> None:
        """Report that a request leaves without a result from an execution."""
        self.count(drop)
        self.fail(request, error)
        self._left((request,), drop)

    def expire(self, request: AnyRequest, now_ns: int) -> None:
        """Drop a request that has waited for longer than it may."""
        error = QueueTimeout(now_ns - request.arrived_ns, by_deadline=request.deadline_ns <= now_ns)
        self.drop(request, Drop.EXPIRED, error)

    def give_up(self, requests: Iterable[AnyRequest], drop: Drop, error: Callable[[], SchedulerError]) -> None:
        """Drop `requests`, each with an error of its own; those cancelled by now count as that, and get none."""
        for request in requests:
            self.drop(request, Drop.CANCELLED if request.ended else drop, error())

    def still_wanted(self, requests: Sequence[RequestT]) -> list[RequestT]:
        """The requests whose callers still wait; the others are reported as cancelled."""
        wanted = [request for request in requests if not request.ended]
        if len(wanted) < len(requests):
            unwanted = [request for request in requests if request.ended]
            for _ in unwanted:
                self.count(Drop.CANCELLED)
            self._left(unwanted, Drop.CANCELLED)
        return wanted

    def more(self, batch: Batch[AnyRequest], results: Sequence[object]) -> None:
        """Requests of a batch that still executes have answers that aren't their last."""
        for request, result in zip(batch.requests, results, strict=True):
            if result is not NO_ANSWER and not request.ended:
                request.value = result
                if request.on_answers is not None:
                    self._done.append(request)
        self.notify()

    # hot path
    def end(self, batch: Batch[AnyRequest], outcome: Outcome[object], failed: Requests) -> None:
        """Report the end of a batch: a result for each request or, for those that `failed` for good, the error."""
        try:
            unfinished = self._answer(batch, outcome) if outcome.executed is not None else ()
            for request in failed:
                self.fail(request, _failure(outcome.error, self.failed_note(request, outcome.error)))
            self._report(batch, outcome, failed, unfinished)
            self._left(batch.requests if outcome.executed is not None else failed)
        finally:
            self.notify()

    def time_out(self, batch: Batch[AnyRequest], limit_ns: int, now_ns: int) -> None:
        """Report that a batch executes for longer than it may; nobody waits for its result any more."""
        outcome: Outcome[object] = Outcome(now_ns - limit_ns, now_ns, error=ExecutionTimeout(limit_ns))
        try:
            for request in batch.requests:
                self.fail(request, ExecutionTimeout(limit_ns, self.failed_note(request, None)))
            self._report(batch, outcome, batch.requests)
            self._left(batch.requests, given_up=True)
        finally:
            self.notify()

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
    def _left(self, requests: Requests, drop: Drop | None = None, *, given_up: bool = False) -> None:
        if self.on_left is not None and requests:
            self.on_left(requests, drop, given_up)

    def _tell_soon(self, request: AnyRequest) -> None:
        if request.on_answers is not None:
            self._done.append(request)
            self.notify_soon()

    def _answer(self, batch: Batch[AnyRequest], outcome: Outcome[object]) -> Requests:
        """Give requests their results. Returns those that need another execution."""
        started_ns, executed = outcome.started_ns, outcome.executed
        assert executed is not None
        duration_ns = outcome.finished_ns - started_ns
        facts = BatchFacts(
            batch.number, batch.rows, batch.padded_rows, 0, duration_ns, started_ns, executed, batch.sizes
        )
        requests: Requests = batch.requests
        results: Sequence[object] = executed.results
        unfinished: list[AnyRequest] = []
        for request in requests:
            request.batch_facts = facts
            request.waited_ns = started_ns - request.arrived_ns
        if any(isinstance(result, (Exception, NoAnswer)) for result in results):
            pairs = []
            for request, result in zip(requests, results, strict=True):
                if isinstance(result, Exception):
                    request.refused = True
                    self.fail(request, result)
                elif result is ANSWERED_ELSEWHERE:
                    self.elsewhere(request)
                elif result is not NO_ANSWER:
                    pairs.append((request, result))
                elif not request.ended:
                    request.value = NO_ANSWER
                    unfinished.append(request)
                    if request.on_answers is not None:
                        self._done.append(request)
            requests, results = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        self.succeed(requests, results)
        return unfinished

    def _report(
        self, batch: Batch[AnyRequest], outcome: Outcome[object], failed: Requests, unfinished: Requests = ()
    ) -> None:
        """Report a batch. To be done once its answers are delivered: a request that is cancelled by then gets none."""
        if self.observer is None:
            return
        waits_ns: list[int] = []
        refused = cancelled = 0
        goes_on = {*unfinished}
        for request in failed if outcome.error else batch.requests:
            if request in goes_on:
                continue
            if not request.answered and request.cancelled():
                cancelled += 1
            elif request.refused or outcome.error:
                refused += 1
            else:
                waits_ns.append(request.waited_ns)
        report = BatchReport(
            rows=batch.rows,
            padded_rows=batch.padded_rows,
            waits_ns=waits_ns,
            started_ns=outcome.started_ns,
            finished_ns=outcome.finished_ns,
            execution=outcome.executed,
            error=outcome.error,
            failed=refused,
            cancelled=cancelled,
            number=batch.number,
            requests=batch.requests,
            sizes=batch.sizes,
            elements=batch.elements,
            unfinished_rows=sum([request.rows for request in unfinished]),
        )
        try:
            self.observer.on_batch(report)
        except Exception:  # noqa: BLE001 - logged; requests must not be affected
            _log.exception("recording a batch failed; metrics may lack it")


@dataclass(eq=False)
class OrderedAnswers(Answers):
    """Holds an answer back until all requests that arrived before it have theirs, or were cancelled. Nothing is kept of
    cancelled requests, however long the first one takes: a request keeps its tensors alive."""

    _waiting: OrderedDict[AnyRequest, Callable[[], None] | None] = field(init=False, default_factory=OrderedDict)
    """Requests in order of arrival, each with what gives it its answer, once there is one."""

    def expect(self, request: AnyRequest) -> None:
        self._waiting[request] = None

    def succeed(self, requests: Requests, results: Sequence[object]) -> None:
        for request, result in zip(requests, results, strict=True):
            if not request.ended:
                self._waiting[request] = partial(super().succeed, (request,), (result,))
        self._release()

    def fail(self, request: AnyRequest, error: Exception) -> None:
        if not request.ended:
            self._waiting[request] = partial(super().fail, request, error)
        self._release()

    def elsewhere(self, request: AnyRequest) -> None:
        self._waiting.pop(request, None)
        self._release()

    def cancelled(self, request: AnyRequest, *, waited: bool = False) -> None:
        self._waiting.pop(request, None)
        super().cancelled(request, waited=waited)
        self._release()

    def _release(self) -> None:
        while self._waiting:
            first, answer = next(iter(self._waiting.items()))
            if answer is None:
                break
            answer()
            del self._waiting[first]
            self.notify_soon()


# hot path
def notify(done: list[AnyRequest]) -> None:
    """Tell the sources of requests that have another answer or have ended, in this order."""
    for on_answers, group in groupby(done, _ON_ANSWERS):
        requests = list(group)
        for request in requests:
            if request.ended:
                # It leads back to the request, and no cycle may be left for the garbage collector to find.
                request.on_answers = None
        try:
            if on_answers is not None:
                on_answers(requests)
        except Exception:  # noqa: BLE001 - logged; other sources must be told
            _log.exception("a callback for finished requests failed")


def _failure(cause: BaseException | None, note: str) -> ExecutionFailed:
    """An exception for one request of a failed batch; each gets its own, as tracebacks grow on shared ones."""
    try:
        text = str(cause)
    except Exception:  # noqa: BLE001 - the requests must get an answer
        _log.exception("an instance raised an error whose text can't be read")
        text = ""
    failed = ExecutionFailed(f"{text or type(cause).__name__}{note}")
    failed.__cause__ = cause
    return failed
