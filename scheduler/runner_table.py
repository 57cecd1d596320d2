"""The instances of a batcher, by their runners: which are free, what the others execute, and which were given up.

Lives here: bookkeeping, and telling runners to start and stop. Must not: futures, or what becomes of requests; that is
`batcher`. The rule: a runner is free, or it executes what `running` says, or it was given up. A runner given up because
of another slot of its instance finishes its last execution; nothing from a runner that hangs counts any more.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Sequence
from typing import Generic, Protocol, TypeVar

from paceline.scheduler.ahead import Ahead
from paceline.scheduler.clock import Clock
from paceline.scheduler.executing import Batch
from paceline.scheduler.latency import LatencyModel
from paceline.scheduler.request import Request
from paceline.scheduler.runner import AnyRunner, Runner
from paceline.scheduler.shortages import Shortages
from paceline.scheduler.slots import Slots
from paceline.scheduler.watchdog import Watchdog

__all__ = ["InstanceReplacer", "RunnerTable"]

P = TypeVar("P")
R = TypeVar("R")


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


class RunnerTable(Generic[P, R]):
    """`running` is what each runner executes, `ahead` when it is likely to be done and what it executes next.
    `replacer` is notified of runners that were given up. `instance_of` is as in `Batcher`."""

    def __init__(
        self,
        runners: Sequence[Runner[P, R]],
        clock: Clock,
        latency: LatencyModel,
        replacer: InstanceReplacer | None,
        instance_of: Callable[[AnyRunner], Hashable],
    ) -> None:
        self._runners = tuple(runners)
        self._clock = clock
        self._latency = latency
        self._replacer = replacer
        self.instance_of = instance_of
        self._watchdog: Watchdog[Runner[P, R]] | None = None
        self._leaving: set[Runner[P, R]] = set()
        self._shortages: Shortages[Hashable] = Shortages()
        # Free runners of instances that rest.
        self._held: set[Runner[P, R]] = set()
        self.slots: Slots[Runner[P, R]] = Slots(self.instance_of)
        self.running: dict[Runner[P, R], Batch[Request[P, R]]] = {}
        self.ahead: Ahead[Runner[P, R], Request[P, R]] = Ahead()

    def start(self, limit_ns: int, on_late: Callable[[Runner[P, R]], None]) -> None:
        """Start the runners. `on_late` is called with a runner whose execution takes longer than `limit_ns` (0: no
        limit)."""
        if limit_ns:
            self._watchdog = Watchdog(limit_ns, self._clock, on_late)
        for runner in self._runners:
            runner.start()
        # A stack: the instance that ran last has the warmest caches.
        for runner in reversed(self._runners):
            self.slots.add(runner)

    def close(self) -> None:
        if self._watchdog is not None:
            self._watchdog.close()
        for runner in (*self._runners, *self._leaving):
            runner.stop()
        for runner in self._leaving:
            del self.running[runner]  # its end is then reported, as for others that were given up

    def add(self, runner: Runner[P, R]) -> None:
        """Add a runner, which has been started."""
        self._runners = (*self._runners, runner)
        self.slots.add(runner)

    # hot path
    def take(self, batch: Batch[Request[P, R]]) -> Runner[P, R]:
        """A free runner, which from now on executes `batch`."""
        runner = self.slots.take()
        self._begin(runner, batch)
        return runner

    def may_run_again(self, avoided: Collection[Hashable]) -> bool:
        """Whether there is a free runner for a batch that is to run on none of the `avoided` instances, as long as
        there are others."""
        return self.slots.has_excluding(avoided) or (self.slots.free > 0 and self._instances() <= {*avoided})

    def take_again(self, batch: Batch[Request[P, R]], avoided: Collection[Hashable]) -> Runner[P, R]:
        """Like `take`, for a batch that `may_run_again`."""
        runner = self.slots.take_excluding(avoided) if self.slots.has_excluding(avoided) else self.slots.take()
        self._begin(runner, batch)
        return runner

    # hot path
    def end(self, runner: Runner[P, R]) -> tuple[Batch[Request[P, R]], Batch[Request[P, R]] | None]:
        """Learn that the runner's execution is over. Returns its batch, and the next one if the runner has begun that
        already."""
        if self._watchdog is not None:
            self._watchdog.ended(runner)
        batch = self.running.pop(runner)
        following = self.ahead.end(runner)
        if following is not None:
            self._begin(runner, following)
        elif runner in self._leaving:
            self._leaving.discard(runner)
            runner.stop()
            self.returned(runner)
        else:
            self.slots.back(runner)
            if self._shortages.resting and self._shortages.rests(self.instance_of(runner)):
                self._hold(runner)
        return batch, following

    # hot path
    def executed(self, runner: Runner[P, R], key: Hashable) -> None:
        """Learn that the runner has executed a batch of `key`."""
        if len(self._runners) > 1 and not self.given_up(runner):
            self._shortages.executed(self.instance_of(runner), key)

    def on_out_of_memory(self, runner: Runner[P, R], batch: Batch[Request[P, R]], left: Collection[Hashable]) -> bool:
        """Learn that an execution ended for want of memory. Returns whether other instances have it, and are to execute
        the batch: then this instance gets nothing for a while, and afterwards all others are preferred to it. If not,
        and the batch was a single request, they are preferred from now on. A batch that has `left` this instance
        before, or as many others as may rest at a time, is at fault itself."""
        if self.given_up(runner):
            return False
        instance, alone = self.instance_of(runner), len(batch.requests) == 1
        instances = self._instances()
        now_ns, count = self._clock.now_ns(), len(instances)
        settled = instance in left or len(instances.intersection(left)) >= count // 2
        if settled or not self._shortages.failed(instance, batch.key, alone=alone, instances=count, now_ns=now_ns):
            if alone:
                self.slots.put_last(runner)
            return False
        for one in self._slots_of(instance):
            if one in self.running:
                self.ahead.hand_no_more(one)
            elif one not in self._held:
                self._hold(one)
        return True

    @property
    def resting(self) -> int:
        """How many instances get nothing for a while because they had no memory for what others execute."""
        return self._shortages.resting

    @property
    def wake_ns(self) -> int | None:
        """When to `wake` the next resting instance; None if none rests."""
        return self._shortages.wake_ns

    def wake(self, now_ns: int) -> None:
        """Use instances again that have rested long enough, or can't be spared any longer."""
        for instance in self._shortages.wake(now_ns, len(self._instances())):
            for one in self._held.intersection(self._slots_of(instance)):
                self._held.discard(one)
                self.slots.add(one)
                self.slots.put_last(one)

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
        if runner in self._leaving:
            self._leaving.discard(runner)
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
        self._give_up(runner)
        self.ahead.end(runner)
        if self._replacer is not None:
            self._replacer.on_loss(runner, error)

    def returned(self, runner: Runner[P, R]) -> None:
        """Report that the runner's execution has ended, after its instance was given up."""
        if self._replacer is not None:
            self._replacer.on_return(runner)

    def call_off(self) -> None:
        """End executions that nobody waits for any more, where the runner can."""
        for runner, batch in self.running.items():
            # From the end: a caller that cancels many requests does so in the order of sending, so the last one settles
            # it at once.
            if all(request.cancelled() for request in reversed(batch.requests)):
                runner.call_off()

    def _begin(self, runner: Runner[P, R], batch: Batch[Request[P, R]]) -> None:
        self.running[runner] = batch
        if runner.stages and runner not in self._leaving:
            now_ns = self._clock.now_ns()
            self.ahead.begin(runner, now_ns, self._latency.proven_ns(batch.key, batch.padded_rows, now_ns))
        if self._watchdog is not None:
            self._watchdog.began(runner)

    def _give_up(self, runner: Runner[P, R]) -> Sequence[Runner[P, R]]:
        """Give `runner`, which executes nothing that counts, and the other slots of its instance nothing more. Returns
        the slots that still execute: their answers count."""
        instance = self.instance_of(runner)
        slots = self._slots_of(instance)
        for one in slots:
            if one in self._held:
                self._held.discard(one)
            else:
                self.slots.remove(one)
            if one not in self.running:
                one.stop()
        self._shortages.forget(instance)
        self._runners = tuple(one for one in self._runners if one not in slots)
        executing = [one for one in slots if one in self.running]
        for one in executing:
            self.ahead.hand_no_more(one)
        self._leaving.update(executing)
        return executing

    def _hold(self, runner: Runner[P, R]) -> None:
        """Keep a free runner from getting anything until it is woken."""
        self.slots.remove(runner)
        self._held.add(runner)

    def _slots_of(self, instance: Hashable) -> list[Runner[P, R]]:
        return [one for one in self._runners if self.instance_of(one) == instance]

    def _instances(self) -> set[Hashable]:
        return {self.instance_of(one) for one in self._runners}
