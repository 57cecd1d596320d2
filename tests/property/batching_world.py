"""A batcher and everything around it, on a manual clock: callers, instances whose executions end in every possible way,
the replacer of instances, and what these know about each request. `test_batcher.py` drives and checks it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from paceline.scheduler.batcher import Batcher
from paceline.scheduler.errors import (
    BatcherClosed,
    DeadlineUnreachable,
    ExecutionTimeout,
    NoInstance,
    QueueFull,
    RequestTooLarge,
    SchedulerError,
)
from paceline.scheduler.failures import Blame
from paceline.scheduler.observer import BatchReport
from paceline.scheduler.policy import NEVER, BatchPolicy
from paceline.scheduler.request import Request as Submitted
from paceline.scheduler.runner import Done
from paceline.scheduler.testing import ManualClock, RecordingObserver, StepRunner
from paceline.scheduler.waiting import SharedQueueLimits
from tests.property.batching_requests import (
    LIMIT_NS,
    MAX_ENDS,
    MAX_UNBEGUN,
    POISONS,
    Arrivals,
    Complaints,
    Fault,
    Like,
    Request,
    Search,
)


class Slot(StepRunner[Request, Any]):
    """Has the world check each batch that it is given. `ended`: its instance has ended by itself. `hangs`: its
    execution was given up."""

    def __init__(self, world: World, instance: int) -> None:
        super().__init__(world.clock, stages=world.setup.stages)
        self.world, self.instance = world, instance
        self.ended = self.hangs = False

    @property
    def current(self) -> Sequence[Request]:
        return self._current[0] if self._current is not None else ()

    @property
    def executes_ns(self) -> int:
        return self.world.clock.now_ns() - self._current[2] if self._current is not None else 0

    def run(self, payloads: Sequence[Request], padded_rows: int, done: Done[Any]) -> None:
        self.world.check_batch(self, payloads, padded_rows)
        super().run(payloads, padded_rows, done)

    def take_back(self) -> bool:
        """A batch isn't begun before the end of its predecessor is reported."""
        if self.gives_back and self._next is None:
            self._current = None
        return super().take_back()

    def call_off(self) -> None:
        assert all(one.future.cancelled() for one in self.current)
        super().call_off()


@dataclass(frozen=True)
class Setup:
    policy: BatchPolicy
    instances: int
    slots: int
    stages: bool
    replaces: bool
    crowds: bool
    max_shared: tuple[int, int]
    full: bool


