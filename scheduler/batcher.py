"""The asyncio shell around the pure queue: futures in, batches to instances, answers back.

Lives here: the loop's side of batching (one alarm, idle instances, drain). Must not: any decision about what batches;
that is `batch_queue`. Everything runs on one event loop; only runners use other threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Hashable, Sequence
from typing import Any, Generic, TypeVar

from scheduler.batch_queue import Batch, BatchQueue, Entry
from scheduler.clock import Alarm, Clock, MonotonicClock
from scheduler.errors import BatcherClosed, ExecutionFailed, QueueFull, QueueTimeout
from scheduler.observer import BatchReport, Drop, NullObserver, Observer
from scheduler.policy import NEVER, BatchPolicy
from scheduler.runner import Outcome, Runner

__all__ = ["Batcher", "Pending"]

P = TypeVar("P")
R = TypeVar("R")


class Pending(asyncio.Future[R], Generic[P, R]):
    """A submitted request's future result. Cancelling it, as a cancelled task does with what it awaits, takes the
    request out of the queue at once; once it executes, cancelling only discards its share of the answer."""

    payload: P
    _entry: Entry[Pending[P, R]] | None = None
    _batcher: Batcher[P, R]

    def cancel(self, msg: Any | None = None) -> bool:
        if self._entry is not None:
            self._batcher._on_cancel(self._entry)
            self._entry = None
        return super().cancel(msg)

    def left_queue(self) -> None:
        """Forget the entry, which points back here: no cycle may be left for the garbage collector to find."""
        self._entry = None


class Batcher(Generic[P, R]):
    """Batches the requests of one model over its instances.

    `runners` are started by `start` and stopped by `close`. All methods must be called on the event loop that ran
    `start`.
    """

    def __init__(
        self,
        policy: BatchPolicy,
        runners: Sequence[Runner[P, R]],
        *,
        clock: Clock | None = None,
        observer: Observer | None = None,
    ) -> None:
        self.policy = policy
        self._clock: Clock = clock or MonotonicClock()
        self._observer: Observer = observer or NullObserver()
        self._queue: BatchQueue[Pending[P, R]] = BatchQueue(policy)
        self._runners = tuple(runners)
        self._idle: list[Runner[P, R]] = []
        self._running: dict[Runner[P, R], Batch[Pending[P, R]]] = {}
        self._accepts = self._stopped = False
        self._turn_is_due = False
        self._wake_ns: int | None = None
        self._drained: asyncio.Event
        self._loop: asyncio.AbstractEventLoop
        self._alarm: Alarm

    @property
    def waiting_requests(self) -> int:
        """Requests accepted and not yet executing."""
        return self._queue.requests

    @property
    def lanes(self) -> int:
        """Shape keys that have requests waiting."""
        return self._queue.lanes

    def start(self) -> None:
        """Start the runners and take requests."""
        self._loop = asyncio.get_running_loop()
        self._drained = asyncio.Event()
        self._alarm = self._clock.alarm(self._on_alarm)
        for runner in self._runners:
            runner.start()
        # A stack: the instance that ran last has the warmest caches.
        self._idle = list(reversed(self._runners))
        self._accepts = True

    # hot path
    def submit(
        self, payload: P, rows: int, key: Hashable, *, timeout_ns: int = 0, rpc_deadline_ns: int = NEVER
    ) -> Pending[P, R]:
        """Queue a request of `rows` rows; only requests of equal `key` share a batch.

        `timeout_ns` is the request's own queue timeout (0: none), `rpc_deadline_ns` the moment its caller gives up.
        Raises RequestTooLarge, QueueFull or BatcherClosed at once; the future gets QueueTimeout, BatcherClosed or
        ExecutionFailed.
        """
        if not self._accepts:
            raise BatcherClosed
        now_ns = self._clock.now_ns()
        pending: Pending[P, R] = Pending(loop=self._loop)
        pending.payload = payload
        deadline_ns = self.policy.queue.deadline_ns(now_ns, timeout_ns, rpc_deadline_ns)
        try:
            entry = self._queue.push(pending, rows, key, now_ns, deadline_ns)
        except QueueFull:
            self._observer.on_drop(Drop.REFUSED)
            raise
        pending._entry = entry
        pending._batcher = self
        self._request_turn()
        return pending

    def flush(self) -> None:
        """From now on let nothing wait for company: execute what is queued, and what still comes, at once."""
        self._queue.flush()
        self._request_turn()

    async def drain(self) -> None:
        """Take no more requests, execute what is queued without further delay, return when all is answered."""
        self._accepts = False
        self._queue.flush()
        self._turn()
        await self._drained.wait()

    def close(self) -> None:
        """End: whoever still waits gets BatcherClosed. Executions that run are not waited for, their results are
        lost."""
        if self._stopped:
            return
        self._accepts = False
        self._stopped = True
        self._queue.flush()
        # With an instance for each request, everything leaves.
        step = self._queue.poll(self._clock.now_ns(), self._queue.requests)
        for entries in (step.expired, *(batch.entries for batch in (*step.batches, *self._running.values()))):
            for entry in entries:
                _fail(entry.payload, BatcherClosed())
        self._alarm.close()
        self._drained.set()
        for runner in self._runners:
            runner.stop()

    def _request_turn(self) -> None:
        """Poll once all that is ready on the loop has run: requests that arrive in one turn share a batch."""
        if not self._turn_is_due:
            self._turn_is_due = True
            self._loop.call_soon(self._turn)

    def _on_alarm(self) -> None:
        self._wake_ns = None
        self._turn()

    def _turn(self) -> None:
        """Ask the queue what to do now, and do it."""
        self._turn_is_due = False
        if self._stopped:
            return
        now_ns = self._clock.now_ns()
        step = self._queue.poll(now_ns, len(self._idle))
        for entry in step.expired:
            self._observer.on_drop(Drop.EXPIRED)
            _fail(entry.payload, QueueTimeout(now_ns - entry.enqueued_ns))
        for batch in step.batches:
            self._execute(batch)
        self._set_alarm(step.wake_ns)
        if not self._accepts and not self._queue.requests and not self._running:
            self._drained.set()

    def _set_alarm(self, wake_ns: int | None) -> None:
        if wake_ns == self._wake_ns:
            return
        self._wake_ns = wake_ns
        if wake_ns is None:
            self._alarm.clear()
        else:
            self._alarm.set(wake_ns)

    def _execute(self, batch: Batch[Pending[P, R]]) -> None:
        runner = self._idle.pop()
        self._running[runner] = batch
        payloads = []
        for entry in batch.entries:
            entry.payload.left_queue()
            payloads.append(entry.payload.payload)
        runner.run(payloads, lambda outcome: self._on_done(runner, outcome))

    def _on_done(self, runner: Runner[P, R], outcome: Outcome[R]) -> None:
        if self._stopped:
            return
        batch = self._running.pop(runner)
        self._idle.append(runner)
        # The instance first: it starts on the next batch while the loop answers this one.
        self._turn()
        if outcome.executed is not None:
            for entry, result in zip(batch.entries, outcome.executed.results, strict=True):
                if not entry.payload.done():
                    entry.payload.set_result(result)
        else:
            for entry in batch.entries:
                _fail(entry.payload, _failure(outcome.error))
        self._observer.on_batch(_report(batch, outcome))

    def _on_cancel(self, entry: Entry[Pending[P, R]]) -> None:
        if self._queue.cancel(entry):
            self._observer.on_drop(Drop.CANCELLED)
            self._request_turn()


def _fail(pending: Pending[Any, Any], error: Exception) -> None:
    pending.left_queue()
    if not pending.done():
        pending.set_exception(error)


def _failure(cause: BaseException | None) -> ExecutionFailed:
    """An exception for one request of a failed batch; each gets its own, as tracebacks grow on shared ones."""
    failed = ExecutionFailed(str(cause) or type(cause).__name__)
    failed.__cause__ = cause
    return failed


def _report(batch: Batch[Any], outcome: Outcome[Any]) -> BatchReport:
    waits_ns = [outcome.started_ns - entry.enqueued_ns for entry in batch.entries]
    return BatchReport(batch.rows, waits_ns, outcome.started_ns, outcome.finished_ns, outcome.executed, outcome.error)
