"""The asyncio shell around the pure queue: it hands out futures, passes batches to instances and delivers answers.

Lives here: when the queue is asked, carrying out what it decides, start and end. Must not: decide what is batched,
which is `batch_queue`, or what becomes of a failed batch, which is `failures`. Everything runs on one event loop; only
runners use other threads.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Generic

from paceline.scheduler.answering import Answers, FailedNote, OnLeft, OrderedAnswers, no_note
from paceline.scheduler.batch_queue import BatchQueue, Decision
from paceline.scheduler.clock import Alarm, Clock, MonotonicClock
from paceline.scheduler.errors import BatcherClosed, DeadlineUnreachable, NoInstance, QueueFull, SchedulerError
from paceline.scheduler.failures import Blame, Recovery, Suspects
from paceline.scheduler.instances import InstanceReplacer, Instances
from paceline.scheduler.latency import cost_size
from paceline.scheduler.observer import FULL, Drop, Observer
from paceline.scheduler.policy import BatchPolicy
from paceline.scheduler.request import AnyRequest, Batch, P, R, Request
from paceline.scheduler.runner import AnyRunner, Outcome, Runner
from paceline.scheduler.turns import ArrivalModel, Submit, Turns, WaitBudget
from paceline.scheduler.waiting import SharedQueueLimits, earliest

_LONG_NS = 1_000_000
"""Shorter executions leave callers no time to come back meanwhile, so serving them in two halves gains nothing."""


class Batcher(Generic[P, R]):
    """Batches the requests of one model over its instances.

    `runners` are started by `start` and stopped by `close`. `blames(error)` classifies an error that an instance
    raised: who may be at fault. By default, some of the batch's requests. `replacer` is notified of runners that were
    given up; without it, an instance at fault stays in use. `shared_limits` is what its queue shares with the queues of
    other models. `instance_of(runner)` is the instance that a runner is a slot of (see `instances`); by default, each
    runner is an instance. `arrivals` learns how long it is worth waiting for more requests. `on_left` is told of
    requests that the batcher has done with; errors of executions end with what `failed_note` says; `on_given_up` is
    called when an instance is given up, before `replacer` is told.

    All methods must be called on the event loop that ran `start`.
    """

    sequences: None = None
    """Its requests are no steps, as those of a `SequenceBatcher` are."""
    announce: Callable[[Submit, object], None]
    """`announce(submit, request)` says that a request has arrived, which `submit` will submit or find that it can't.
    `submit` is called once, soon and before anything is decided, with a list of all requests that were announced with
    it, in order of arrival: processing together what arrives together takes less processor time than one by one, in
    between gRPC's work. `submit` mustn't raise."""

    def __init__(
        self,
        policy: BatchPolicy,
        runners: Sequence[Runner[P, R]],
        *,
        clock: Clock | None = None,
        observer: Observer | None = None,
        blames: Callable[[BaseException], Blame] = lambda error: Blame.REQUESTS,
        replacer: InstanceReplacer | None = None,
        shared_limits: SharedQueueLimits | None = None,
        instance_of: Callable[[AnyRunner], Hashable] = id,
        arrivals: ArrivalModel | None = None,
        on_left: OnLeft | None = None,
        failed_note: FailedNote = no_note,
        on_given_up: Callable[[], None] = lambda: None,
    ) -> None:
        self.policy = policy
        self._clock: Clock = clock or MonotonicClock()
        self._queue: BatchQueue[Request[P, R]] = BatchQueue(policy, len({*map(instance_of, runners)}), shared_limits)
        self._waiting = self._queue.waiting
        self._instances: Instances[P, R] = Instances(
            runners, self._clock, replacer, instance_of, on_given_up, hands_ahead=policy.hands_ahead
        )
        self._running, self._ahead = self._instances.running, self._instances.ahead
        self._answers = (OrderedAnswers if policy.preserve_ordering else Answers)(observer, on_left, failed_note)
        self._accepts = self._stopped = self._suspended = False
        self._arrivals = arrivals or ArrivalModel()
        self._recovery: Recovery[P, R] = Recovery(
            self._queue, self._instances, self._answers, self._arrivals, self._clock, blames, policy
        )
        self._turns = Turns(self._turn, self._wait_budget, self._arrivals, self._clock)
        self.announce = self._turns.announce
        self._wake_ns: int | None = None
        self._drained: asyncio.Event
        self._loop: asyncio.AbstractEventLoop
        self._alarm: Alarm
        self._alarms = ExitStack()

    @property
    def waiting_requests(self) -> int:
        """Requests announced or accepted that aren't executing."""
        waiting = self._waiting
        return waiting.requests + waiting.reserved.requests + self._turns.announced + self._recovery.waiting()

    @property
    def lanes(self) -> int:
        """How many shape keys have requests waiting."""
        return self._queue.lanes

    @property
    def slots(self) -> int:
        """How many batches can execute at a time: the slots of all instances that are left."""
        return self._instances.total_slots

    @property
    def allowed_rows(self) -> int:
        """How many rows a batch may have: for a while after memory ran out, fewer than the policy says."""
        return self._queue.allowed_rows

    @property
    def growth_bound(self) -> int:
        """The rows, or elements where requests differ in length, at which batches of some key stop; 0: nowhere."""
        return min(self._queue.sizing.growth.bounds, default=0)

    def waiting_of_level(self, level: int) -> int:
        """Those of `waiting_requests` at priority `level`, without announced ones, whose level isn't known."""
        waiting = self._waiting
        return waiting.of_level(level) + waiting.reserved.of_level(level) + self._recovery.waiting(level)

    def executing(self, runner: Runner[P, R]) -> Sequence[Request[P, R]]:
        """What `runner` executes now."""
        return self._running[runner].requests if runner in self._running else ()

    def start(self) -> None:
        """Start the runners and take requests. If that fails, the batcher is closed and the error raised: there may be
        no more threads, or no more file descriptors, of which each alarm needs one."""
        self._loop = asyncio.get_running_loop()
        self._drained = asyncio.Event()
        try:
            self._turns.start()
            self._alarms.callback(self._turns.close)
            self._alarm = self._clock.alarm(self._on_alarm)
            self._alarms.callback(self._alarm.close)
            self._instances.start(self.policy.execution_limit_ns, self._on_late)
        except BaseException:
            self.close()
            raise
        self._accepts = True

    # hot path
    def submit(self, group: Sequence[Request[P, R]]) -> Sequence[SchedulerError | None]:
        """Queue requests that arrived one after the other, and have equal rows, key, size, priority and queue timeout;
        or that come back without having ended.

        Returns why requests are refused, None for each one that isn't; nothing at all if none is. An error may be
        RequestTooLarge, QueueFull, DeadlineUnreachable, NoInstance or BatcherClosed. Requests that were taken get a
        result, QueueTimeout, DeadlineUnreachable, NoInstance, BatcherClosed or ExecutionFailed, or the exception that
        the instance returned in place of the result.
        """
        turns = self._turns
        if not turns.is_submitting:
            turns.submit_announced()
        if not self._accepts:
            refusal, drop = (NoInstance, Drop.NO_INSTANCE) if self._suspended else (BatcherClosed, Drop.CLOSED)
            for _ in group:
                self._answers.count(drop)
            return [refusal() for _ in group]
        for request in group:
            request.batcher = self
            request.arrived_ns = request.arrived_ns or self._clock.now_ns()
        refusals = self._queue.push(group)
        for error in refusals:
            if isinstance(error, QueueFull):
                self._answers.count(FULL[error.what])
            elif isinstance(error, DeadlineUnreachable):
                self._answers.count(Drop.UNREACHABLE)
        if self.policy.preserve_ordering:
            for number, request in enumerate(group):
                if not refusals or refusals[number] is None:
                    self._answers.expect(request)
        # Announced requests have been noted already.
        if not turns.is_submitting and (not refusals or None in refusals):
            turns.arrived()
        return refusals

    def add(self, runner: Runner[P, R]) -> None:
        """Start and use one more instance, or slot of one, in place of a lost one. A closed batcher stops it again."""
        runner.start()
        if self._stopped:
            runner.stop()
            return
        self._accepts = self._accepts or self._suspended
        self._suspended = False
        self._instances.add(runner)
        self._turns.request()

    def lose(self, runner: Runner[P, R], error: BaseException) -> None:
        """Learn that the runner's instance has ended by itself. Its execution is waited for: it may have succeeded."""
        if not self._stopped:
            self._recovery.instance_ended(runner, error)

    def suspend(self) -> None:
        """Until `add` brings an instance, as none is left: refuse new requests, and those that wait already."""
        self.take_announced()
        self._suspended = self._suspended or self._accepts
        self._accepts = False
        self._answers.give_up((*self._queue.take_all(), *self._recovery.take_all()), Drop.NO_INSTANCE, NoInstance)
        self._turns.take()

    def take_waiting(self) -> Sequence[Request[P, R]]:
        """Remove the requests that wait: they are answered by other ways."""
        self.take_announced()
        for request in (taken := self._queue.take_all() + self._answers.still_wanted(self._recovery.take_all())):
            self._answers.elsewhere(request)
        return taken

    def flush(self) -> None:
        """From now on, let nothing wait for more requests: execute what is queued, and what still arrives, at once."""
        self._queue.flush()
        self._turns.request()

    async def drain(self) -> None:
        """Take no more requests, execute what is queued without further delay, and return when all is answered."""
        self.take_announced()
        self._accepts = self._suspended = False
        self._queue.flush()
        self._turns.take()
        await self._drained.wait()

    def close(self) -> None:
        """End: requests that wait or execute get BatcherClosed. Running executions aren't waited for; their results are
        lost."""
        if self._stopped:
            return
        self._accepts = False
        self.take_announced()
        self._stopped = True
        for runner, batch in self._ahead.next.items():
            runner.take_back()
            self._queue.release(batch)
        batches = (*self._running.values(), *self._ahead.next.values())
        for requests in (self._queue.take_all(), *(batch.requests for batch in batches), self._recovery.take_all()):
            self._answers.give_up(requests, Drop.CLOSED, BatcherClosed)
        self._alarms.close()
        self._drained.set()
        self._instances.close()

    # hot path
    def take_announced(self) -> None:
        """Have all announced requests submitted now: to be called before anything changes that they depend on."""
        self._turns.submit_announced()

    def _wait_budget(self, announced: int = 0) -> WaitBudget | None:
        """What an instance may be kept waiting for, besides `announced` requests. None if there is no instance to keep
        waiting, or there are enough requests for it already."""
        max_more = self._queue.worth_waiting_for(announced)
        if not max_more or not self._accepts or self._recovery.suspects:
            return None
        if self._instances.slots.idle or (self._ahead.ends and self._ahead.about_to_end(self._clock.now_ns())):
            return WaitBudget(self._waiting.requests + announced, max_more, self._queue.spare_until_ns)
        return None

    def _on_alarm(self) -> None:
        self._wake_ns = None
        self._turns.take()

    # hot path
    def _turn(self) -> None:
        """Ask the queue what to do now, and do it."""
        if self._stopped:
            return
        now_ns, recovery, slots = self._clock.now_ns(), self._recovery, self._instances.slots
        # What comes back to wait comes first, so that the queue knows of it; then suspects, before anything that is
        # queued; then instances that are free, and at last those that are about to be. Nobody is told of an end before
        # the alarm is set: whoever is told may call back.
        if self._ahead.next:
            recovery.recall(now_ns)
        if recovery.suspects:
            recovery.drop_unwanted(now_ns)
            while (again := recovery.next_suspects(now_ns)) is not None:
                self._run(*again, now_ns)
        idle = len(slots.idle)
        decision = self._queue.poll(now_ns, idle, slots.free - idle)
        for batch in decision.batches:
            self._run(self._instances.take(batch), batch, None, now_ns)
        decisions = [decision, *self._hand_over_ahead(now_ns)] if self._ahead.ends else [decision]
        wake_ns = decision.wake_ns
        if self._ahead.ends:
            wake_ns = earliest(wake_ns, self._ahead.wake_ns(now_ns, requests=self._waiting.requests))
        if recovery.suspects:
            wake_ns = earliest(wake_ns, recovery.due_ns)
        if wake_ns != self._wake_ns:
            self._wake_ns = wake_ns
            if wake_ns is None:
                self._alarm.clear()
            else:
                self._alarm.set(wake_ns)
        for one in decisions:
            for request in one.expired:
                self._answers.expire(request, now_ns)
            for late in one.unreachable:
                error = DeadlineUnreachable(late.request.deadline_ns - now_ns, late.needed_ns)
                self._answers.drop(late.request, Drop.UNREACHABLE, error)
        busy = self._accepts or self._suspended or self._waiting.requests or self._running or recovery.suspects
        if not busy:
            self._drained.set()

    def _hand_over_ahead(self, now_ns: int) -> list[Decision[Request[P, R]]]:
        """Hand the next batches to instances that are about to be done."""
        decisions: list[Decision[Request[P, R]]] = []
        wanted = self._waiting.requests and not self._recovery.suspects and not self._instances.slots.idle
        for runner in self._ahead.about_to_end(now_ns) if wanted else ():
            # One poll for each, as each has its own time from which its batch can begin.
            decision = self._queue.poll(now_ns, 1, starts_ns=self._ahead.ends[runner].at_ns)
            decisions.append(decision)
            if not decision.batches:
                break
            (batch,) = decision.batches
            self._ahead.next[runner] = batch
            self._queue.reserve(batch)
            self._run(runner, batch, None, now_ns)
        return decisions

    # hot path
    def _run(
        self, runner: Runner[P, R], batch: Batch[Request[P, R]], suspects: Suspects[Request[P, R]] | None, now_ns: int
    ) -> None:
        payloads = [request.payload for request in batch.requests]
        self._arrivals.on_start(len(payloads), self._waiting.requests, now_ns, self._clock.busy_ns())
        runner.run(payloads, batch.padded_rows, partial(self._on_done, runner, suspects))

    # hot path
    def _on_done(self, runner: Runner[P, R], suspects: Suspects[Request[P, R]] | None, outcome: Outcome[R]) -> None:
        if runner not in self._running:
            self._instances.returned(runner)
            return
        if self._stopped:
            return
        if outcome.more:
            assert outcome.executed is not None
            self._answers.more(self._running[runner], outcome.executed.results)
            return
        batch, following = self._instances.end(runner)
        if following is not None:
            self._queue.release(following)
        # The time of the answers, not of the execution's end: requests that arrive in between don't come because of an
        # answer.
        now_ns, requests, arrivals, turns = self._clock.now_ns(), len(batch.requests), self._arrivals, self._turns
        duration_ns = outcome.finished_ns - outcome.started_ns
        computed_ns = duration_ns - getattr(outcome.executed, "waited_ns", 0)
        ran = not outcome.error and getattr(outcome.executed, "ran", True)
        self._queue.done(batch, now_ns, computed_ns if ran else None)
        arrivals.on_end(requests, now_ns)
        arrivals.took(*self._costs(batch) if duration_ns >= _LONG_NS else (0, 0))
        failed = self._recovery.failed(runner, batch, outcome.error, suspects) if outcome.error else ()
        if self._recovery.ended:
            self._recovery.execution_ended(runner)
        try:
            # A lone caller's next request comes after its answer: until then there is nothing to ask the queue for.
            if self._waiting.requests or turns.is_due or self._recovery.suspects or not self._accepts:
                # After an execution shorter than what its requests cost the loop, an instance gets its next batch only
                # once the answers are on their way and what has arrived is queued: batches become fewer and larger.
                if duration_ns < arrivals.cost_ns * requests and self._wait_budget(turns.announced) is not None:
                    turns.request()
                else:
                    # The instance first: it starts on the next batch while the loop answers this one.
                    turns.take()
        finally:
            self._answers.end(batch, outcome, failed)

    def _costs(self, batch: Batch[Request[P, R]]) -> tuple[int, int]:
        """What a batch like this costs besides its rows, and half of the callers lately present would take, in ns."""
        rows, curve = self._arrivals.half_of_all(len(batch.requests), batch.rows), self._queue.latency.of(batch.key)
        return curve.base_ns(), curve.expected_ns(cost_size(rows, batch.sizes))

    def _on_late(self, runner: Runner[P, R]) -> None:
        """Give up the runner, whose execution takes longer than it may, unless it has begun its next batch by now."""
        following = self._ahead.next.get(runner)
        if following is not None and not self._recovery.take_back(runner, following):
            self._instances.has_begun(runner)
            return
        batch, now_ns = self._running[runner], self._clock.now_ns()
        self._arrivals.on_end(len(batch.requests), now_ns)
        self._queue.done(batch, now_ns, None)
        self._recovery.hang(runner)
        try:
            self._turns.take()
        finally:
            self._answers.time_out(batch, self.policy.execution_limit_ns, now_ns)

    def on_cancel(self, request: AnyRequest) -> None:
        """Learn that a request's caller has gone."""
        waited = self._queue.cancel(request)
        # What has begun of a step, the next one builds on.
        if not waited and self.policy.sequences is None:
            self._instances.call_off_soon(self._loop)
        self._recovery.due_ns = 0  # it may be a suspect
        if waited or self._recovery.suspects:
            self._turns.request()
        self._answers.cancelled(request, waited=waited)
