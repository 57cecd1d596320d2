"""Sequences and everything around them, on a manual clock: instances that are lost, and what must hold after each step,
recomputed from what their callers know. `test_sequences.py` drives it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from paceline.scheduler.errors import (
    BatcherClosed,
    ExecutionFailed,
    NoInstance,
    NoSequence,
    NotStarted,
    QueueFull,
    QueueTimeout,
)
from paceline.scheduler.failures import Blame
from paceline.scheduler.policy import NEVER, BatchPolicy
from paceline.scheduler.request import Request, SequenceStep
from paceline.scheduler.sequence import Over
from paceline.scheduler.sequence import Sequence as Sequence_
from paceline.scheduler.sequence_batcher import SequenceBatcher
from paceline.scheduler.testing import ManualClock, RecordingObserver, StepRunner
from paceline.scheduler.waiting import SharedQueueLimits
from tests.property.known_sequences import Known, Step
from tests.unit.scheduler.workbench import NeverWaits

MS = 1_000_000
LATE_NS, READING_NS = 2 * MS, 100 * MS
IDLE_NS = 50 * MS
LIMIT_NS = 20 * MS


class Payload:
    def __init__(self, step: Step, state: tuple[int, ...], place: tuple[int, int]) -> None:
        self.step, self.state, self.place = step, state, place
        self.after: tuple[int, ...] | None = None


class Instance(StepRunner[Payload, int]):
    """Has the world check every batch."""

    def __init__(self, world: World, number: int) -> None:
        super().__init__(world.clock)
        self.world, self.number = world, number
        self.is_lost = False

    def run(self, payloads: Sequence[Payload], padded_rows: int, done: Any) -> None:
        assert not self.is_lost
        self.world.check_batch(self, payloads)
        super().run(payloads, padded_rows, done)

    @property
    def batch(self) -> Sequence[Payload]:
        return self._current[0] if self._current is not None else ()


class World:
    def __init__(self, policy: BatchPolicy, instances: int, max_shared: int = 0) -> None:
        assert policy.sequences is not None
        self.policy = policy
        self.limits = policy.sequences
        self.clock = ManualClock(now_ns=1)
        self.seen = RecordingObserver()
        self.instances = [Instance(self, number) for number in range(instances)]
        self.shared = SharedQueueLimits(max_shared, 0)
        self.overs: list[Over] = []
        self.batcher: SequenceBatcher[Any, Any] = SequenceBatcher(
            "m",
            self.make_step,
            policy,
            self.instances,
            clock=self.clock,
            observer=self.seen,
            blames=lambda error: error.args[0],
            replacer=self,
            shared_limits=self.shared,
            arrivals=NeverWaits(),
            on_over=lambda runner, over: self.overs.append(over),
        )
        self.known: list[Known] = []
        self.steps: list[Step] = []
        self.of: dict[Request[Any, Any], Step] = {}
        self.missing = self.refused = 0
        self.complaints: list[dict[str, Any]] = []
        self.put_off_ns = self.put_off_until_ns = 0

    # What the batcher calls.

    def make_step(self, request: Request[Any, Any], sequence: Sequence_[Any]) -> Payload:
        step, place = self.of[request], sequence.place
        assert place is not None
        step.sent, step.sequence.placed_on = True, place[1]
        state: Any = () if step.asked.start else sequence.state or ()
        request.payload = Payload(step, state, place)
        return request.payload

    def on_loss(self, runner: Instance, error: BaseException) -> None:
        runner.is_lost = True
        self.missing += 1
        for known in self.known if self.limits.places else ():
            if known.placed_on == runner.number:
                known.lose_instance()

    def on_hang(self, runner: Instance, others: Sequence[Instance]) -> None:
        assert not others
        for payload in runner.batch:
            payload.step.executing, payload.step.over_ns = False, self.clock.now_ns()
            if payload.step.asked.start:
                payload.step.sequence.done = ()
        self.on_loss(runner, TimeoutError())

    def on_return(self, runner: Instance) -> None:
        raise AssertionError("what hangs here never ends")

    def check_batch(self, instance: Instance, payloads: Sequence[Payload]) -> None:
        busy = {payload.step.sequence for one in self.busy for payload in one.batch}
        for payload in payloads:
            step, known = payload.step, payload.step.sequence
            assert known not in busy
            busy.add(known)
            assert not step.request.ended
            assert not known.is_broken(step.number)
            assert step.request.deadline_ns > self.clock.now_ns()
            # All steps before it were executed, and it sees what they have left.
            before = [one for one in known.steps if one.number < step.number and one.number not in known.lost]
            assert all(one.request.ended and one.was_executed and not one.executing for one in before)
            assert payload.state == (() if step.asked.start else known.done)
            if self.limits.places:
                assert known.instance in (-1, payload.place[1])
                known.instance = payload.place[1]
                same = [one for one in self.known[: self.known.index(known)] if one.id == known.id]
                assert not any(step.executing for one in same for step in one.steps)
                held = [one for one in same if one.instance >= 0 and not one.is_lost]
                assert sum(over.sequence == known.id for over in self.overs) >= len(held)
                assert instance.number % len(self.batcher._batchers) == payload.place[1] % len(self.batcher._batchers)
            step.executing = step.was_executed = True

    # What a script does.

    def send(self, id_: int | str, start: bool, end: bool, patience_ns: int) -> None:
        asked = SequenceStep(id_, start, end)
        request: Request[Any, Any] = Request(None, 1, "k")
        request.step = asked
        request.deadline_ns = NEVER if patience_ns == NEVER else self.clock.now_ns() + patience_ns
        self.expect_idle_ends()
        known = next((one for one in self.known if one.id == id_ and one.takes_more), None)
        is_new = known is None
        sequence = known or Known(id_)
        step = Step(len(self.steps), asked, sequence, request)
        self.steps.append(step)
        self.of[request] = step

        def on_answers(requests: list[Request[Any, Any]]) -> None:
            for one in requests:
                self.of[one].told += 1
                self.of[one].over_ns = self.clock.now_ns()

        request.on_answers = on_answers
        waiting = self.waiting
        is_under_way = any(one.executing or not one.request.ended for one in sequence.steps)
        (refusal,) = self.batcher.submit([request]) or (None,)
        if not id_:
            assert isinstance(refusal, NoSequence)
        elif is_new and not start:
            assert isinstance(refusal, NotStarted)
        elif refusal is None:
            sequence.steps.append(step)
            if is_new:
                self.known.append(sequence)
            sequence.takes_more = not end
        elif isinstance(refusal, QueueFull):
            assert waiting >= self.limits.backlog or self.shared.requests >= self.shared.max_requests
            if is_under_way:
                sequence.break_from(step.number)
            elif sequence.steps:
                sequence.steps[-1].over_ns = self.clock.now_ns()  # its client is there
        else:
            # Nothing of its sequence is under way, so that it may be sent again.
            assert isinstance(refusal, NoInstance)
            assert self.missing
            assert not is_under_way
        if refusal is not None:
            self.steps.pop()
            self.refused += isinstance(refusal, (NoInstance, QueueFull))

    def send_to_all(self, start: bool) -> None:
        for id_ in (1, 2, 3):
            self.send(id_, start, False, NEVER)

    def send_several(self, id_: int | str, end: bool, patience_ns: int) -> None:
        for number in range(3):
            self.send(id_, False, end and number == 2, patience_ns)

    @property
    def busy(self) -> list[Instance]:
        return [one for one in self.instances if one.busy and not one.is_lost]

    @property
    def waiting(self) -> int:
        """How many steps wait and aren't at a batcher."""
        return sum(not (step.sent or step.request.ended) for step in self.steps)

    def cancel(self, which: int) -> None:
        open_steps = [step for step in self.steps if not step.request.ended]
        if open_steps:
            step = open_steps[which % len(open_steps)]
            if not step.executing:
                step.sequence.lose(step.number)
            step.request.cancel()

    def finish(self, which: int, how: str) -> None:
        busy = self.busy
        if not busy:
            return
        instance = busy[which % len(busy)]
        batch = instance.batch
        error = {"fail": Blame.REQUESTS, "lose": Blame.INSTANCE, "nobody": Blame.NOBODY}.get(how)
        is_divided = error is Blame.REQUESTS and self.policy.isolate_failures and len(batch) > 1
        results: list[Any] = []
        for number, payload in enumerate(batch):
            step, known = payload.step, payload.step.sequence
            step.executing, step.was_executed, step.over_ns = False, not is_divided, self.clock.now_ns()
            if is_divided and (step.request.cancelled() or step.request.deadline_ns <= self.clock.now_ns()):
                known.lose(step.number)  # it isn't executed again with the others
            if error is None and not (how == "one" and number == 0):
                payload.after = known.done = (*payload.state, step.number)
                results.append(step.number)
            else:
                results.append(ValueError("one"))
                if step.asked.start:
                    known.done = ()
        if error is None:
            instance.finish_with(results)
        else:
            instance.fail(RuntimeError(error))

    def advance(self, by_ns: int) -> None:
        self.clock.advance(by_ns)
        self.expect_ends()

    def freeze(self, by_ns: int) -> None:
        """Idle sequences that should have ended long before this is over get some more time, once each."""
        if self.busy and self.policy.execution_limit_ns:
            return  # whether an instance or the time of its idle sequences is lost first is nobody's concern
        self.clock.freeze(by_ns)
        now_ns = self.clock.now_ns()
        due = [one for one in self.known if one.takes_more and self.idle_end_ns(one) <= now_ns]
        if due and max(min(map(self.idle_end_ns, due)), self.put_off_until_ns) + LATE_NS < now_ns:
            anew = [one for one in due if self.idle_end_ns(one) > self.put_off_ns]
            for known in {*due}.difference(anew):
                known.break_from(float("inf"))
            if anew:
                self.put_off_ns, self.put_off_until_ns = now_ns, now_ns + READING_NS
        self.expect_ends()

    def expect_ends(self) -> None:
        for step in self.steps:
            if step.request.ended and step.request.deadline_ns <= self.clock.now_ns() and not step.was_executed:
                step.sequence.lose(step.number)
        self.expect_idle_ends()

    def add(self) -> None:
        if self.missing:
            self.missing -= 1
            lost = next(one for one in self.instances if one.is_lost)
            self.instances[lost.number] = instance = Instance(self, lost.number)
            self.batcher.add(instance)

    # What must hold.

    def expect_idle_ends(self) -> None:
        now_ns = self.clock.now_ns()
        for known in self.known:
            if self.idle_end_ns(known) <= now_ns >= self.put_off_until_ns:
                known.break_from(float("inf"))

    def idle_end_ns(self, known: Known) -> int:
        """When it ends, unless something of it waits or executes."""
        is_quiet = all(step.request.ended and not step.executing for step in known.steps)
        return max(step.over_ns for step in known.steps) + IDLE_NS if is_quiet else NEVER

    def check(self) -> None:
        assert self.complaints == []
        sequences = self.batcher.sequences
        most = self.limits.places * len(self.instances) if self.limits.places else self.limits.max_sequences
        assert sequences.live <= most
        assert self.waiting == sequences.backlog.requests
        assert {*sequences.ids} <= {one.id for one in self.known if one.takes_more}  # idle ones have ended in time
        placeless = [one for one in self.known if one.placed_on < 0]
        assert sequences.waiting == sum(any(not step.request.ended for step in one.steps) for one in placeless)
        for known in self.known:
            for step in known.steps:
                if known.is_broken(step.number) and not step.executing:
                    assert step.request.ended or step.sent

    def check_end(self, step: Step) -> None:
        request = step.request
        assert request.ended
        assert step.told == 1
        if request.cancelled():
            return
        error = request.exception()
        if error is None:
            assert request.result() == step.number
        elif isinstance(error, NotStarted):
            assert step.sequence.is_broken(step.number)
        elif isinstance(error, NoInstance):
            assert step.was_executed or not step.asked.start
        else:
            assert isinstance(error, (ExecutionFailed, QueueTimeout, BatcherClosed, ValueError))

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)
        self.check()

    async def play(self, script: Sequence[Sequence[Any]], ending: str) -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: self.complaints.append(context))
        self.batcher.start()
        for name, *arguments in script:
            getattr(self, name)(*arguments)
            await self.settle()
        draining = asyncio.ensure_future(self.batcher.drain()) if ending == "drain" else None
        await self.settle()
        if ending != "close":
            await self.until_quiet()
        if ending == "idle":
            self.advance(IDLE_NS + READING_NS)
            await self.settle()
        if draining is not None:
            await draining
        self.batcher.close()
        await self.settle()
        for step in self.steps:
            self.check_end(step)
        sequences = self.batcher.sequences
        assert self.shared.requests == self.batcher.waiting_requests == self.clock.alarms == 0
        if ending != "close":
            assert sequences.live == sequences.waiting == 0
            assert sequences.ended.total() == len(self.known)
            assert sequences.is_quiet
            # Each sequence that an instance has held is over once, and no other; unless that was lost.
            held = [known for known in self.known if known.instance >= 0 and not known.is_lost]
            assert len(held) <= len(self.overs) <= (len(self.known) if self.limits.places else 0)
        ends = sum(len(one.waits_ns) + one.failed + one.cancelled for one in self.seen.reports) + len(self.seen.drops)
        assert ends == len(self.steps) + self.refused

    async def until_quiet(self) -> None:
        for _ in range(20 * len(self.steps) + 20):
            if all(step.request.ended for step in self.steps) and not self.busy:
                return
            if self.busy:
                self.finish(0, "well")
            elif self.missing:
                self.add()
            else:
                self.advance(IDLE_NS)
            await self.settle()
        raise AssertionError("some steps are never answered")
