"""Requests whose callers have gone, while they wait or execute."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from paceline.scheduler.observer import Drop
from paceline.scheduler.policy import BatchPolicy
from tests.unit.scheduler.workbench import Bench, one_turn, submit


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench(BatchPolicy(max_batch_rows=4))
    yield bench
    bench.batcher.close()


@pytest.mark.parametrize("victim", [0, 1, 2, 3])
async def test_request_cancelled_in_the_queue_leaves_at_once_and_its_neighbours_are_answered(
    bench: Bench, victim: int
) -> None:
    blocker = bench.put("blocker")
    await one_turn()
    futures = bench.put("a", "b", "c", "d")
    futures[victim].cancel()
    assert bench.batcher.waiting_requests == 3
    bench.runner.finish(str.upper)
    await one_turn()
    bench.runner.finish(str.upper)
    others = [future for number, future in enumerate(futures) if number != victim]
    assert await asyncio.gather(*blocker, *others) == ["BLOCKER", *(c for n, c in enumerate("ABCD") if n != victim)]
    assert bench.seen.count(Drop.CANCELLED) == 1


@pytest.mark.parametrize("victim", [0, 1, 2, 3])
async def test_request_cancelled_while_executing_gets_no_answer_and_its_neighbours_get_theirs(
    bench: Bench, victim: int
) -> None:
    futures = bench.put("a", "b", "c", "d")
    await one_turn()
    futures[victim].cancel()
    bench.runner.finish(str.upper)
    answers = await asyncio.gather(*futures, return_exceptions=True)
    assert isinstance(answers.pop(victim), asyncio.CancelledError)
    assert answers == [c for n, c in enumerate("ABCD") if n != victim]
    assert not bench.seen.drops


async def test_execution_is_called_off_once_all_its_requests_are_cancelled_and_no_other_is() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=2), instances=2)
    left, right = bench.runners
    first, second, third, fourth = bench.put("a", "b", "c", "d")
    await one_turn()
    first.cancel()
    third.cancel()
    await one_turn()
    assert left.called_off == right.called_off == []
    second.cancel()
    await one_turn()
    assert (left.called_off, right.called_off) == ([["a", "b"]], [])
    left.fail(asyncio.CancelledError())
    right.finish(str.upper)
    assert await fourth == "D"
    (again,) = bench.put("e")
    await one_turn()
    next(runner for runner in bench.runners if runner.busy).finish(str.upper)
    assert await again == "E"
    assert sum(report.failed for report in bench.seen.reports) == 0
    assert sum(report.cancelled for report in bench.seen.reports) + bench.seen.count(Drop.CANCELLED) == 3
    bench.batcher.close()


async def test_executions_cancelled_together_are_called_off_once() -> None:
    bench = Bench(BatchPolicy(), instances=50)
    futures = bench.put(*map(str, range(50)))
    await one_turn()
    for future in futures:
        future.cancel()
    await one_turn()
    assert [len(runner.called_off) for runner in bench.runners] == [1] * 50
    bench.batcher.close()


async def test_cancel_of_the_awaiting_task_takes_the_request_out_of_the_queue(bench: Bench) -> None:
    bench.put("blocker")
    await one_turn()

    async def call() -> str:
        return await submit(bench.batcher, "a", 1, "k")

    task = asyncio.create_task(call())
    await one_turn()
    assert bench.batcher.waiting_requests == 1
    task.cancel()
    await one_turn()
    assert bench.batcher.waiting_requests == 0
    with pytest.raises(asyncio.CancelledError):
        await task
