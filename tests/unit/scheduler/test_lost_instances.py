"""Instances that are lost: who gets which answer, and what comes after."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence

import pytest

from scheduler.errors import BatcherClosed, ExecutionFailed, NoInstance, QueueTimeout
from scheduler.isolation import Blame
from scheduler.observer import Drop
from scheduler.policy import BatchPolicy
from tests.unit.scheduler.workbench import Bench, LossBench, one_turn


@pytest.fixture
async def bench() -> AsyncIterator[LossBench]:
    bench = LossBench(BatchPolicy(max_batch_rows=16))
    yield bench
    bench.batcher.close()


async def test_lost_instance_fails_its_batch_and_those_who_wait_are_executed_by_the_next(bench: LossBench) -> None:
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


async def test_lost_instance_leaves_the_work_to_the_others() -> None:
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
async def test_batch_that_its_instance_had_not_begun_when_it_was_lost_is_executed_by_the_next(isolates: bool) -> None:
    bench = LossBench(BatchPolicy(max_batch_rows=4, isolate_failures=isolates))
    lost = await bench.submit("a", "b")
    later = await bench.submit("c")
    error = EOFError("gone before")
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


async def test_batch_that_was_not_begun_waits_like_any_other(bench: LossBench) -> None:
    late = bench.batcher.submit("late", 1, "k", rpc_deadline_ns=bench.clock.now_ns() + 50)
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


async def test_request_that_instances_end_of_before_they_begin_fails_in_the_end(bench: LossBench) -> None:
    (deadly,) = await bench.submit("deadly")
    for ends in range(1, 4):
        assert not deadly.done()
        bench.runners[-1].fail(EOFError("too much"))
        await one_turn()
        assert len(bench.lost) == ends
        await bench.add()
    assert isinstance(deadly.exception(), ExecutionFailed)
    assert not bench.runners[-1].busy


async def test_batch_that_was_not_begun_is_refused_if_there_is_no_instance(bench: LossBench) -> None:
    lost = await bench.submit("a")
    bench.runners[0].fail(EOFError())
    bench.batcher.suspend()
    assert isinstance(lost[0].exception(), NoInstance)


async def test_batch_that_was_not_begun_fails_where_instances_are_used_on() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=4), blames=lambda _: Blame.INSTANCE_BEFORE)
    lost = await bench.submit("a")
    bench.runner.fail(EOFError())
    await one_turn()
    assert isinstance(lost[0].exception(), ExecutionFailed)
    assert bench.runner.batches == [["a"]]
    bench.batcher.close()


async def test_instance_lost_while_it_executes_nothing_gets_nothing_more() -> None:
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
async def test_instance_that_ends_by_itself_while_it_executes_is_lost_once_that_is_done(
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


async def test_suspended_refuses_who_waits_and_who_comes_until_there_is_an_instance(bench: LossBench) -> None:
    await bench.submit("a")
    waiting = await bench.submit("b")
    bench.runners[0].fail(OSError())
    bench.batcher.suspend()
    assert isinstance(waiting[0].exception(), NoInstance)
    with pytest.raises(NoInstance):
        bench.batcher.submit("c", 1, "k")
    assert bench.seen.count(Drop.NO_INSTANCE) == 2
    assert bench.batcher.waiting_requests == 0
    another = await bench.add()
    served = await bench.submit("d")
    another.finish(str.upper)
    assert served[0].result() == "D"


async def test_drain_of_one_that_was_suspended_waits_for_those_who_came_since(bench: LossBench) -> None:
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


async def test_drain_of_a_suspended_one_ends_at_once_and_refuses_as_closed(bench: LossBench) -> None:
    await bench.submit("a")
    bench.runners[0].fail(OSError())
    bench.batcher.suspend()
    await bench.batcher.drain()
    with pytest.raises(BatcherClosed):
        bench.batcher.submit("c", 1, "k")


class DeadlyBench(LossBench):
    """Instances end of what has a `!`, and are replaced."""

    async def run_all(self) -> list[Sequence[str]]:
        """Let batches run until none is left. What instances have ended of."""
        ended_of = []
        while busy := [runner for runner in self.runners if runner.busy]:
            runner = busy[0]
            if any("!" in payload for payload in runner.batches[-1]):
                ended_of.append(runner.batches[-1])
                assert len(ended_of) < 100
                runner.fail(ChildProcessError("ended"))
                await self.add()
            else:
                runner.finish(str.upper)
            await one_turn()
        return ended_of


def deadly_among(count: int, *deadly: int) -> list[str]:
    return [f"p{number}!" if number in deadly else f"p{number}" for number in range(count)]


def outcomes(futures: Sequence[asyncio.Future[str]]) -> list[str]:
    return ["failed" if future.exception() else future.result() for future in futures]


@pytest.mark.parametrize("deadly", [(0,), (7,), (3, 5)])
async def test_nobody_fails_for_a_request_in_the_same_batch_that_the_instance_ends_of(deadly: tuple[int, ...]) -> None:
    bench = DeadlyBench(BatchPolicy(max_batch_rows=8))
    payloads = deadly_among(8, *deadly)
    futures = await bench.submit(*payloads)
    assert await bench.run_all() == [payloads, *([payloads[number]] for number in deadly)]
    assert outcomes(futures) == ["failed" if "!" in payload else payload.upper() for payload in payloads]
    assert sum(report.failed for report in bench.seen.reports) == len(deadly)
    assert len(bench.lost) == 1 + len(deadly)
    bench.batcher.close()


async def test_no_more_than_four_instances_end_of_one_batch() -> None:
    bench = DeadlyBench(BatchPolicy(max_batch_rows=16))
    futures = await bench.submit(*deadly_among(16, 2, 5, 9, 11, 12))
    waiting = await bench.submit("later")
    assert len(await bench.run_all()) == 4
    assert outcomes(futures) == ["P0", "P1", "failed", "P3", "P4", "failed", "P6", "P7", "P8", *["failed"] * 7]
    assert sum(report.failed for report in bench.seen.reports) == 9
    assert outcomes(waiting) == ["LATER"]
    bench.batcher.close()


async def test_batch_that_the_instance_ends_of_fails_as_a_whole_where_failures_are_not_isolated() -> None:
    bench = DeadlyBench(BatchPolicy(max_batch_rows=8, isolate_failures=False))
    futures = await bench.submit(*deadly_among(8, 3))
    assert len(await bench.run_all()) == 1
    assert outcomes(futures) == ["failed"] * 8
    bench.batcher.close()


async def test_who_has_gone_meanwhile_is_not_executed_again_after_an_instance_has_ended() -> None:
    bench = DeadlyBench(BatchPolicy(max_batch_rows=4))
    futures = await bench.submit("a", "b!", "gone")
    bench.runner.fail(ChildProcessError())
    futures[2].cancel()
    another = await bench.add()
    await bench.run_all()
    assert (outcomes(futures[:2]), another.batches) == (["A", "failed"], [["a"], ["b!"]])
    assert bench.seen.count(Drop.CANCELLED) == 1
    bench.batcher.close()


@pytest.mark.parametrize("seed", range(50))
async def test_every_request_is_answered_once_however_many_instances_end_of_them(seed: int) -> None:
    chance = random.Random(seed)
    bench = DeadlyBench(BatchPolicy(max_batch_rows=8), instances=chance.randint(1, 3))
    payloads = [f"p{number}" + "!" * (chance.random() < 0.2) for number in range(40)]
    futures = await bench.submit(*payloads)
    batches = [batch for batch in await bench.run_all() if len(batch) > 1]
    crowded = {one for batch in batches if "".join(batch).count("!") > 2 for one in batch}
    for payload, outcome in zip(payloads, outcomes(futures), strict=True):
        expected = {"failed"} if "!" in payload else {payload.upper(), *["failed"] * (payload in crowded)}
        assert outcome in expected
    assert len(bench.lost) <= 4 * len(batches) + sum("!" in payload for payload in payloads if payload not in crowded)
    assert sum(report.failed for report in bench.seen.reports) == outcomes(futures).count("failed")
    bench.batcher.close()
