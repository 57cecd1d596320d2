"""A batcher of models whose requests are steps of sequences: each goes to a batcher when its turn has come, with the
state that the step before it has left.

Lives here: carrying out what `sequences` decides. Must not: decide which step goes, or look into states and payloads,
which `StepMaker` makes. Where instances hold sequences, each instance has a batcher of its own, as no other may execute
its sequences' steps; otherwise there is one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from itertools import groupby
from typing import Generic, Protocol

from paceline.scheduler.answering import Answers, FailedNote, no_note
from paceline.scheduler.batcher import Batcher
from paceline.scheduler.clock import Alarm, Clock, MonotonicClock
from paceline.scheduler.errors import BatcherClosed, DeadlineExceeded, NoInstance, QueueFull, SchedulerError
from paceline.scheduler.failures import Blame
from paceline.scheduler.instances import InstanceReplacer
from paceline.scheduler.observer import FULL, Drop, Observer
from paceline.scheduler.policy import BatchPolicy
from paceline.scheduler.request import AnyRequest, P, R, Request
from paceline.scheduler.runner import AnyRunner, Runner
from paceline.scheduler.sequence import AnySequence, Over, SequenceEnd, StepPayload
from paceline.scheduler.sequences import Sequences
from paceline.scheduler.turns import ArrivalModel, Submit
from paceline.scheduler.waiting import SharedQueueLimits, Waiting

_LOST: dict[Drop | None, SequenceEnd] = {
    Drop.CANCELLED: SequenceEnd.CANCELLED,
    Drop.EXPIRED: SequenceEnd.EXPIRED,
    Drop.UNREACHABLE: SequenceEnd.EXPIRED,
    Drop.CLOSED: SequenceEnd.REFUSED,
    Drop.NO_INSTANCE: SequenceEnd.REFUSED,
}


class StepMaker(Protocol):
    """Makes steps of requests."""

    def __call__(self, request: AnyRequest, sequence: AnySequence, /) -> StepPayload | None:
        """Make `request` ready for its batcher, as the next step of `sequence`: with its payload, which is returned if
        it will have what the step leaves, and a key by which it shares batches only with what it may. It mustn't
        raise."""


class SequenceBatcher(Generic[P, R]):
    """Batches the steps of the sequences of `model` over its instances; `policy` has `sequences`. `make_step` makes
    their payloads. `on_over` is told of sequences that an instance has held, with a runner of that instance, unless
    that is lost. Whenever an instance is, the sequences end whose states `are_lost`. The rest, and all methods, are as
    those of `Batcher`."""

    announce: Callable[[Submit, object], None]

    def __init__(
        self,
        model: str,
        make_step: StepMaker,
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
        on_over: Callable[[AnyRunner, Over], None] = lambda runner, over: None,
        are_lost: Callable[[object], bool] = lambda state: False,
        failed_note: FailedNote = no_note,
    ) -> None:
        assert policy.sequences is not None
        self.policy = policy
        self._make_step = make_step
        self._on_over = on_over
        self._are_lost = are_lost
        self._instance_of = instance_of
        self._clock: Clock = clock or MonotonicClock()
        self._answers = Answers(observer)
        self.sequences: Sequences[Request[P, R]] = Sequences(policy.sequences, model, Waiting(policy, shared_limits))
        self._holds = policy.sequences.places > 0
        self._groups: list[list[Runner[P, R]]] = [list(runners)]
        if self._holds:
            by_instance: dict[Hashable, list[Runner[P, R]]] = {}
            for runner in runners:
                by_instance.setdefault(instance_of(runner), []).append(runner)
            self._groups = list(by_instance.values())
        self._batchers: list[Batcher[P, R]] = [
            Batcher(
                policy,
                group,
                clock=self._clock,
                observer=observer,
                blames=blames,
                replacer=replacer,
                on_given_up=partial(self._lose_instance, number),
                shared_limits=shared_limits,
                instance_of=instance_of,
                arrivals=arrivals,
                on_left=self._on_left,
                failed_note=failed_note,
            )
            for number, group in enumerate(self._groups)
        ]
        self.announce = self._batchers[0].announce
        self._accepts = self._stopped = self._suspended = self._is_sending = False
        self._wake_ns: int | None = None
        self._quiet: asyncio.Event
        self._loop: asyncio.AbstractEventLoop
        self._alarm: Alarm | None = None

    @property
    def waiting_requests(self) -> int:
        return self.sequences.backlog.requests + sum(one.waiting_requests for one in self._batchers)

    @property
    def lanes(self) -> int:
        return sum(one.lanes for one in self._batchers)

    @property
    def slots(self) -> int:
        return sum(one.slots for one in self._batchers)

    @property
    def allowed_rows(self) -> int:
        return min(one.allowed_rows for one in self._batchers)

    @property
    def growth_bound(self) -> int:
        return min((one.growth_bound for one in self._batchers if one.growth_bound), default=0)

    def waiting_of_level(self, level: int) -> int:
        return sum(one.waiting_of_level(level) for one in self._batchers)

    def executing(self, runner: Runner[P, R]) -> Sequence[Request[P, R]]:
        """As of `Batcher`."""
        return next(filter(None, (one.executing(runner) for one in self._batchers)), ())

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._quiet = asyncio.Event()
        try:
            for batcher in self._batchers:
                batcher.start()
            self._alarm = self._clock.alarm(self._on_alarm)
        except BaseException:
            self.close()
            raise
        for number in range(len(self._batchers)) if self._holds else ():
            self.sequences.add_instance(number, self._clock.now_ns())
        self._accepts = True

    # hot path
    def submit(self, group: Sequence[Request[P, R]]) -> Sequence[SchedulerError | None]:
        """As `Batcher.submit`, for steps of different sequences. Besides, an error may be NoSequence, NotStarted or
        BacklogFull; a request that was taken may get NotStarted, if its sequence has ended before it."""
        if not self._accepts:
            refusal, drop = (NoInstance, Drop.NO_INSTANCE) if self._suspended else (BatcherClosed, Drop.CLOSED)
            for _ in group:
                self._answers.count(drop)
            return [refusal() for _ in group]
        now_ns, sequences = self._clock.now_ns(), self.sequences
        refusals: dict[Request[P, R], SchedulerError | None] = dict.fromkeys(group)
        for request in group:
            request.batcher = self
            request.arrived_ns = request.arrived_ns or now_ns
            error = sequences.arrive(request)
            if error is not None:
                refusals[request] = error
                if isinstance(error, QueueFull):
                    self._answers.count(FULL[error.what])
        # Those that go on at once are not waited for by anybody yet: if the batcher refuses one, that is its answer.
        self._go_on(now_ns, refusals)
        return [*refusals.values()] if any(refusals.values()) else ()

    def end_sequence(self, id_: int | str) -> None:
        """There are no further steps of a sequence, whose last one didn't say so."""
        now_ns = self._clock.now_ns()
        self.sequences.end(id_, now_ns)
        self._go_on(now_ns)

    def add(self, runner: Runner[P, R]) -> None:
        number = 0
        if self._holds:
            number = next(
                number
                for number, group in enumerate(self._groups)
                if not group or self._instance_of(group[0]) == self._instance_of(runner)
            )
            if not self._groups[number]:
                self.sequences.add_instance(number, self._clock.now_ns())
        self._groups[number].append(runner)
        self._batchers[number].add(runner)
        self._accepts = self._accepts or self._suspended
        self._suspended = False
        self._go_on(self._clock.now_ns())

    def lose(self, runner: Runner[P, R], error: BaseException) -> None:
        for group, batcher in zip(self._groups, self._batchers, strict=True):
            if runner in group:
                batcher.lose(runner, error)

    def suspend(self) -> None:
        self.take_announced()
        self._suspended = self._suspended or self._accepts
        self._accepts = False
        waiting = self.sequences.take_waiting(SequenceEnd.REFUSED, self._clock.now_ns())
        self._answers.give_up(waiting, Drop.NO_INSTANCE, NoInstance)
        for batcher in self._batchers:
            batcher.suspend()
        self._go_on(self._clock.now_ns())

    def flush(self) -> None:
        for batcher in self._batchers:
            batcher.flush()

    async def drain(self) -> None:
        """As `Batcher.drain`; then all sequences end."""
        self.take_announced()
        self._accepts = self._suspended = False
        self.flush()
        now_ns = self._clock.now_ns()
        self.sequences.retire(now_ns)
        self._go_on(now_ns)
        if not self.sequences.is_quiet:
            await self._quiet.wait()
        for batcher in self._batchers:
            await batcher.drain()

    def close(self) -> None:
        if self._stopped:
            return
        self._accepts = False
        self.take_announced()
        self._stopped = True
        if self._alarm is not None:
            self._alarm.close()
            self._alarm = None
        waiting = self.sequences.take_waiting(SequenceEnd.REPLACED, self._clock.now_ns())
        self._answers.give_up(waiting, Drop.CLOSED, BatcherClosed)
        for batcher in self._batchers:
            batcher.close()
        self._quiet.set()

    def take_announced(self) -> None:
        self._batchers[0].take_announced()

    def on_cancel(self, request: AnyRequest) -> None:
        """Learn that the caller of a request that waits for its turn has gone."""
        now_ns = self._clock.now_ns()
        self._answers.cancelled(request, waited=self.sequences.withdraw(request, now_ns))
        self._go_on(now_ns)

    # hot path
    def _on_left(self, requests: Sequence[AnyRequest], drop: Drop | None, given_up: bool) -> None:
        now_ns, lost, left = self._clock.now_ns(), _LOST.get(drop), self.sequences.left
        for request in requests:
            left(request, now_ns, lost, succeeds=not given_up)
        self._go_on(now_ns)

    # hot path
    def _go_on(self, now_ns: int, arrived: dict[Request[P, R], SchedulerError | None] | None = None) -> None:
        """Carry out what was decided: steps go to their batcher, and what can't follow fails. Of those that have just
        `arrived`, that is noted there."""
        if self._is_sending:
            return  # a batcher has told of requests while it was handed others
        self._is_sending = True
        sequences, make_step = self.sequences, self._make_step
        while sequences.ready or sequences.over:
            # Before any step: the next sequence of the same id may be among those.
            for over in sequences.over:
                for runner in self._groups[over.instance][:1]:
                    self._on_over(runner, over)
            sequences.over.clear()
            ready, sequences.ready = sequences.ready, []
            for sequence in ready:
                assert sequence.executing is not None
                sequence.payload = make_step(sequence.executing, sequence)
            for like, group in groupby(ready, _like):
                steps = [one.executing for one in group if one.executing is not None]
                errors = self._batchers[like[0]].submit(steps)
                for step, error in zip(steps, errors, strict=False):
                    if error is None:
                        pass
                    elif arrived is not None and step in arrived:
                        arrived[step] = error
                        sequences.refuse(step, now_ns)
                    else:
                        is_late = isinstance(error, DeadlineExceeded)
                        sequences.left(step, now_ns, SequenceEnd.EXPIRED if is_late else SequenceEnd.REFUSED)
                        self._answers.fail(step, error)
        self._is_sending = False
        if sequences.dropped:
            dropped, sequences.dropped = sequences.dropped, []
            for request, why in dropped:
                if arrived is not None and request in arrived:
                    arrived[request] = why
                    self._answers.count(Drop.SEQUENCE_ENDED)
                else:
                    self._answers.drop(request, Drop.SEQUENCE_ENDED, why)
        if not self._accepts and not self._stopped and sequences.is_quiet:
            self._quiet.set()
        wake_ns, set_ns = sequences.wake_ns(), self._wake_ns
        # A later moment is left for when this one has come: where steps wait, it changes with each of them.
        if wake_ns is not None and (set_ns is None or wake_ns < set_ns) and self._alarm is not None:
            self._wake_ns = wake_ns
            self._alarm.set(wake_ns)

    def _on_alarm(self) -> None:
        self._wake_ns = None
        now_ns = self._clock.now_ns()
        for request in self.sequences.expire(now_ns):
            self._answers.expire(request, now_ns)
        self._go_on(now_ns)

    def _lose_instance(self, number: int) -> None:
        """The instance is lost, with what it held of its sequences. Where it held none, states may be lost all the
        same."""
        now_ns = self._clock.now_ns()
        if self._holds:
            self.sequences.lose_instance(number, now_ns)
            self._groups[number].clear()
            # What is known of the execution that has ended is put back, to be executed again, after this.
            self._loop.call_soon(self._give_up, number)
        self.sequences.lose_states(self._are_lost, now_ns)
        if self._holds:
            self._go_on(now_ns)
        else:
            # A batcher that other sequences use, too, is in the middle of something.
            self._loop.call_soon(lambda: self._go_on(self._clock.now_ns()))

    def _give_up(self, number: int) -> None:
        """The successor of a lost instance knows nothing of its sequences. Of what waits for it, steps that start anew
        may go to any other; the rest is given up."""
        now_ns = self._clock.now_ns()
        for request in self._batchers[number].take_waiting():
            request.batcher = self
            self.sequences.take_back(request, now_ns)
        self._batchers[number].suspend()
        self._go_on(now_ns)


def _like(sequence: AnySequence) -> tuple[int, Hashable, int, int, int]:
    """What steps have in common that may be submitted together: first, the number of their batcher."""
    request, place = sequence.executing, sequence.place
    assert request is not None
    assert place is not None
    return place.instance, request.key, request.size_bytes, request.timeout_ns, request.priority
