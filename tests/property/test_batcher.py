"""The whole batcher under random sequences of requests, passing time, executions that end in every possible way, and
instances that come and go. After each step, promises of the documentation are checked by what callers, instances, the
observer and the replacer see (`batching_world.py`). `test_batch_queue.py` checks which requests make a batch.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline.scheduler.errors import (
    BatcherClosed,
    DeadlineUnreachable,
    ExecutionFailed,
    ExecutionTimeout,
    NoInstance,
    QueueTimeout,
)
from paceline.scheduler.failures import Blame
from paceline.scheduler.policy import NEVER, BatchPolicy, QueueLimits, QueuePolicy, TimeoutAction
from tests.lengths import LONG
from tests.property.batching_requests import LIMIT_NS, MS, POISONS, Fault, Like, Request
from tests.property.batching_world import Setup, Slot, World

LONG_NS = 10_000 * MS
LONGEST_PATIENCE_NS = 10 * MS
"""An idle instance never waits longer for requests that are likely to arrive."""

Script = Sequence[tuple[Sequence[tuple[Any, ...]], bool]]
"""Actions, and whether the next ones follow before the event loop has carried these out."""


class CheckedWorld(World):
    """A world that checks everything that happens against what is promised."""

    def check_batch(self, slot: Slot, batch: Sequence[Request], padded_rows: int) -> None:
        now_ns, rows, policy = self.clock.now_ns(), sum(one.like.rows for one in batch), self.policy
        assert slot.started
        assert not slot.stopped
        assert slot.instance not in self.gone
        assert all(one.waits for one in batch)
        assert {*batch}.isdisjoint({*self.executing(), *self.handed_over()})
        assert len({one.like.key for one in batch}) == 1
        assert rows <= self.batcher.allowed_rows or len(batch) == 1
        assert len(batch) <= (policy.max_batch_requests or NEVER)
        assert padded_rows == min(size for size in policy.batch_sizes or (rows,) if size >= rows)
        assert all(one.deadline_ns > now_ns for one in batch)
        assert all(one.search is batch[0].search for one in batch)
        for one in batch:
            assert len(batch) == 1 or not one.may_be_deadly
        if batch[0].search is None:
            for one in batch:
                rejects = policy.queue_policy(one.level).timeout_action is TimeoutAction.REJECT
                assert one.timeout_at_ns > now_ns or not rejects
            is_busy = any(one.busy for one in self.slots_of(slot.instance))
            assert not is_busy or not self.idle()

    def check(self) -> None:
        """Check the state that holds until time passes or somebody acts: the event loop has nothing left to do."""
        assert not self.complaints.all
        executing, ahead = self.executing(), self.handed_over()
        for one in self.requests:
            one.is_over = one.is_over or (one.future.done() and one not in executing and one not in ahead)
        self.check_counters(executing, ahead)
        self.check_answers()
        self.check_slots()
        self.check_who_waits(
            [one for one in self.requests if one.waits and not one.vague and one not in executing | ahead]
        )
        if self.draining and self.draining.done():
            assert all(one.future.done() for one in self.requests)
        elif self.draining:
            assert not all(one.future.done() for one in self.requests) or executing

    def check_counters(self, executing: set[Request], ahead: set[Request]) -> None:
        reported = len(self.drops) + sum(len(one.waits_ns) + one.failed + one.cancelled for one in self.reports)
        reported -= self.refused.total()
        waiting = len(self.requests) - reported - len(executing)
        assert self.batcher.waiting_requests == len(self.announced) + waiting
        assert self.arrivals.executing == len(executing) + len(ahead)
        waits = [one for one in self.requests if one in ahead or (one.waits and one not in executing)]
        fresh = [one for one in waits if one.search is None]
        if not any(one.vague for one in waits):
            assert waiting == len(waits)
            for level in range(1, self.policy.priority_levels + 1) or [0]:
                assert self.batcher.waiting_of_level(level) == sum(one.level == level for one in waits)
            assert self.batcher.lanes == len({one.like.key for one in fresh if one not in ahead})
            assert len(fresh) <= self.shared.requests <= len(waits)
            assert sum(one.like.size_bytes for one in fresh) <= self.shared.size_bytes
            assert self.shared.size_bytes <= sum(one.like.size_bytes for one in waits)

    def check_answers(self) -> None:
        done = [one for one in self.requests if one.future.done()]
        assert Counter(self.notified) == Counter(done)
        answered = [one for one in self.notified if not one.future.cancelled()]
        if self.policy.preserve_ordering:
            order = {one: number for number, one in enumerate(self.requests)}
            assert answered == sorted(answered, key=order.__getitem__)
            first = next((one for one in self.requests if not one.future.done()), None)
            assert first is None or first.answer is None
        else:
            assert all(one.answer is None or one.future.done() for one in self.requests)

    def check_slots(self) -> None:
        for one in self.slots:
            counts = one.busy and not one.hangs
            assert one.stopped == (one.instance in self.gone and not counts)
            is_limited = self.policy.execution_limit_ns and counts and one.gives_back and not self.frozen
            assert one.executes_ns < LIMIT_NS or not is_limited
            is_overdue = one.executes_ns > self.expected_ns + 2 * MS
            assert not (one.next and one.gives_back and is_overdue)
            if counts and not one.stages and all(each.future.cancelled() for each in one.current):
                assert one.current in one.called_off

    def check_who_waits(self, waiting: Sequence[Request]) -> None:
        now_ns, policy, idle = self.clock.now_ns(), self.policy, self.idle()
        for one in waiting:
            rejects = policy.queue_policy(one.level).timeout_action is TimeoutAction.REJECT
            assert one.deadline_ns > now_ns
            assert one.search or one.timeout_at_ns > now_ns or not rejects
        if not idle:
            return
        assert all(one.search is None for one in waiting)
        waits_for_crowd = self.setup.crowds and now_ns < self.acted_ns + LONGEST_PATIENCE_NS
        if not self.flushed and (policy.await_returns or waits_for_crowd):
            return
        delay_ns = 0 if self.flushed else policy.max_queue_delay_ns
        for key in {one.like.key for one in waiting}:
            assert any(now_ns < one.arrived_ns + delay_ns for one in waiting if one.like.key == key)

    def check_end(self, one: Request) -> None:
        """Check that a request ended as it had to."""
        if one.future.cancelled():
            return
        error = one.future.exception()
        if isinstance(one.answer, ExecutionTimeout):
            assert isinstance(error, ExecutionTimeout)
        elif isinstance(one.answer, Fault):
            assert isinstance(error, ExecutionFailed)
            assert error.__cause__ is one.answer
        elif one.answer is not None:
            assert one.answer is (error or one.future.result())
        elif isinstance(error, ExecutionFailed):
            assert error.__cause__ in one.faults
        elif isinstance(error, QueueTimeout):
            assert self.clock.now_ns() >= min(one.deadline_ns, one.timeout_at_ns)
        elif isinstance(error, DeadlineUnreachable):
            assert one.deadline_ns != NEVER
            assert self.policy.deadline_aware
        elif isinstance(error, NoInstance):
            assert self.was_suspended
        else:
            assert isinstance(error, BatcherClosed)
            assert self.closed

    def check_reports(self) -> None:
        """Check that the observer was told of each request once, with the same outcome as its caller."""
        ends = Counter[str](self.refused)
        for one in self.requests:
            error = None if one.future.cancelled() else one.future.exception()
            kinds = {QueueTimeout: "expired", DeadlineUnreachable: "unreachable"}
            kinds |= {NoInstance: "no_instance", BatcherClosed: "closed", type(None): "answered"}
            ends["cancelled" if one.future.cancelled() else kinds.get(type(error), "failed")] += 1
        reported = Counter(drop.value for drop in self.drops)
        for report in self.reports:
            reported.update(answered=len(report.waits_ns), failed=report.failed, cancelled=report.cancelled)
        assert reported.total() == ends.total()
        if self.policy.preserve_ordering:  # a caller may go while its answer is held back
            assert all(reported[kind] >= ends[kind] for kind in ends if kind != "cancelled")
        else:
            assert +reported == +ends

    # Running a script.

    async def settle(self) -> None:
        for _ in range(6):
            await asyncio.sleep(0)
        self.acted_ns = min(self.acted_ns, self.clock.now_ns())
        self.drains = self.draining is not None
        self.flushed = self.flushed or self.drains
        self.check()

    async def play(self, script: Script, ending: str, epilogue: Script) -> None:
        """Run `script`. `ending` says whether the batcher then keeps serving, is flushed, drains while `epilogue`
        runs, or closes at once."""
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: self.complaints.all.append(context))
        self.batcher.start()
        await self.act(script)
        if ending == "flush":
            self.flush()
            await self.settle()
        if ending == "drain":
            self.drain()
            await self.act(epilogue)
        if ending != "close":
            await self.until_all_is_answered()
        if ending in ("serve", "flush"):
            await self.serve_on()
        self.closed = True
        self.batcher.close()
        await asyncio.sleep(0)
        self.check_after_the_end()
        if self.draining is not None:
            await self.draining
        while slots := [one for one in self.slots if one.busy]:
            self.end(slots[0], "honestly")
        assert not self.owed

    async def act(self, script: Script) -> None:
        for actions, hurries in script:
            for name, *arguments in actions:
                if name not in ("advance", "freeze"):
                    self.acted_ns = NEVER  # the loop is about to learn of it
                getattr(self, name)(*arguments)
                if not hurries:
                    await self.settle()
        await self.settle()

    async def until_all_is_answered(self, how: str = "honestly") -> None:
        for _ in range(10 * len(self.requests) + 20):
            if all(one.future.done() for one in self.requests) and not self.announced and not self.executing():
                return
            self.acted_ns = self.clock.now_ns()
            if not self.in_use:
                self.add()
            elif slots := [one for one in self.slots if one.busy and not one.hangs]:
                self.end(slots[0], how)
            else:
                self.advance(LONG_NS)
            await self.settle()
        raise AssertionError("some are never answered")

    async def serve_on(self) -> None:
        """Check that nothing that has happened takes room from new requests, or keeps them from being served."""
        if not self.in_use:
            self.add()
        self.advance(2 * LONG_NS)  # whatever was learned of memory is forgotten
        await self.settle()
        limits, shared = self.policy.limits, self.shared
        level = self.policy.level_of(1)
        bounds = [self.policy.queue_policy(level).max_queue_size, limits.max_rows, shared.max_requests, 8]
        count = min(bound for bound in bounds if bound)
        size_bytes = min(bound for bound in (limits.max_bytes, shared.max_bytes, 1000) if bound) // count
        before = len(self.requests)
        self.submit(Like(1, "next", size_bytes, 1, 0, NEVER, None), count, False)
        assert len(self.requests) == before + count
        await self.settle()
        await self.until_all_is_answered("well")
        assert all(one.answer is not None for one in self.requests[before:]) or self.policy.queue.default_timeout_ns

    def check_after_the_end(self) -> None:
        assert not self.complaints.all
        assert all(one.future.done() for one in self.requests)
        for one in self.requests:
            self.check_end(one)
        self.check_reports()
        assert self.clock.alarms == 0
        assert self.batcher.waiting_requests == self.batcher.lanes == 0
        assert self.shared.requests == self.shared.size_bytes == 0
        assert all(one.stopped for one in self.slots)


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    ordered = draw(st.sampled_from([False, False, True]))
    levels = 0 if ordered else draw(st.sampled_from([0, 0, 2]))
    max_rows = draw(st.sampled_from([1, 4, 4, 8]))
    actions = [TimeoutAction.REJECT] if ordered else [*TimeoutAction]
    queue = QueuePolicy(
        max_queue_size=draw(st.sampled_from([0, 0, 0, 3])),
        default_timeout_ns=draw(st.sampled_from([0, 0, 0, 30 * MS])),
        allow_timeout_override=draw(st.booleans()),
        timeout_action=draw(st.sampled_from(actions)),
    )
    policy = BatchPolicy(
        max_batch_rows=max_rows,
        preferred_batch_rows=draw(st.sampled_from([(), (), (2,)])) if max_rows > 1 else (),
        max_queue_delay_ns=draw(st.sampled_from([0, 0, 5 * MS])),
        max_batch_requests=draw(st.sampled_from([0, 0, 2])),
        priority_levels=levels,
        default_priority_level=levels,
        queue=queue,
        limits=QueueLimits(max_rows=draw(st.sampled_from([0, 0, 8])), max_bytes=draw(st.sampled_from([0, 0, 30]))),
        preserve_ordering=ordered,
        batch_sizes=draw(st.sampled_from([(), (), (2, 4)])) if max_rows == 4 else (),
        isolate_failures=draw(st.sampled_from([True, True, True, False])),
        deadline_aware=draw(st.booleans()),
        await_returns=draw(st.sampled_from([False, False, True])),
        execution_limit_ns=draw(st.sampled_from([0, 0, LIMIT_NS])),
    )
    return Setup(
        policy,
        instances=draw(st.sampled_from([1, 2, 2, 3])),
        slots=draw(st.sampled_from([1, 2])),
        stages=draw(st.booleans()),
        replaces=draw(st.sampled_from([True, True, True, False])),
        crowds=draw(st.sampled_from([False, False, False, True])),
        max_shared=draw(st.sampled_from([(0, 0), (0, 0), (6, 40)])),
        full=draw(st.sampled_from([False, False, True])),
    )


LIKES = st.builds(
    Like,
    rows=st.sampled_from([1, 1, 1, 1, 2, 3, 9]),
    key=st.sampled_from("aaab"),
    size_bytes=st.sampled_from([0, 0, 7]),
    priority=st.sampled_from([0, 1, 2]),
    timeout_ns=st.sampled_from([0, 0, 0, 9 * MS]),
    patience_ns=st.sampled_from([NEVER, NEVER, NEVER, NEVER, 15 * MS, 45 * MS]),
    poison=st.sampled_from([*[None] * 9, *POISONS]),
)
WHICH = st.integers(0, 5)
TIMES_MS = [1, 1, 2, 5, 5, 10, 18, 20, 60, 1000, 10_000]
TIMES_NS = st.sampled_from([1, *(time_ms * MS for time_ms in TIMES_MS)])
HOW = st.sampled_from([*["well"] * 4, *["honestly"] * 6, "refusing", *Blame, Blame.SIZE, Blame.INSTANCE_BEFORE])
ONE = Like(1, "a", 0, 0, 0, NEVER, None)
DEADLY = ONE._replace(patience_ns=45 * MS, poison=Blame.FATAL)
ALMOST_DONE = [("submit", ONE, 3, False), ("advance", 18 * MS), ("submit", ONE, 2, False)]
PHRASES: dict[str, list[tuple[Any, ...]]] = {
    # After three of these, the batcher knows that an execution takes 20 ms.
    "one takes 20 ms": [("submit", ONE, 1, False), ("advance", 20 * MS), ("finish", 0, "well", False)],
    # Once that is known, instances get their next batches ahead.
    "almost done": ALMOST_DONE,
    "done but not reported": [*ALMOST_DONE, ("end_unreported", 0), ("advance", 60 * MS)],
    "lost before the next one": [*ALMOST_DONE, ("finish", 0, Blame.INSTANCE, False)],
    "lost during the next one": [*ALMOST_DONE, ("finish", 0, Blame.INSTANCE, True), ("submit", ONE, 2, False)],
    "deadly, each of them": [("submit", DEADLY, 5, False), *[("finish", 0, "honestly", False), ("add",)] * 5],
    "deadly, until it's too late": [
        ("submit", DEADLY, 3, False),
        ("finish", 0, "honestly", False),
        ("advance", 45 * MS),
    ],
}
ARGUMENTS: dict[str, list[st.SearchStrategy[Any]]] = {
    "advance": [TIMES_NS],
    "submit": [LIKES, st.sampled_from([1, 1, 2, 3, 5]), st.booleans()],
    "finish": [WHICH, HOW, st.booleans()],
    "cancel": [WHICH],
    "cancel_all": [],
    "end_unreported": [WHICH],
    "lose": [WHICH],
    "add": [],
    "suspend": [],
    "flush": [],
    "freeze": [TIMES_NS],
}
WEIGHTS = Counter(advance=5, submit=8, finish=10, cancel=3, lose=1, add=4, suspend=1)
RARE = ["flush", "freeze", "cancel_all", "cancel_all", *["advance"] * 4]


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[tuple[Any, ...]], bool]:
    """Actions, and whether the next ones follow before the event loop has carried these out."""
    name = draw(st.sampled_from([*WEIGHTS.elements(), *PHRASES, "rare"]))
    name = draw(st.sampled_from(RARE)) if name == "rare" else name
    actions = PHRASES.get(name) or [(name, *map(draw, ARGUMENTS[name]))]
    return actions, draw(st.sampled_from([False, False, True]))


@settings(max_examples=300 if LONG else 100, suppress_health_check=[HealthCheck.too_slow])
@given(
    setup=setups(),
    measured=st.sampled_from([True, True, False]),
    # Lists are short: about five steps.
    script=st.tuples(*[st.lists(steps(), max_size=12)] * 6).map(lambda parts: [*chain(*parts)]),
    epilogue=st.lists(steps(), max_size=12),
    ending=st.sampled_from(["serve", "flush", "drain", "close"]),
)
def test_whatever_happens_every_request_gets_the_answer_that_is_due(
    setup: Setup, measured: bool, script: Script, ending: str, epilogue: Script
) -> None:
    world, log = CheckedWorld(setup), logging.getLogger("paceline.scheduler")
    log.addHandler(world.complaints)
    try:
        asyncio.run(world.play([*[(PHRASES["one takes 20 ms"], False)] * 3 * measured, *script], ending, epilogue))
    finally:
        log.removeHandler(world.complaints)
