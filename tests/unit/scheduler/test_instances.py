"""What each instance executes, and the reports about instances that are given up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from paceline.scheduler.instances import Instances
from paceline.scheduler.request import Batch, Request
from paceline.scheduler.testing import ManualClock, StepRunner

MS = 1_000_000
LIMIT_NS = 100 * MS
Runner = StepRunner[str, str]


class TableBench:
    """A table of instances with two slots each; `events` has what is reported about them."""

    def __init__(self, slots: int = 2) -> None:
        self.clock = ManualClock(now_ns=1)
        self.runners = [Runner(self.clock, stages=True) for _ in range(slots)]
        self.events: list[tuple[Any, ...]] = []
        self.table: Instances[str, str] = Instances(
            self.runners, self.clock, self, lambda runner: self.runners.index(runner) // 2
        )
        self.table.start(LIMIT_NS, lambda runner: self.events.append(("late", runner)))

    def on_hang(self, runner: Any, others: Sequence[Any]) -> None:
        self.events.append(("hang", runner, *others))

    def on_loss(self, runner: Any, error: BaseException) -> None:
        self.events.append(("loss", runner))

    def on_return(self, runner: Any) -> None:
        self.events.append(("return", runner))


def batch(number: int = 1) -> Batch[Request[str, str]]:
    return Batch(number, "k", 1, 1, (), 20 * MS)


@pytest.fixture
def bench() -> TableBench:
    return TableBench()


def test_start_starts_all_runners_and_the_first_one_is_taken_first(bench: TableBench) -> None:
    assert all(runner.started for runner in bench.runners)
    first = bench.table.take(batch())
    assert first is bench.runners[0]
    assert bench.table.running == {first: batch()}
    assert bench.table.end(first) == (batch(), None)
    assert (bench.table.running, bench.table.slots.free) == ({}, 2)


def test_runner_with_a_next_batch_has_begun_it_when_its_execution_ends(bench: TableBench) -> None:
    runner = bench.table.take(batch(1))
    bench.table.ahead.next[runner] = batch(2)
    assert bench.table.end(runner) == (batch(1), batch(2))
    assert bench.table.running == {runner: batch(2)}
    assert bench.table.slots.free == 1
    assert bench.table.ahead.ends[runner].at_ns == 1 + 20 * MS


@pytest.mark.parametrize("hangs", [True, False])
def test_slot_that_still_executes_when_its_instance_is_given_up_gets_nothing_ahead(
    bench: TableBench, hangs: bool
) -> None:
    one, two = bench.table.take(batch(1)), bench.table.take(batch(2))
    assert bench.table.ahead.about_to_end(19 * MS) == [one, two]
    if hangs:
        bench.table.hang(one)
    else:
        bench.table.end(one)
        bench.table.lose(one, OSError())
    assert two in bench.table.running
    assert bench.table.ahead.about_to_end(19 * MS) == []


def test_execution_is_late_when_its_limit_has_passed_unless_it_ended(bench: TableBench) -> None:
    one, two = bench.table.take(batch(1)), bench.table.take(batch(2))
    bench.table.end(one)
    bench.clock.advance(LIMIT_NS)
    assert bench.events == [("late", two)]
    bench.table.has_begun(two)
    bench.clock.advance(LIMIT_NS)
    assert bench.events == [("late", two)] * 2


def test_hang_gives_the_instance_up_and_its_other_slot_ends_its_last_execution(bench: TableBench) -> None:
    one, two = bench.table.take(batch(1)), bench.table.take(batch(2))
    bench.table.hang(one)
    assert bench.events == [("hang", one, two)]
    assert one.stopped  # type: ignore[attr-defined]
    assert bench.table.running == {two: batch(2)}
    assert bench.table.end(two) == (batch(2), None)
    assert bench.events[1:] == [("return", two)]
    assert two.stopped  # type: ignore[attr-defined]
    assert bench.table.slots.free == 0


def test_hanging_instance_is_never_about_to_end(bench: TableBench) -> None:
    bench.table.hang(bench.table.take(batch(1)))
    assert not bench.table.ahead.ends
    assert bench.table.ahead.about_to_end(1 + 19 * MS) == []


def test_hang_of_the_remaining_slot_is_not_reported_again(bench: TableBench) -> None:
    one, two = bench.table.take(batch(1)), bench.table.take(batch(2))
    bench.table.hang(one)
    bench.table.hang(two)
    assert bench.events == [("hang", one, two)]
    assert bench.table.running == {}
    assert two.stopped  # type: ignore[attr-defined]


def test_loss_stops_the_idle_slots_and_is_reported_once() -> None:
    bench = TableBench(slots=4)
    one = bench.table.take(batch())
    bench.table.end(one)
    assert bench.table.may_be_lost(one)
    bench.table.lose(one, OSError())
    assert bench.events == [("loss", one)]
    assert [runner.stopped for runner in bench.runners] == [True, True, False, False]
    assert not bench.table.may_be_lost(one)
    assert bench.table.slots.free == 2


def test_forgotten_batch_is_never_late(bench: TableBench) -> None:
    runner = bench.table.take(batch())
    bench.table.forget(runner)
    assert not bench.table.ahead.ends
    bench.clock.advance(LIMIT_NS)
    assert (bench.events, bench.table.running) == ([], {})


def test_close_stops_all_runners_and_watches_none(bench: TableBench) -> None:
    bench.table.take(batch())
    bench.table.close()
    bench.clock.advance(LIMIT_NS)
    assert bench.events == []
    assert all(runner.stopped for runner in bench.runners)
