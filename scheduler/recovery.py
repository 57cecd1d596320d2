"""What becomes of requests whose execution failed, ended with its instance or was called back: they wait on, run again
or fail for good.

Lives here: carrying out what `isolation` plans, and what the end of an instance means for its batches. Must not: pass
batches to runners or answer them; that is `batcher`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from paceline.scheduler.arrival_model import ArrivalModel
from paceline.scheduler.batch_queue import BatchQueue
from paceline.scheduler.clock import Clock
from paceline.scheduler.delivery import Delivery
from paceline.scheduler.executing import Batch
from paceline.scheduler.isolation import Blame, Retries, Search, Suspects
from paceline.scheduler.request import Request
from paceline.scheduler.runner import Runner
from paceline.scheduler.runner_table import RunnerTable

__all__ = ["Recovery"]

P = TypeVar("P")
R = TypeVar("R")

_MAX_UNBEGUN = 3
"""A request fails for good once this many instances ended before they began on its batch."""

_LOSING = (Blame.INSTANCE, Blame.INSTANCE_BEFORE, Blame.FATAL)


class Recovery(Generic[P, R]):
    """Recovers the requests of `queue` and `retries` from what goes wrong on `runners`. Those whose callers have gone
    are reported to `delivery`; `arrivals` learns which requests don't execute after all."""

    def __init__(
        self,
        queue: BatchQueue[Request[P, R]],
        runners: RunnerTable[P, R],
        retries: Retries[Request[P, R]],
        delivery: Delivery,
        arrivals: ArrivalModel,
        clock: Clock,
    ) -> None:
        self._queue = queue
        self._runners = runners
        self._retries = retries
        self._delivery = delivery
        self._arrivals = arrivals
        self._clock = clock
        # Runners whose instances have ended by themselves, but whose executions haven't, with the errors.
        self._ended: dict[Runner[P, R], BaseException] = {}

    def failed(
        self,
        runner: Runner[P, R],
        batch: Batch[Request[P, R]],
        error: BaseException,
        suspects: Suspects[Request[P, R]] | None,
    ) -> Sequence[Request[P, R]]:
        """Learn from `error`, which ended a batch, and plan to run again what may succeed. `suspects` are the batch's
        requests if they ran again already. Returns the requests that fail for good."""
        blame, among_suspects = self._retries.blame_for(error), suspects is not None
        suspects = suspects or Suspects.of_batch(batch.key, batch.requests)
        if blame is Blame.SIZE:
            if self._runners.on_out_of_memory(runner, batch, suspects.left):
                self._forgive(suspects.search)
                instance, longest_ns = self._runners.instance_of(runner), self._queue.latency.longest_ns
                return self._retries.plan_elsewhere(batch, suspects, instance, self._clock.now_ns(), longest_ns)
            self._learn_shortage(batch, suspects.search)
        if blame in _LOSING and self._runners.may_be_lost(runner):
            self._lose(runner, error)
        if blame is Blame.INSTANCE_BEFORE and self._runners.given_up(runner):
            return self._wait_for_another(batch, suspects if among_suspects else None)
        return self._retries.plan(batch, blame, suspects)

    def next_suspects(self, now_ns: int) -> tuple[Runner[P, R], Batch[Request[P, R]], Suspects[Request[P, R]]] | None:
        """Take the next suspects that can run now, as a batch, and a free runner for it; None if there are none.
        Suspects that wait for an instance other than the ones they left leave these to others."""
        if not self._runners.slots.free:
            return None
        may_run = self._runners.may_run_again
        suspects = next((one for one in self._retries.groups if may_run(one.avoided(now_ns))), None)
        if suspects is None:
            return None
        self._retries.take(suspects)
        batch, rest = self._queue.again(suspects.key, suspects.requests, now_ns, suspects.search.most_rows)
        self._retries.wait(suspects.narrowed(rest), first=True)
        return self._runners.take_again(batch, suspects.avoided(now_ns)), batch, suspects.narrowed(batch.requests)

    def drop_unwanted(self, now_ns: int) -> None:
        """Drop suspects whose callers have gone or whose deadline has passed: it may take long until there is an
        instance for them."""
        for suspects in [*self._retries.groups]:
            if any(request.ended or request.deadline_ns <= now_ns for request in suspects.requests):
                self._retries.take(suspects)
                wanted = self._delivery.still_wanted(suspects.requests)
                for request in wanted:
                    if request.deadline_ns <= now_ns:
                        self._delivery.expire(request, now_ns)
                self._retries.wait(suspects.narrowed([request for request in wanted if request.deadline_ns > now_ns]))

    def recall(self, now_ns: int) -> None:
        """If an execution takes longer than expected, take back the batch that was to follow it: its requests wait on
        like all others."""
        ahead = self._runners.ahead
        for runner in ahead.overdue(now_ns):
            if self.take_back(runner, ahead.next[runner]):
                ahead.end(runner)

    def take_back(self, runner: Runner[P, R], batch: Batch[Request[P, R]]) -> bool:
        """Take back a batch that `runner` hasn't begun; its requests wait on. False if the runner has begun it."""
        if not runner.take_back():
            return False
        if self._runners.ahead.next.get(runner) is batch:
            # Before it waits again: other threads read how much waits, and it mustn't be counted twice.
            self._queue.release(batch)
        self._arrivals.on_end(len(batch.requests), self._clock.now_ns())
        self._put_back(batch, batch.requests)
        return True

    def instance_ended(self, runner: Runner[P, R], error: BaseException) -> None:
        """Learn that the runner's instance has ended by itself. Its execution is waited for, as that may have succeeded
        before."""
        if not self._runners.may_be_lost(runner):
            return
        if runner in self._runners.running:
            self._ended[runner] = error
        else:
            self._runners.lose(runner, error)

    # hot path
    def execution_ended(self, runner: Runner[P, R]) -> None:
        """Give up the runner's instance if it ended by itself during the execution, which is over now."""
        if self._ended and (ended := self._ended.pop(runner, None)) is not None and self._runners.may_be_lost(runner):
            self._lose(runner, ended)

    def hang(self, runner: Runner[P, R]) -> None:
        """Give up the runner, whose execution takes longer than it may, and its instance."""
        self._ended.pop(runner, None)
        self._runners.hang(runner)

    def _lose(self, runner: Runner[P, R], error: BaseException) -> None:
        following = self._runners.running.get(runner)
        if following is not None and self.take_back(runner, following):
            self._runners.forget(runner)
        self._runners.lose(runner, error)

    def _put_back(self, batch: Batch[Request[P, R]], requests: Sequence[Request[P, R]]) -> None:
        """Return `requests` of a batch that nobody executed to the queue, except those whose callers have gone."""
        self._queue.put_back(batch, self._delivery.still_wanted(requests))

    def _wait_for_another(
        self, batch: Batch[Request[P, R]], suspects: Suspects[Request[P, R]] | None
    ) -> Sequence[Request[P, R]]:
        """Have a batch wait for another instance, as its own ended before beginning it. `suspects` wait among the
        suspects; if None, the batch's requests go back to the queue. Returns the requests to which this has happened
        too often: reading them may be what ends instances."""
        for request in batch.requests:
            request.unbegun += 1
        failed = [request for request in batch.requests if request.unbegun >= _MAX_UNBEGUN]
        left = [request for request in batch.requests if request.unbegun < _MAX_UNBEGUN]
        if suspects is None:
            self._put_back(batch, left)
        else:
            self._retries.wait(suspects.narrowed(left))
        return failed

    def _learn_shortage(self, batch: Batch[Request[P, R]], search: Search) -> None:
        """Allow fewer rows, unless the batch was a single request: what that needs alone says nothing about others, and
        neither do the batches that it was in before."""
        if len(batch.requests) > 1:
            before = self._queue.exhausted(batch.padded_rows, self._clock.now_ns())
            search.before = search.before or before
            search.most_rows = self._queue.allowed_rows
        else:
            self._forgive(search)

    def _forgive(self, search: Search) -> None:
        """Allow again what was allowed before the search's shortage: the size of the batch wasn't at fault."""
        if search.before is not None:
            self._queue.forgive(search.before)
            search.before = None
