"""What each instance executes, and the reports about instances that are given up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from scheduler.executing import Batch
from scheduler.lane import Entry
from scheduler.latency import LatencyModel
from scheduler.pending import Pending
from scheduler.policy import NEVER
from scheduler.runner_table import RunnerTable
from scheduler.testing import ManualClock, StepRunner

MS = 1_000_000
LIMIT_NS = 100 * MS
Runner = StepRunner[str, str]


class Bench:
    """A table of instances with two slots each; `events` has what is reported about them."""

    def __init__(self, slots: int = 2) -> None:
        self.clock = ManualClock(now_ns=1)
        self.runners = [Runner(self.clock, stages=True) for _ in range(slots)]
        self.events: list[tuple[Any, ...]] = []
        latency = LatencyModel(4)
        for _ in range(3):
            latency.observe("k", 1, 20 * MS, 0)
        self.instances: RunnerTable[str, str] = RunnerTable(
            self.runners, self.clock, latency, self, lambda runner: self.runners.index(runner) // 2
        )
        self.instances.start(LIMIT_NS, lambda runner: self.events.append(("late", runner)))

    def on_hang(self, runner: Any, others: Sequence[Any]) -> None:
        self.events.append(("hang", runner, *others))

    def on_loss(self, runner: Any, error: BaseException) -> None:
        self.events.append(("loss", runner))

    def on_return(self, runner: Any) -> None:
        self.events.append(("return", runner))


def batch(number: int = 1, requests: int = 0) -> Batch[Pending[str, str]]:
    entries = [Entry(Pending[str, str](), 1, 0, 0, 0, 0, NEVER, NEVER) for _ in range(requests)]
    return Batch(number, "k", 1, 1, tuple(entries))


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_start_starts_all_runners_and_the_first_one_is_taken_first(bench: Bench) -> None:
    assert all(runner.started for runner in bench.runners)
    first = bench.instances.take(batch())
    assert first is bench.runners[0]
    assert bench.instances.running == {first: batch()}
    assert bench.instances.end(first) == (batch(), None)
    assert (bench.instances.running, bench.instances.slots.free) == ({}, 2)


def test_runner_with_a_next_batch_has_begun_it_when_its_execution_ends(bench: Bench) -> None:
    runner = bench.instances.take(batch(1))
    bench.instances.ahead.next[runner] = batch(2)
    assert bench.instances.end(runner) == (batch(1), batch(2))
    assert bench.instances.running == {runner: batch(2)}
    assert bench.instances.slots.free == 1
    assert bench.instances.ahead.ends_ns(runner) == 1 + 20 * MS


def test_execution_is_late_when_its_limit_has_passed_unless_it_ended(bench: Bench) -> None:
    one, two = bench.instances.take(batch(1)), bench.instances.take(batch(2))
    bench.instances.end(one)
    bench.clock.advance(LIMIT_NS)
    assert bench.events == [("late", two)]
    bench.instances.has_begun(two)
    bench.clock.advance(LIMIT_NS)
    assert bench.events == [("late", two)] * 2


def test_hang_gives_the_instance_up_and_its_other_slot_ends_its_last_execution(bench: Bench) -> None:
    one, two = bench.instances.take(batch(1)), bench.instances.take(batch(2))
    bench.instances.hang(one)
    assert bench.events == [("hang", one, two)]
    assert one.stopped  # type: ignore[attr-defined]
    assert bench.instances.running == {two: batch(2)}
    assert bench.instances.end(two) == (batch(2), None)
    assert bench.events[1:] == [("return", two)]
    assert two.stopped  # type: ignore[attr-defined]
    assert bench.instances.slots.free == 0
    assert not bench.instances._leaving


def test_hanging_instance_is_never_about_to_end(bench: Bench) -> None:
    bench.instances.hang(bench.instances.take(batch(1)))
    assert not bench.instances.ahead
    assert bench.instances.ahead.about_to_end(1 + 19 * MS) == []


def test_hang_of_the_remaining_slot_is_not_reported_again(bench: Bench) -> None:
    one, two = bench.instances.take(batch(1)), bench.instances.take(batch(2))
    bench.instances.hang(one)
    bench.instances.hang(two)
    assert bench.events == [("hang", one, two)]
    assert bench.instances.running == {}
    assert two.stopped  # type: ignore[attr-defined]


def test_loss_stops_the_idle_slots_and_is_reported_once() -> None:
    bench = Bench(slots=4)
    one = bench.instances.take(batch())
    bench.instances.end(one)
    assert bench.instances.may_be_lost(one)
    bench.instances.lose(one, OSError())
    assert bench.events == [("loss", one)]
    assert [runner.stopped for runner in bench.runners] == [True, True, False, False]
    assert not bench.instances.may_be_lost(one)
    assert bench.instances.slots.free == 2


@pytest.mark.parametrize(("requests", "same"), [(1, False), (2, True)])
async def test_instance_without_memory_for_a_single_request_is_used_last(requests: int, same: bool) -> None:
    bench = Bench(slots=4)
    failing = batch(requests=requests)
    one = bench.instances.take(failing)
    bench.instances.end(one)
    assert not bench.instances.on_out_of_memory(one, failing, left=())
    assert (bench.runners.index(bench.instances.take(batch())) // 2 == bench.runners.index(one) // 2) == same


async def test_instance_lost_while_it_rests_leaves_nothing_behind() -> None:
    bench = Bench(slots=4)
    failing = batch(requests=1)
    one = bench.instances.take(failing)
    other = bench.instances.take(batch(2))
    bench.instances.end(other)
    bench.instances.executed(other, "k")
    bench.instances.end(one)
    assert bench.instances.on_out_of_memory(one, failing, left=())
    assert (bench.instances.resting, bench.instances.slots.free) == (1, 2)
    bench.instances.lose(one, OSError())
    assert (bench.instances.resting, bench.instances.wake_ns, bench.instances.slots.free) == (0, None, 2)
    assert not bench.instances._held
    assert [runner.stopped for runner in bench.runners].count(True) == 2


def test_forgotten_batch_is_never_late(bench: Bench) -> None:
    runner = bench.instances.take(batch())
    bench.instances.forget(runner)
    assert not bench.instances.ahead
    bench.clock.advance(LIMIT_NS)
    assert (bench.events, bench.instances.running) == ([], {})


def test_close_stops_all_runners_and_watches_none(bench: Bench) -> None:
    bench.instances.take(batch())
    bench.instances.close()
    bench.clock.advance(LIMIT_NS)
    assert bench.events == []
    assert all(runner.stopped for runner in bench.runners)
