"""What callers and observers are told: how each request ended, and each batch that ended.

Lives here: creating these reports and handing them over. Must not: decide how anything ends; that is `batcher`. The
rule: an observer is told of every request once, as dropped or in the report of its batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence

from paceline.scheduler.answers import Answers
from paceline.scheduler.errors import ExecutionFailed, ExecutionTimeout, QueueTimeout, SchedulerError
from paceline.scheduler.executing import Batch
from paceline.scheduler.observer import BatchReport, Drop, Observer
from paceline.scheduler.request import AnyRequest, BatchFacts
from paceline.scheduler.runner import Outcome

__all__ = ["Delivery"]

_log = logging.getLogger("paceline.scheduler")

Requests = Sequence[AnyRequest]


class Delivery:
    """Delivers to requests, by way of `answers`, and to `observer`."""

    def __init__(self, answers: Answers, observer: Observer) -> None:
        self._answers = answers
        self._observer = observer

    def drop(self, request: AnyRequest, drop: Drop, error: SchedulerError) -> None:
        """Report that a request leaves without a result from an execution."""
        self._observer.on_drop(drop)
        self.fail(request, error)

    def expire(self, request: AnyRequest, now_ns: int) -> None:
        """Drop a request that has waited for longer than it may."""
        error = QueueTimeout(now_ns - request.arrived_ns, by_deadline=request.deadline_ns <= now_ns)
        self.drop(request, Drop.EXPIRED, error)

    def give_up(self, requests: Iterable[AnyRequest], drop: Drop, error: Callable[[], SchedulerError]) -> None:
        """Drop `requests`, each with an error of its own; those that were cancelled by now count as cancelled, and get
        none."""
        for request in requests:
            self.drop(request, Drop.CANCELLED if request.ended else drop, error())

    def still_wanted(self, requests: Requests) -> Requests:
        """The requests whose callers still wait; the others are reported as cancelled."""
        wanted = [request for request in requests if not request.ended]
        for _ in range(len(requests) - len(wanted)):
            self._observer.on_drop(Drop.CANCELLED)
        return wanted

    def fail(self, request: AnyRequest, error: SchedulerError) -> None:
        self._answers.fail(request, error)

    # hot path
    def end(self, batch: Batch[AnyRequest], outcome: Outcome[object], failed: Requests) -> None:
        """Report the end of a batch: with a result for each request or, if there is an error, with that for those that
        `failed` for good."""
        try:
            if outcome.executed is not None:
                self._answer(batch, outcome)
            for request in failed:
                self.fail(request, _failure(outcome.error))
            self._observer.on_batch(_report(batch, outcome, failed))
        finally:
            self._answers.notify()

    def time_out(self, batch: Batch[AnyRequest], limit_ns: int, now_ns: int) -> None:
        """Report that a batch executes for longer than it may; nobody waits for its result any more."""
        outcome: Outcome[object] = Outcome(now_ns - limit_ns, now_ns, error=ExecutionTimeout(limit_ns))
        try:
            for request in batch.requests:
                self.fail(request, ExecutionTimeout(limit_ns))
            self._observer.on_batch(_report(batch, outcome, batch.requests))
        finally:
            self._answers.notify()

    def _answer(self, batch: Batch[AnyRequest], outcome: Outcome[object]) -> None:
        started_ns, executed = outcome.started_ns, outcome.executed
        assert executed is not None
        duration_ns = outcome.finished_ns - started_ns
        facts = BatchFacts(batch.number, batch.rows, batch.padded_rows, 0, duration_ns, started_ns, executed)
        requests: Requests = batch.requests
        results: Sequence[object] = executed.results
        for request in requests:
            request.batch_facts = facts
            request.waited_ns = started_ns - request.arrived_ns
        if any(isinstance(result, Exception) for result in results):
            pairs = [*zip(requests, results, strict=True)]
            for request, error in pairs:
                if isinstance(error, Exception):
                    request.refused = True
                    self._answers.fail(request, error)
            pairs = [pair for pair in pairs if not isinstance(pair[1], Exception)]
            requests, results = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        self._answers.succeed(requests, results)


def _failure(cause: BaseException | None) -> ExecutionFailed:
    """An exception for one request of a failed batch; each gets its own, as tracebacks grow on shared ones."""
    try:
        text = str(cause)
    except Exception:  # noqa: BLE001 - the requests must get an answer
        _log.exception("an instance raised an error whose text can't be read")
        text = ""
    failed = ExecutionFailed(text or type(cause).__name__)
    failed.__cause__ = cause
    return failed


def _report(batch: Batch[AnyRequest], outcome: Outcome[object], failed: Requests) -> BatchReport:
    """The report of a batch. To be made once its answers are delivered: a request that is cancelled by then gets
    none."""
    leaving = failed if outcome.error else batch.requests
    waits_ns: list[int] = []
    refused = cancelled = 0
    for request in leaving:
        if request.answered:
            waits_ns.append(request.waited_ns)
        elif request.cancelled():
            cancelled += 1
        elif request.refused or outcome.error:
            refused += 1
        else:
            waits_ns.append(request.waited_ns)
    return BatchReport(
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
    )
