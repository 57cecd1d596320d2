"""The instances of a batcher, by their runners: which are free, what the others execute and will execute next, and
which are late or were given up.

Lives here: bookkeeping, and telling runners to start and stop. Must not: choose batches, or what becomes of requests;
that is `batcher`. The rule: a runner is free, or it executes what `running` says, or it was given up. A runner given up
because of another slot of its instance finishes its last execution; nothing from a runner that hangs counts any more.

Runners of one instance are its *slots*. They execute side by side, but only one at a time computes; what another is
given meanwhile is only prepared. So the first batch of an instance computes at once, and a further one is prepared
before it can.

An instance that gets its next batch only after reporting that it is done waits a millisecond or two for the event loop
and the interpreter lock: for many batches, as much as a tenth of their time. So it gets the batch shortly before. Not
earlier: as long as nothing is chosen, later, cancelled and urgent requests all fare better.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from paceline.scheduler.clock import Clock
from paceline.scheduler.policy import NEVER
from paceline.scheduler.request import Batch, P, R, Request, RequestT
from paceline.scheduler.runner import AnyRunner, Runner
from paceline.scheduler.watchdog import Watchdog

RunnerT = TypeVar("RunnerT")

_LEAD_NS = 2_000_000
_LEAD_SHARE = 4
"""An instance counts as about to be done for the last 2 ms of an execution, but no longer than for a quarter of it."""
_WORTH_NS = 1_000_000
"""The end of shorter executions can't be predicted exactly enough."""


class InstanceReplacer(Protocol):
    """Replaces instances that were given up. Called on the event loop."""

    def on_hang(self, runner: AnyRunner, others: Sequence[AnyRunner]) -> None:
        """The runner's execution exceeds the policy's limit. Its batch has failed, and its instance gets no more.
        `others` are that instance's slots that still execute. A replacement is passed to `Batcher.add`."""

    def on_loss(self, runner: AnyRunner, error: BaseException) -> None:
        """The runner's instance can't execute any more; its execution, if it had one, has ended. `error` is what that
        raised, or what ended the instance. Otherwise as `on_hang`; slots that still execute may be reported by
        `on_return`."""

    def on_return(self, runner: AnyRunner) -> None:
        """The execution that the runner had when its instance was given up has ended after all, or failed."""


class Slots(Generic[RunnerT]):
    """Free runners: `free` is how many, over all instances. `instance_of(runner)` is the instance that a runner is, or
    is a slot of. `idle` are the instances that execute nothing, most recent last."""

    def __init__(self, instance_of: Callable[[RunnerT], Hashable]) -> None:
        self._instance_of = instance_of
        self._free: dict[Hashable, list[RunnerT]] = {}
        self._taken: dict[Hashable, int] = {}
        self.idle: dict[Hashable, None] = {}
        # The other instances that have free slots, in the order in which they will be done.
        self._busy: dict[Hashable, None] = {}
        self.free = 0

    def add(self, runner: RunnerT) -> None:
        """Add `runner`, which is free."""
        instance = self._instance_of(runner)
        self._free.setdefault(instance, []).append(runner)
        self.free += 1
        self._file(instance)

    # hot path: 1 us with `take`
    def back(self, runner: RunnerT) -> None:
        """Return `runner`, which `take` gave: it is free again."""
        self._untake(self._instance_of(runner))
        self.add(runner)

    # hot path
    def take(self) -> RunnerT:
        """A runner of the instance that became idle last, with warm caches; else of a busy one. There has to be one."""
        instance = self.idle.popitem()[0] if self.idle else next(iter(self._busy))
        free = self._free[instance]
        runner = free.pop()
        self.free -= 1
        self._taken[instance] = self._taken.get(instance, 0) + 1
        if free:
            self._busy[instance] = None
        else:
            del self._free[instance]
            self._busy.pop(instance, None)
        return runner

    def put_last(self, runner: RunnerT) -> None:
        """If `runner` is free, have all others taken before it, and their instances before its own."""
        instance = self._instance_of(runner)
        free = self._free.get(instance, [])
        if runner in free:
            free.remove(runner)
            free.insert(0, runner)
        if instance in self.idle:
            self.idle = {instance: None, **self.idle}

    def remove(self, runner: RunnerT) -> None:
        """Remove `runner`, free or not: it gets nothing more."""
        instance = self._instance_of(runner)
        free = self._free.get(instance, [])
        if runner not in free:
            self._untake(instance)
        else:
            free.remove(runner)
            self.free -= 1
        if not free:
            self._free.pop(instance, None)
            self.idle.pop(instance, None)
            self._busy.pop(instance, None)
        else:
            self._file(instance)

    def _untake(self, instance: Hashable) -> None:
        taken = self._taken.pop(instance) - 1
        if taken:
            self._taken[instance] = taken

    def _file(self, instance: Hashable) -> None:
        if instance in self._taken:
            self.idle.pop(instance, None)
            self._busy.setdefault(instance)
        else:
            self._busy.pop(instance, None)
            self.idle[instance] = None