class World(RecordingObserver):
    """A batcher, and everything around it."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.setup, self.policy = setup, setup.policy
        self.clock = ManualClock(now_ns=1)
        self.slots = [Slot(self, number // setup.slots) for number in range(setup.instances * setup.slots)]
        self.shared = SharedQueueLimits(*setup.max_shared)
        self.arrivals = Arrivals(crowds=setup.crowds)
        self.gone: set[int] = set()
        self.owed: set[Slot] = set()
        self.requests: list[Request] = []
        self.announced: list[Request] = []
        self.notified: list[Request] = []
        self.refused: Counter[str] = Counter()
        self.draining: asyncio.Task[None] | None = None
        self.ending: Slot | None = None
        self.flushed = self.suspended = self.frozen = self.drains = self.closed = False
        self.was_suspended = False
        self.acted_ns = self.longest_ns = 0
        self.complaints = Complaints()
        self.batcher: Batcher[Request, Any] = Batcher(
            self.policy,
            self.slots,
            clock=self.clock,
            observer=self,
            blames=lambda error: error.blame,  # type: ignore[attr-defined]
            replacer=self if setup.replaces else None,
            shared_limits=self.shared,
            instance_of=self.instance_of,
            arrivals=self.arrivals,
        )

    # What the batcher calls.

    def instance_of(self, slot: Slot) -> int:
        assert slot.instance not in self.gone, "asked about an instance that was given up"
        return slot.instance

    def on_batch(self, report: BatchReport) -> None:
        super().on_batch(report)
        if isinstance(report.error, ExecutionTimeout):
            requests = [entry.payload for entry in report.requests]
            slot = next(one for one in self.slots if [*one.current] == requests and not one.hangs)
            slot.hangs = True
            self.gone.add(slot.instance)
            self.settle_with(requests, report.error)

    def on_hang(self, slot: Slot, others: Sequence[Slot]) -> None:
        assert slot.executes_ns >= LIMIT_NS
        self.give_up(slot, [slot, *others])

    def on_loss(self, slot: Slot, error: BaseException) -> None:
        assert slot is self.ending or not slot.busy
        others = [one for one in self.slots_of(slot.instance) if one.current and not one.hangs]
        self.give_up(slot, others)

    def give_up(self, slot: Slot, executing: Sequence[Slot]) -> None:
        assert slot.instance not in self.gone
        assert {*executing} == {one for one in self.slots_of(slot.instance) if one.current and not one.hangs}
        self.gone.add(slot.instance)
        self.owed.update(executing)

    def on_return(self, slot: Slot) -> None:
        assert slot in self.owed or self.closed  # then two executions may end that nothing is known of any more
        self.owed.discard(slot)

    def on_answers(self, ended: list[Submitted[Request, Any]]) -> None:
        self.notified += [one.payload for one in ended]

    # Actions.

    def submit(self, like: Like, count: int, announces: bool) -> None:
        requests = [self.request(like) for _ in range(count)]
        if not announces:
            self.take(requests)
            return
        self.announced += requests
        for one in requests:
            self.batcher.announce(self.take, one)

    def request(self, like: Like) -> Request:
        now_ns, level = self.clock.now_ns(), self.policy.level_of(like.priority)
        deadline_ns = NEVER if like.patience_ns == NEVER else now_ns + like.patience_ns
        timeout_at_ns = self.policy.queue_policy(level).timeout_at_ns(now_ns, like.timeout_ns)
        one = Request(like, level, now_ns, deadline_ns, timeout_at_ns, None)  # type: ignore[arg-type]
        one.vague = self.policy.preserve_ordering and min(deadline_ns, timeout_at_ns) != NEVER
        return one

    def take(self, requests: list[Request]) -> None:
        self.announced = [one for one in self.announced if one not in requests]
        for _, group in groupby(requests, key=lambda one: one.like):
            self.take_group([*group])

    def take_group(self, group: Sequence[Request]) -> None:
        for one in group:
            like = one.like
            one.future = Submitted(one, like.rows, like.key, one.arrived_ns, deadline_ns=one.deadline_ns)
            one.future.size_bytes, one.future.priority, one.future.timeout_ns = like[2:5]
        refusals = self.batcher.submit([one.future for one in group])
        assert len(refusals) in (0, len(group))
        # Each is judged by those that came before it: the later ones of its group hadn't come yet.
        may_wait = self.may_wait()
        for one, error in zip(group, refusals or [None] * len(group), strict=True):
            if error is None:
                self.accept(one)
                may_wait.append(one)
            else:
                self.refuse(one, error, may_wait)

    def refuse(self, one: Request, error: SchedulerError, may_wait: Sequence[Request]) -> None:
        assert not one.future.waits
        assert not one.future.done()
        if isinstance(error, RequestTooLarge):
            assert one.like.rows > self.policy.max_batch_rows
        elif isinstance(error, QueueFull):
            assert not self.has_room(one, may_wait)
            self.refused[f"queue_full_{error.what}"] += 1
        elif isinstance(error, DeadlineUnreachable):
            assert self.policy.deadline_aware
            assert one.deadline_ns != NEVER
            self.refused["unreachable"] += 1
        elif isinstance(error, NoInstance):
            assert self.suspended
            self.refused["no_instance"] += 1
        else:
            assert isinstance(error, BatcherClosed)
            assert self.drains or self.closed
            self.refused["closed"] += 1

    def accept(self, one: Request) -> None:
        assert not any((self.suspended, self.drains, self.closed))
        assert one.future.waits
        executing = self.executing()
        certain = [each for each in self.requests if each.waits and not (each.vague or each.search)]
        assert self.has_room(one, (each for each in certain if each not in executing))
        one.future.on_answers = self.on_answers
        self.requests.append(one)

    def has_room(self, one: Request, waiting: Iterable[Request]) -> bool:
        together = [one, *waiting]
        of_level = sum(each.level == one.level for each in together)
        rows, size_bytes = (sum(each.like.rows for each in together), sum(each.like.size_bytes for each in together))
        limits, shared = self.policy.limits, self.shared
        return (
            of_level <= (self.policy.queue_policy(one.level).max_queue_size or NEVER)
            and rows <= (limits.max_rows or NEVER)
            and size_bytes <= min(limits.max_bytes or NEVER, shared.max_bytes)
            and len(together) <= shared.max_requests
        )

    def cancel(self, which: int) -> None:
        if self.requests:
            self.requests[-1 - which % len(self.requests)].future.cancel()

    def cancel_all(self) -> None:
        for one in self.requests:
            one.future.cancel()

    def advance(self, by_ns: int) -> None:
        self.clock.advance(by_ns)

    def freeze(self, by_ns: int) -> None:
        self.frozen = True
        self.clock.freeze(by_ns)

    def end_unreported(self, which: int) -> None:
        """Let an execution end and the next one begin without a report of that yet."""
        if slots := [one for one in self.slots if one.next and not one.hangs]:
            slots[which % len(slots)].gives_back = False

    def finish(self, which: int, how: Blame | str, begins: bool) -> None:
        """End an execution. If the next one `begins` at once, it can no longer be taken back."""
        if slots := [one for one in self.slots if one.busy]:
            slot = slots[which % len(slots)]
            slot.gives_back = not (begins and slot.next)
            self.end(slot, how)
            slot.gives_back = True
            assert slot.instance in self.gone or self.closed or not slot.ended or slot.hangs

    def end(self, slot: Slot, how: Blame | str) -> None:
        self.ending = slot
        batch, counts = slot.current, not (slot.hangs or self.closed)
        blame = how if isinstance(how, Blame) else None
        if how == "honestly":
            is_full = self.setup.full and not slot.instance
            poisons = {one.like.poison for one in batch} | ({Blame.SIZE} if is_full else set())
            blame = next((each for each in POISONS if each in poisons), None)
        if blame is not None:
            error = Fault(blame)
            may_fail = self.failing(slot, batch, error) if counts else ()
            slot.fail(error)
            for one in may_fail:
                one.is_over = one.is_over or one.future.done()
                one.vague = one.vague or self.policy.preserve_ordering
        else:
            self.longest_ns = max(self.longest_ns, slot.executes_ns)
            results: list[Any] = [object() for _ in batch]
            if how == "refusing":
                results[::2] = [ValueError() for _ in batch[::2]]
            for one, result in zip(batch, results, strict=True):
                self.settle_with([one] if counts else (), result)
            slot.finish_with(results)
        self.ending = None

    def settle_with(self, requests: Iterable[Request], answer: object) -> None:
        for one in requests:
            one.answer, one.is_over = answer, True

    def failing(self, slot: Slot, batch: Sequence[Request], error: Fault) -> Sequence[Request]:
        """Note who has to fail, and return who may fail, because `error` ends their execution."""
        blame, is_one, is_lost = error.blame, len(batch) == 1, slot.instance in self.gone
        if blame is Blame.INSTANCE_BEFORE and (is_lost or self.setup.replaces):
            for one in batch:
                one.unbegun += 1
            self.settle_with((one for one in batch if one.unbegun >= MAX_UNBEGUN), error)
            return ()
        search = batch[0].search or Search(batch)
        for one in batch:
            one.search, one.may_be_deadly = search, one.may_be_deadly or blame is Blame.FATAL
        search.ends += blame is Blame.FATAL
        if not self.policy.isolate_failures or blame not in POISONS:
            self.settle_with(batch, error)
        elif blame is Blame.SIZE and not is_one:
            # Where there are few sizes, fewer requests needn't be fewer rows for the model.
            may_fail = batch if self.policy.batch_sizes else ()
            for one in may_fail:
                one.faults.append(error)
            return may_fail
        elif is_one or (blame is Blame.FATAL and search.ends >= MAX_ENDS):
            self.settle_with(batch, error)
            if blame is Blame.FATAL and search.ends >= MAX_ENDS:
                executing = self.executing()
                others = [one for one in search.members if one.waits]
                self.settle_with((one for one in others if not (one.vague or one in executing)), error)
                for one in others:
                    one.faults.append(error)
                return others
        return ()

    def lose(self, which: int) -> None:
        slot = self.slots[-1 - which % len(self.slots)]
        slot.ended = slot.ended or (self.setup.replaces and slot.instance not in self.gone)
        self.batcher.lose(slot, Fault(Blame.INSTANCE))
        assert slot.instance in self.gone or slot.busy or not slot.ended or self.closed

    def add(self) -> None:
        if len(self.in_use) < self.setup.instances:
            new = [Slot(self, self.slots[-1].instance + 1) for _ in range(self.setup.slots)]
            self.slots += new
            for one in new:
                self.batcher.add(one)
            self.suspended = False

    def suspend(self) -> None:
        if not self.in_use:
            self.batcher.suspend()
            self.suspended, self.was_suspended = not self.draining, True
            at_work = {*self.executing(), *self.handed_over()}
            for one in self.requests:
                one.is_over = one.is_over or one not in at_work

    def flush(self) -> None:
        self.batcher.flush()
        self.flushed = True

    def drain(self) -> None:
        self.draining = asyncio.ensure_future(self.batcher.drain())

    # What is known of instances and requests.

    @property
    def in_use(self) -> set[int]:
        return {one.instance for one in self.slots} - self.gone

    @property
    def expected_ns(self) -> int:
        """No execution is expected to take longer than this, extrapolated from those of fewer rows."""
        return 2 * self.policy.max_batch_rows * self.longest_ns

    def slots_of(self, instance: int) -> list[Slot]:
        return [one for one in self.slots if one.instance == instance]

    def executing(self) -> set[Request]:
        return {one for slot in self.slots if not slot.hangs for one in slot.current}

    def handed_over(self) -> set[Request]:
        return {one for slot in self.slots for one in slot.next or ()}

    def may_wait(self) -> list[Request]:
        executing, ahead = self.executing(), self.handed_over()
        return [one for one in self.requests if one in ahead or (not one.is_over and one not in executing)]

    def idle(self) -> set[int]:
        return {one for one in self.in_use if not any(slot.busy for slot in self.slots_of(one))}

    def check_batch(self, slot: Slot, batch: Sequence[Request], padded_rows: int) -> None:
        """Called with each batch that is handed to a slot."""
