"""Lost instances: which requests fail, which run on another instance, and a batcher without any instance."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from paceline.scheduler.errors import BatcherClosed, ExecutionFailed, NoInstance, QueueTimeout
from paceline.scheduler.failures import Blame
from paceline.scheduler.observer import Drop
from paceline.scheduler.policy import BatchPolicy
from paceline.scheduler.runner import ThreadLost
from tests.unit.scheduler.workbench import Bench, LossBench, one_turn, submit


@pytest.fixture
async def bench() -> AsyncIterator[LossBench]:
    bench = LossBench(BatchPolicy(max_batch_rows=16))
    yield bench
    bench.batcher.close()


async def test_lost_instance_fails_its_batch_and_the_next_one_executes_waiting_requests(bench: LossBench) -> None:
    lost = await bench.submit("a", "b")
    waiting = await bench.submit("c")
    error = OSError("device lost")
    bench.runners[0].fail(error)
    assert bench.lost == [(bench.runners[0], error)]
    assert bench.runners[0].stopped
    assert all(isinstance(future.exception(), ExecutionFailed) for future in lost)
    await one_turn()
    assert bench.runners[0].batches == [["a", "b"]]
    another = await bench.add()
    another.finish(str.upper)
    assert waiting[0].result() == "C"


async def test_remaining_instance_executes_waiting_requests_after_one_is_lost() -> None:
    bench = LossBench(BatchPolicy(max_batch_rows=1), instances=2)
    await bench.submit("a", "b")
    waiting = await bench.submit("c")
    bench.runners[0].fail(OSError())
    assert not waiting[0].done()
    bench.runners[1].finish(str.upper)
    await one_turn()
    bench.runners[1].finish(str.upper)
    assert waiting[0].result() == "C"
    bench.batcher.close()


@pytest.mark.parametrize("isolates", [True, False])
@pytest.mark.parametrize("error", [EOFError("gone before"), ThreadLost("no thread")], ids=["ended", "no thread"])
async def test_batch_not_begun_by_its_lost_instance_is_executed_by_the_next_one(
    isolates: bool, error: Exception
) -> None:
    bench = LossBench(BatchPolicy(max_batch_rows=4, isolate_failures=isolates))
    lost = await bench.submit("a", "b")
    later = await bench.submit("c")
    bench.runners[0].fail(error)
    await one_turn()
    assert bench.lost == [(bench.runners[0], error)]
    assert not any(future.done() for future in lost)
    another = await bench.add()
    assert another.batches == [["a", "b", "c"]], "before all who came later"
    another.finish(str.upper)
    await one_turn()
    assert [future.result() for future in (*lost, *later)] == ["A", "B", "C"]
    bench.batcher.close()


async def test_requests_of_a_batch_not_begun_wait_like_any_others(bench: LossBench) -> None:
    late = submit(bench.batcher, "late", 1, "k", deadline_ns=bench.clock.now_ns() + 50)
    gone, good = await bench.submit("gone", "good")
    bench.runners[0].fail(EOFError())
    await one_turn()
    assert bench.batcher.waiting_requests == 3
    gone.cancel()
    assert bench.batcher.waiting_requests == 2
    bench.clock.advance(50)
    await one_turn()
    assert isinstance(late.exception(), QueueTimeout)
    draining = asyncio.create_task(bench.batcher.drain())
    await one_turn()
    assert not draining.done()
    good.cancel()
    await one_turn()
    assert draining.done()


async def test_request_fails_after_three_instances_ended_before_beginning_it(bench: LossBench) -> None:
    (deadly,) = await bench.submit("deadly")
    for ends in range(1, 4):
        assert not deadly.done()
        bench.runners[-1].fail(EOFError("too much"))
        await one_turn()
        assert len(bench.lost) == ends
        await bench.add()
    assert isinstance(deadly.exception(), ExecutionFailed)
    assert not bench.runners[-1].busy


async def test_batch_not_begun_is_refused_when_the_batcher_is_suspended(bench: LossBench) -> None:
    lost = await bench.submit("a")
    bench.runners[0].fail(EOFError())
    bench.batcher.suspend()
    assert isinstance(lost[0].exception(), NoInstance)


async def test_batch_not_begun_fails_where_instances_stay_in_use() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=4), blames=lambda _: Blame.INSTANCE_BEFORE)
    lost = await bench.submit("a")
    bench.runner.fail(EOFError())
    await one_turn()
    assert isinstance(lost[0].exception(), ExecutionFailed)
    assert bench.runner.batches == [["a"]]
    bench.batcher.close()


async def test_idle_instance_that_is_lost_gets_no_more_batches() -> None:
    bench = LossBench(BatchPolicy(max_batch_rows=1), instances=2)
    first, second = bench.runners
    executing = await bench.submit("a")
    busy = first if first.busy else second
    idle = second if first.busy else first
    error = OSError()
    for _ in range(2):
        bench.batcher.lose(idle, error)
    assert bench.lost == [(idle, error)]
    assert idle.stopped
    waiting = await bench.submit("b")
    assert not idle.busy
    busy.finish(str.upper)
    await one_turn()
    busy.finish(str.upper)
    assert (executing[0].result(), waiting[0].result()) == ("A", "B")
    bench.batcher.close()
    bench.batcher.lose(busy, error)
    assert len(bench.lost) == 1


@pytest.mark.parametrize("fails", [False, True])
async def test_instance_lost_while_executing_is_reported_and_stopped_after_that_batch(
    bench: LossBench, fails: bool
) -> None:
    (executing,) = await bench.submit("a")
    (waiting,) = await bench.submit("b")
    runner, error = bench.runner, OSError("ended")
    bench.batcher.lose(runner, error)
    assert not bench.lost
    if fails:
        runner.fail(error)
    else:
        runner.finish(str.upper)
    await one_turn()
    assert bench.lost == [(runner, error)]
    assert fails == isinstance(executing.exception(), ExecutionFailed)
    assert (runner.stopped, len(runner.batches)) == (True, 1)
    another = await bench.add()
    another.finish(str.upper)
    assert waiting.result() == "B"


async def test_suspended_batcher_refuses_waiting_and_new_requests_until_it_has_an_instance(bench: LossBench) -> None:
    await bench.submit("a")
    waiting = await bench.submit("b")
    bench.runners[0].fail(OSError())
    bench.batcher.suspend()
    assert isinstance(waiting[0].exception(), NoInstance)
    with pytest.raises(NoInstance):
        submit(bench.batcher, "c", 1, "k")
    assert bench.seen.count(Drop.NO_INSTANCE) == 2
    assert bench.batcher.waiting_requests == 0
    another = await bench.add()
    served = await bench.submit("d")
    another.finish(str.upper)
    assert served[0].result() == "D"


async def test_drain_after_a_suspension_waits_for_requests_submitted_since(bench: LossBench) -> None:
    await bench.submit("a")
    bench.runners[0].fail(OSError())
    bench.batcher.suspend()
    another = await bench.add()
    served = await bench.submit("d")
    draining = asyncio.create_task(bench.batcher.drain())
    await one_turn()
    assert not draining.done()
    another.finish(str.upper)
    await draining
    assert served[0].result() == "D"


async def test_requests_are_served_as_before_after_an_instance_is_added(bench: LossBench) -> None:
    await bench.add()
    served = await bench.submit("a")
    next(runner for runner in bench.runners if runner.busy).finish(str.upper)
    assert served[0].result() == "A"


async def test_batcher_suspended_twice_serves_again_once_it_has_an_instance(bench: LossBench) -> None:
    bench.batcher.lose(bench.runner, OSError())
    for _ in range(2):
        bench.batcher.suspend()
    another = await bench.add()
    served = await bench.submit("a")
    another.finish(str.upper)
    assert served[0].result() == "A"


async def test_drain_waits_for_requests_that_run_again_on_the_next_instance(bench: LossBench) -> None:
    futures = await bench.submit("a", "b")
    draining = asyncio.create_task(bench.batcher.drain())
    bench.runners[0].fail(ChildProcessError())
    await one_turn()
    assert not draining.done()
    another = await bench.add()
    for _ in range(2):
        another.finish(str.upper)
        await one_turn()
    await asyncio.wait_for(draining, 5)
    assert [future.result() for future in futures] == ["A", "B"]


async def test_drain_ends_when_the_batcher_is_suspended_meanwhile(bench: LossBench) -> None:
    await bench.submit("a")
    (waiting,) = await bench.submit("b")
    draining = asyncio.create_task(bench.batcher.drain())
    await one_turn()
    bench.runners[0].fail(OSError())
    bench.batcher.suspend()
    await asyncio.wait_for(draining, 5)
    assert isinstance(waiting.exception(), NoInstance)


async def test_drain_of_a_suspended_batcher_ends_at_once_and_new_requests_find_it_closed(bench: LossBench) -> None:
    await bench.submit("a")
    bench.runners[0].fail(OSError())
    bench.batcher.suspend()
    await bench.batcher.drain()
    with pytest.raises(BatcherClosed):
        submit(bench.batcher, "c", 1, "k")