class _End(NamedTuple):
    """An execution is likely to end at `at_ns`. From `due_ns` on, the instance is about to be done. If it still
    executes at `over_ns`, which is as long after the end as `due_ns` is before, the prediction was wrong."""

    due_ns: int
    at_ns: int
    over_ns: int


class Ahead(Generic[RunnerT, RequestT]):
    """By runner, the `ends` of executions that can be predicted, and the batch that it goes on with (`next`).
    `at_once`: a runner may get that as soon as it executes, and isn't overdue."""

    def __init__(self, *, at_once: bool = False) -> None:
        self._at_once = at_once
        self.next: dict[RunnerT, Batch[RequestT]] = {}
        self.ends: dict[RunnerT, _End] = {}

    # hot path
    def begin(self, runner: RunnerT, now_ns: int, expected_ns: int) -> None:
        """The runner begins an execution that is expected to take `expected_ns` (0: unknown)."""
        if self._at_once:
            self.ends[runner] = _End(now_ns, now_ns + expected_ns, NEVER)
        elif expected_ns >= _WORTH_NS:
            lead_ns, at_ns = min(_LEAD_NS, expected_ns // _LEAD_SHARE), now_ns + expected_ns
            self.ends[runner] = _End(at_ns - lead_ns, at_ns, at_ns + lead_ns)

    # hot path
    def end(self, runner: RunnerT) -> Batch[RequestT] | None:
        """The runner's execution is over. Returns the batch that it goes on with, if any."""
        self.ends.pop(runner, None)
        return self.next.pop(runner, None)

    def hand_no_more(self, runner: RunnerT) -> None:
        """After its execution the runner goes on with nothing, unless it has got its next batch already."""
        if runner not in self.next:
            self.ends.pop(runner, None)

    def about_to_end(self, now_ns: int) -> list[RunnerT]:
        """The runners that may get their next batch, and haven't got it; the next to end first."""
        due = [runner for runner, end in self.ends.items() if end.due_ns <= now_ns < end.over_ns]
        return sorted((runner for runner in due if runner not in self.next), key=lambda runner: self.ends[runner].at_ns)

    def overdue(self, now_ns: int) -> list[RunnerT]:
        """The runners that have got their next batch, and should have begun it by now."""
        return [runner for runner in self.next if self.ends[runner].over_ns <= now_ns]

    def wake_ns(self, now_ns: int, *, requests: int) -> int | None:
        """When the next runner will be overdue or, if there are `requests` for it, about to end; None if none will."""
        moments = [self.ends[runner].over_ns for runner in self.next]
        if requests:
            moments += [end.due_ns for runner, end in self.ends.items() if runner not in self.next]
        return min((moment for moment in moments if now_ns < moment < NEVER), default=None)


class Instances(Generic[P, R]):
    """`running` is what each runner executes, `ahead` when it is likely to be done and what it executes next, `slots`
    which of them are free. `replacer` is notified of runners that were given up. `instance_of` is as in `Batcher`,
    `hands_ahead` as in its policy."""

    def __init__(
        self,
        runners: Sequence[Runner[P, R]],
        clock: Clock,
        replacer: InstanceReplacer | None,
        instance_of: Callable[[AnyRunner], Hashable],
        on_given_up: Callable[[], None] = lambda: None,
        *,
        hands_ahead: bool = False,
    ) -> None:
        self._runners = dict.fromkeys(runners)
        self._clock = clock
        self._replacer = replacer
        self._instance_of = instance_of
        self._on_given_up = on_given_up
        self._watchdog: Watchdog[Runner[P, R]] | None = None
        self._calls_off = False
        self.slots: Slots[Runner[P, R]] = Slots(instance_of)
        self.running: dict[Runner[P, R], Batch[Request[P, R]]] = {}
        self.ahead: Ahead[Runner[P, R], Request[P, R]] = Ahead(at_once=hands_ahead)

    def start(self, limit_ns: int, on_late: Callable[[Runner[P, R]], None]) -> None:
        """Start the runners. `on_late` is told of one whose execution takes longer than `limit_ns` (0: no limit)."""
        if limit_ns:
            self._watchdog = Watchdog(limit_ns, self._clock, on_late)
        for runner in self._runners:
            runner.start()
        # A stack: the instance that ran last has the warmest caches.
        for runner in reversed(self._runners):
            self.slots.add(runner)

    @property
    def total_slots(self) -> int:
        """Free or not, of the instances that weren't given up."""
        return len(self._runners)

    def close(self) -> None:
        if self._watchdog is not None:
            self._watchdog.close()
        leaving = [runner for runner in self.running if self.given_up(runner)]
        for runner in (*self._runners, *leaving):
            runner.stop()
        for runner in leaving:
            del self.running[runner]  # its end is then reported, as for others that were given up

    def add(self, runner: Runner[P, R]) -> None:
        """Add a runner, which has been started."""
        self._runners[runner] = None
        self.slots.add(runner)

    # hot path
    def take(self, batch: Batch[Request[P, R]]) -> Runner[P, R]:
        """A free runner, which from now on executes `batch`."""
        runner = self.slots.take()
        self._begin(runner, batch)
        return runner

    # hot path
    def end(self, runner: Runner[P, R]) -> tuple[Batch[Request[P, R]], Batch[Request[P, R]] | None]:
        """Learn that the runner's execution is over. Returns its batch, and the next one if it has begun that."""
        if self._watchdog is not None:
            self._watchdog.ended(runner)
        batch = self.running.pop(runner)
        following = self.ahead.end(runner)
        if following is not None:
            self._begin(runner, following)
        elif self.given_up(runner):
            runner.stop()
            self.returned(runner)
        else:
            self.slots.back(runner)
        return batch, following

    def has_begun(self, runner: Runner[P, R]) -> None:
        """Learn that the runner has ended its execution and begun the next one, though it hasn't reported that yet: its
        time limit starts again."""
        if self._watchdog is not None:
            self._watchdog.began(runner)

    def forget(self, runner: Runner[P, R]) -> None:
        """Forget the runner's batch, which it won't execute."""
        del self.running[runner]
        self.ahead.end(runner)
        if self._watchdog is not None:
            self._watchdog.ended(runner)

    def hang(self, runner: Runner[P, R]) -> None:
        """Give up the runner's execution, which can't be interrupted, and its instance."""
        del self.running[runner]
        self.ahead.end(runner)
        if self.given_up(runner):
            runner.stop()
            return
        others = self._give_up(runner)
        if self._replacer is not None:
            self._replacer.on_hang(runner, others)

    def may_be_lost(self, runner: Runner[P, R]) -> bool:
        """Whether the runner's instance wasn't given up before, and `replacer` can replace it."""
        return self._replacer is not None and not self.given_up(runner)

    def given_up(self, runner: Runner[P, R]) -> bool:
        """Whether the runner's instance was given up."""
        return runner not in self._runners

    def lose(self, runner: Runner[P, R], error: BaseException) -> None:
        """Give up the runner's instance, which can't execute any more."""
        self.ahead.end(runner)
        self._give_up(runner)
        if self._replacer is not None:
            self._replacer.on_loss(runner, error)

    def returned(self, runner: Runner[P, R]) -> None:
        """Report that the runner's execution has ended, after its instance was given up."""
        if self._replacer is not None:
            self._replacer.on_return(runner)

    def call_off_soon(self, loop: asyncio.AbstractEventLoop) -> None:
        """End executions that nobody waits for any more, where the runner can: once for all that are cancelled
        together."""
        if not self._calls_off:
            self._calls_off = True
            loop.call_soon(self._call_off)

    def _call_off(self) -> None:
        self._calls_off = False
        for runner, batch in self.running.items():
            if all(request.cancelled() for request in batch.requests):
                runner.call_off()

    # hot path
    def _begin(self, runner: Runner[P, R], batch: Batch[Request[P, R]]) -> None:
        self.running[runner] = batch
        if runner.stages and not self.given_up(runner):
            self.ahead.begin(runner, self._clock.now_ns(), batch.expected_ns)
        if self._watchdog is not None:
            self._watchdog.began(runner)

    def _give_up(self, runner: Runner[P, R]) -> Sequence[Runner[P, R]]:
        """Give `runner`'s instance nothing more. Returns its other slots that still execute: their answers count."""
        # Slots that execute nothing are stopped now, the others when they end: until then they are only in `running`.
        instance, executing = self._instance_of(runner), list[Runner[P, R]]()
        for one in [one for one in self._runners if self._instance_of(one) == instance]:
            del self._runners[one]
            self.slots.remove(one)
            if one in self.running:
                self.ahead.hand_no_more(one)
                executing.append(one)
            else:
                one.stop()
        self._on_given_up()
        return executing
