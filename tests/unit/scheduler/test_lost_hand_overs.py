"""Batches handed over to instances that then hang, end or close: who executes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from paceline.scheduler.errors import BatcherClosed, ExecutionFailed, ExecutionTimeout
from paceline.scheduler.failures import Blame
from paceline.scheduler.observer import Drop
from paceline.scheduler.testing import StepRunner
from tests.unit.scheduler.staging_bench import DUE_NS, LONG_NS, StagingBench
from tests.unit.scheduler.workbench import one_turn


@pytest.fixture
async def bench() -> AsyncIterator[StagingBench]:
    bench = StagingBench()
    await bench.learn()
    yield bench
    bench.batcher.close()


async def test_batch_handed_to_a_hanging_instance_executes_elsewhere() -> None:
    bench = StagingBench(instances=2, limit_ns=2 * LONG_NS)
    hanging, other = bench.runners
    await bench.learn()
    (stuck,) = await bench.submit("a")
    (busy,) = await bench.submit("b")
    bench.clock.advance(DUE_NS)
    waiting = await bench.submit("c", "d")
    assert hanging.next == ["c", "d"]
    other.finish(str.upper)
    other_first = await bench.submit("e")
    assert await busy == "B"
    bench.clock.advance(2 * LONG_NS - DUE_NS)
    await one_turn()
    with pytest.raises(ExecutionTimeout):
        await stuck
    assert hanging.next is None
    assert bench.events == [("hang", hanging)]
    for _ in range(2):
        other.finish(str.upper)
        await one_turn()
    assert await asyncio.gather(*other_first, *waiting) == ["E", "C", "D"]
    bench.batcher.close()


async def test_execution_that_ended_as_its_limit_passed_is_not_taken_for_hanging() -> None:
    bench = StagingBench(limit_ns=2 * LONG_NS)
    await bench.learn()
    first = await bench.submit("a", "b")
    second = await bench.submit("c")
    bench.clock.advance(DUE_NS)
    bench.runner.gives_back = False  # it has begun "c"; the end of "a" and "b" is still to be reported
    bench.clock.advance(2 * LONG_NS)
    assert bench.events == []
    for _ in range(2):
        bench.runner.finish(str.upper)
        await one_turn()
    assert await asyncio.gather(*first, *second) == ["A", "B", "C"]
    bench.batcher.close()


async def test_batch_handed_to_a_lost_instance_executes_elsewhere() -> None:
    bench = StagingBench(blame=Blame.INSTANCE)
    await bench.learn()
    first = await bench.submit("a", "b")
    second = await bench.submit("c")
    bench.clock.advance(DUE_NS)
    assert bench.runner.next == ["c"]
    bench.runner.fail(ValueError("no device any more"))
    await one_turn()
    with pytest.raises(ExecutionFailed):
        await first[0]
    assert bench.events == [("loss", bench.runner)]
    assert bench.runner.stopped
    fresh = StepRunner[str, str](bench.clock, stages=True)
    bench.batcher.add(fresh)
    await one_turn()
    fresh.finish(str.upper)
    assert await asyncio.gather(*second) == ["C"]
    bench.batcher.close()


async def test_lost_instance_executes_the_batch_it_has_begun_and_nothing_more() -> None:
    bench = StagingBench(blame=Blame.INSTANCE)
    await bench.learn()
    first = await bench.submit("a", "b")
    second = await bench.submit("c")
    bench.clock.advance(DUE_NS)
    bench.runner.gives_back = False  # it has begun "c" already
    bench.runner.fail(ValueError("no device any more"))
    third = await bench.submit("d")
    bench.clock.advance(DUE_NS)
    await one_turn()
    assert bench.runner.next is None
    bench.runner.finish(str.upper)
    await one_turn()
    assert await second[0] == "C"
    assert isinstance(first[0].exception(), ExecutionFailed)
    assert (bench.runner.stopped, bench.runner.busy) == (True, False)
    assert [what for what, _ in bench.events] == ["loss", "return"]
    assert not third[0].done()
    bench.batcher.close()


async def test_close_fails_the_batch_handed_over(bench: StagingBench) -> None:
    await bench.submit("a", "b")
    waiting = await bench.submit("c")
    bench.clock.advance(DUE_NS)
    bench.batcher.close()
    with pytest.raises(BatcherClosed):
        await waiting[0]
    assert bench.runner.next is None
    assert bench.seen.count(Drop.CLOSED) == 3
    assert bench.shared_limits.requests == bench.shared_limits.size_bytes == 0


async def test_drain_waits_for_the_batch_handed_over(bench: StagingBench) -> None:
    await bench.submit("a", "b")
    waiting = await bench.submit("c")
    bench.clock.advance(DUE_NS)
    drained = asyncio.ensure_future(bench.batcher.drain())
    for _ in range(2):
        await one_turn()
        assert not drained.done()
        bench.runner.finish(str.upper)
    await drained
    assert await waiting[0] == "C"
