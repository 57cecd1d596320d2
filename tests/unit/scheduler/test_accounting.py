"""Every request is counted once, as answered, failed or dropped, whatever happens to its batch."""

from __future__ import annotations

import pytest

from paceline.scheduler.errors import BatcherClosed, QueueFull
from paceline.scheduler.observer import Drop
from paceline.scheduler.policy import BatchPolicy, QueueLimits, QueuePolicy
from paceline.scheduler.testing import StepRunner
from tests.unit.scheduler.workbench import Bench, LossBench, one_turn, submit


class CountingBench(Bench):
    @property
    def counted(self) -> int:
        left = sum(len(report.waits_ns) + report.failed + report.cancelled for report in self.seen.reports)
        return left + len(self.seen.drops)


@pytest.mark.parametrize("gone", [0, 1, 2, 3])
async def test_counters_with_a_request_cancelled_in_a_failing_batch_still_add_up(gone: int) -> None:
    bench = CountingBench(BatchPolicy(max_batch_rows=4))
    futures = await bench.submit("a", "b", "c", "d")
    futures[gone].cancel()
    bench.runner.fail(ValueError("x"))
    while bench.runner.busy:
        bench.runner.finish(str.upper)
    assert sorted(future.result() for future in futures if not future.cancelled()) == sorted(
        name.upper() for number, name in enumerate("abcd") if number != gone
    )
    assert bench.counted == 4
    assert bench.seen.count(Drop.CANCELLED) == 1
    bench.batcher.close()


@pytest.mark.parametrize("gone", [set(), {0}, {1, 3}, {0, 1, 2, 3}], ids=str)
async def test_counters_distinguish_requests_cancelled_while_executing_from_answered_ones(gone: set[int]) -> None:
    bench = CountingBench(BatchPolicy(max_batch_rows=4))
    futures = await bench.submit("a", "b", "c", "d")
    bench.clock.advance(7)
    for number in gone:
        futures[number].cancel()
    bench.runner.finish(str.upper)
    (report,) = bench.seen.reports
    assert (len(report.waits_ns), report.failed, report.cancelled) == (4 - len(gone), 0, len(gone))
    assert report.rows == 4
    assert bench.seen.drops == []
    bench.batcher.close()


async def test_counters_distinguish_a_cancelled_request_from_failed_ones_when_its_batch_fails() -> None:
    bench = CountingBench(BatchPolicy(max_batch_rows=4, isolate_failures=False))
    futures = await bench.submit("a", "b", "c")
    futures[1].cancel()
    bench.runner.fail(ValueError("x"))
    (report,) = bench.seen.reports
    assert (list(report.waits_ns), report.failed, report.cancelled) == ([], 2, 1)
    assert all(futures[number].exception() for number in (0, 2))
    bench.batcher.close()


async def test_counters_have_every_request_once_when_the_batcher_closes() -> None:
    bench = CountingBench(BatchPolicy(max_batch_rows=2))
    runs, left = await bench.submit("a", "b")
    waits = await bench.submit("c", "d", "e")
    left.cancel()
    bench.batcher.close()
    with pytest.raises(BatcherClosed):
        submit(bench.batcher, "f", 1, "k")
    assert all(isinstance(one.exception(), BatcherClosed) for one in (runs, *waits))
    assert bench.seen.count(Drop.CLOSED) == 5
    assert bench.seen.count(Drop.CANCELLED) == 1
    assert bench.counted == 6
    bench.runner.finish(str.upper)
    assert bench.counted == 6


async def test_counters_have_every_request_once_when_the_batcher_closes_during_isolation() -> None:
    bench = CountingBench(BatchPolicy(max_batch_rows=4))
    futures = await bench.submit("a", "b", "c", "d")
    bench.runner.fail(ValueError("x"))
    futures[0].cancel()  # executes again
    futures[3].cancel()  # waits to execute again
    bench.batcher.close()
    assert [bench.seen.count(drop) for drop in (Drop.CLOSED, Drop.CANCELLED)] == [2, 2]
    assert bench.counted == 4


async def test_counters_have_every_request_once_when_a_deadly_batch_is_given_up() -> None:
    bench = LossBench(BatchPolicy(max_batch_rows=8))
    futures = await bench.submit(*"abcdef")
    while not all(future.done() for future in futures):
        next(runner for runner in bench.runners if runner.busy).fail(ChildProcessError())
        await bench.add()
    assert not any(runner.busy for runner in bench.runners)
    assert sum(report.failed for report in bench.seen.reports) == len(futures)
    assert bench.seen.drops == []
    bench.batcher.close()


async def test_counters_have_every_request_once_when_one_of_several_suspects_not_begun_is_given_up() -> None:
    bench = LossBench(BatchPolicy(max_batch_rows=4))
    unlucky = await bench.submit("a")
    for _ in range(2):
        bench.runners[-1].fail(EOFError())
        bench.runners.append(StepRunner(bench.clock))
        others = await bench.submit(*"bcd") if len(bench.runners) == 3 else []
        bench.batcher.add(bench.runners[-1])
        await one_turn()
    bench.runners[-1].fail(ValueError("x"))
    assert bench.runners[-1].batches[-1] == ["a", "b"]
    bench.runners[-1].fail(EOFError())
    runner = await bench.add()
    while runner.busy:
        runner.finish(str.upper)
    assert [str(future.exception() or future.result()) for future in (*unlucky, *others)] == ["EOFError", *"BCD"]
    assert sum(len(report.waits_ns) + report.failed for report in bench.seen.reports) == 4
    assert bench.seen.drops == []
    bench.batcher.close()


@pytest.mark.parametrize(
    ("policy", "drop"),
    [
        (BatchPolicy(max_batch_rows=1, queue=QueuePolicy(max_queue_size=1)), Drop.FULL_REQUESTS),
        (BatchPolicy(max_batch_rows=1, limits=QueueLimits(max_rows=1)), Drop.FULL_ROWS),
        (BatchPolicy(max_batch_rows=1, limits=QueueLimits(max_bytes=10)), Drop.FULL_BYTES),
    ],
    ids=lambda value: value.value if isinstance(value, Drop) else "",
)
async def test_refusals_are_counted_by_the_bound_that_was_reached(policy: BatchPolicy, drop: Drop) -> None:
    bench = CountingBench(policy)
    await bench.submit("runs")
    submit(bench.batcher, "waits", 1, "k", size_bytes=10)
    with pytest.raises(QueueFull):
        submit(bench.batcher, "refused", 1, "k", size_bytes=1)
    assert bench.seen.drops == [drop]
    bench.batcher.close()
