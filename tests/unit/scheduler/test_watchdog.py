"""Executions beyond their time limit, which are given up together with their instances."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from paceline.scheduler.errors import BatcherClosed, ExecutionTimeout
from paceline.scheduler.policy import BatchPolicy, PolicyError
from paceline.scheduler.testing import ManualClock, StepRunner
from paceline.scheduler.watchdog import Watchdog
from tests.unit.scheduler.workbench import Bench, one_turn

LIMIT_NS = 100


def test_watchdog_reports_each_late_execution_once_and_none_that_ended() -> None:
    clock, late = ManualClock(), list[str]()
    watchdog: Watchdog[str] = Watchdog(LIMIT_NS, clock, late.append)
    watchdog.began("a")
    clock.advance(10)
    watchdog.began("b")
    watchdog.began("c")
    clock.advance(89)
    assert late == []
    clock.advance(1)
    assert late == ["a"]
    watchdog.ended("b")
    clock.advance(1000)
    assert late == ["a", "c"]
    watchdog.began("b")
    clock.advance(LIMIT_NS)
    assert late == ["a", "c", "b"]
    watchdog.began("d")
    watchdog.close()
    clock.advance(1000)
    assert late == ["a", "c", "b"]


def test_watchdog_reports_on_time_though_others_have_begun_since_its_last_alarm() -> None:
    clock, late = ManualClock(), list[str]()
    watchdog: Watchdog[str] = Watchdog(LIMIT_NS, clock, late.append)
    for name, wait_ns in (("a", 50), ("b", 60), ("c", 39)):
        watchdog.began(name)
        clock.advance(wait_ns)
    assert late == ["a"]
    clock.advance(1)
    assert late == ["a", "b"]
    clock.advance(60)
    assert late == ["a", "b", "c"]


@pytest.mark.parametrize("frozen_ns", [LIMIT_NS // 2, 50 * LIMIT_NS])
def test_watchdog_does_not_count_time_while_the_process_was_frozen(frozen_ns: int) -> None:
    clock, late = ManualClock(), list[str]()
    watchdog: Watchdog[str] = Watchdog(LIMIT_NS, clock, late.append)
    watchdog.began("ends")
    watchdog.began("hangs")
    clock.advance(20)
    clock.alarm(lambda: watchdog.began("begins")).set(21)  # which the loop handles before the watchdog's
    clock.freeze(frozen_ns)
    clock.advance(65)
    assert late == []
    watchdog.ended("ends")
    clock.advance(15)
    assert late == ["hangs"]
    clock.advance(20)
    assert late == ["hangs", "begins"]


def test_watchdog_whose_alarm_is_always_late_still_reports_a_hang() -> None:
    clock, late = ManualClock(), list[str]()
    watchdog: Watchdog[str] = Watchdog(LIMIT_NS, clock, late.append)
    watchdog.began("hangs")
    for _ in range(9):
        assert late == []
        clock.freeze(3 * LIMIT_NS)
    assert late == ["hangs"]


def test_negative_limit_is_refused() -> None:
    with pytest.raises(PolicyError, match="execution_limit_ns: expected >= 0, got -1"):
        BatchPolicy(execution_limit_ns=-1)


class WatchedBench(Bench):
    """Keeps the hangs and returns that are reported."""

    def __init__(self, runners: int = 1, **more: Any) -> None:
        self.events: list[tuple[str, Any]] = []
        super().__init__(BatchPolicy(max_batch_rows=2, execution_limit_ns=LIMIT_NS), runners, replacer=self, **more)

    def on_hang(self, runner: Any, others: Sequence[Any]) -> None:
        self.events.append(("hang", runner))

    def on_return(self, runner: Any) -> None:
        self.events.append(("return", runner))


@pytest.fixture
async def bench() -> AsyncIterator[WatchedBench]:
    bench = WatchedBench()
    yield bench
    bench.batcher.close()


async def test_execution_within_its_limit_is_answered(bench: WatchedBench) -> None:
    (future,) = bench.put("a")
    await one_turn()
    bench.clock.advance(LIMIT_NS - 1)
    bench.runners[0].finish(str.upper)
    bench.clock.advance(LIMIT_NS)
    assert await future == "A"
    assert bench.events == []


def test_execution_begun_while_another_is_reported_delays_no_report() -> None:
    clock, late = ManualClock(), list[tuple[str, int]]()

    def on_late(what: str) -> None:
        late.append((what, clock.now_ns()))
        if what == "a":
            watchdog.began("c")

    watchdog: Watchdog[str] = Watchdog(LIMIT_NS, clock, on_late)
    watchdog.began("a")
    clock.advance(LIMIT_NS // 2)
    watchdog.began("b")
    clock.advance(10 * LIMIT_NS)
    assert late == [("a", LIMIT_NS), ("b", LIMIT_NS + LIMIT_NS // 2), ("c", 2 * LIMIT_NS)]


async def test_execution_beyond_its_limit_fails_its_requests_and_others_wait_for_another_instance(
    bench: WatchedBench,
) -> None:
    hung = bench.put("a", "b")
    await one_turn()
    waiting = bench.put("c", "d", "e")
    bench.clock.advance(LIMIT_NS)
    for future in hung:
        with pytest.raises(ExecutionTimeout, match=r"longer than 1e-07 s and was given up"):
            await future
    assert bench.events == [("hang", bench.runners[0])]
    (report,) = bench.seen.reports
    assert (report.failed, type(report.error)) == (2, ExecutionTimeout)
    assert report.finished_ns - report.started_ns == LIMIT_NS
    assert bench.runners[0].stopped
    assert not bench.batcher._queue._executing._ends_ns, "nothing is kept of the requests"
    await one_turn()
    assert bench.batcher.waiting_requests == 3
    another: StepRunner[str, str] = StepRunner(bench.clock)
    bench.batcher.add(another)
    await one_turn()
    assert another.started
    assert another.batches == [["c", "d"]]
    another.finish(str.upper)
    await one_turn()
    another.finish(str.upper)
    assert await asyncio.gather(*waiting) == ["C", "D", "E"]


async def test_late_outcome_of_a_given_up_execution_is_discarded(bench: WatchedBench) -> None:
    (hung,) = bench.put("a")
    await one_turn()
    bench.clock.advance(LIMIT_NS)
    bench.runners[0].finish(str.upper)
    with pytest.raises(ExecutionTimeout):
        await hung
    assert [what for what, _ in bench.events] == ["hang", "return"]
    bench.put("b")
    await one_turn()
    assert bench.runners[0].batches == [["a"]]


async def test_outcome_after_the_batcher_closed_is_still_reported(bench: WatchedBench) -> None:
    (hung,) = bench.put("a")
    await one_turn()
    bench.clock.advance(LIMIT_NS)
    bench.batcher.close()
    bench.runners[0].fail(ValueError())
    assert [what for what, _ in bench.events] == ["hang", "return"]
    assert isinstance(hung.exception(), ExecutionTimeout)


@pytest.mark.parametrize("end", ["its limit", "close"])
async def test_other_slot_of_a_given_up_instance_is_stopped_and_its_return_reported_once(end: str) -> None:
    bench = WatchedBench(2, instance_of=lambda runner: "one")
    futures = await bench.submit("a", "b")
    bench.clock.advance(LIMIT_NS // 2)
    futures += await bench.submit("c", "d")
    bench.clock.advance(LIMIT_NS // 2)
    left = next(runner for runner in bench.runners if not runner.stopped)
    assert [what for what, _ in bench.events] == ["hang"]
    if end == "close":
        bench.batcher.close()
    else:
        bench.clock.advance(LIMIT_NS // 2)
    assert left.stopped
    left.finish(str.upper)
    assert bench.events[1:] == [("return", left)]
    bench.batcher.close()
    assert all(future.exception() for future in futures)


async def test_drain_ends_when_a_hanging_execution_is_given_up(bench: WatchedBench) -> None:
    (hung,) = bench.put("a")
    await one_turn()
    draining = asyncio.create_task(bench.batcher.drain())
    await one_turn()
    assert not draining.done()
    bench.clock.advance(LIMIT_NS)
    await draining
    assert isinstance(hung.exception(), ExecutionTimeout)


async def test_cancelled_request_in_a_hanging_execution_stays_cancelled(bench: WatchedBench) -> None:
    cancelled, other = bench.put("a", "b")
    await one_turn()
    cancelled.cancel()
    bench.clock.advance(LIMIT_NS)
    assert isinstance(other.exception(), ExecutionTimeout)
    assert cancelled.cancelled()


async def test_instance_added_to_a_closed_batcher_is_stopped(bench: WatchedBench) -> None:
    (waiting,) = bench.put("a")
    bench.batcher.close()
    another: StepRunner[str, str] = StepRunner(bench.clock)
    bench.batcher.add(another)
    assert another.stopped
    assert isinstance(waiting.exception(), BatcherClosed)


async def test_hang_without_a_replacer_is_given_up_like_any_other() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=2, execution_limit_ns=LIMIT_NS))
    (hung,) = await bench.submit("a")
    bench.clock.advance(LIMIT_NS)
    assert isinstance(hung.exception(), ExecutionTimeout)
    assert bench.runner.stopped
    bench.runner.finish(str.upper)
    bench.batcher.close()
