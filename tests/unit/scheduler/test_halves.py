"""Callers who come again as soon as they are answered, and a slow model: whether they stay together."""

from __future__ import annotations

import asyncio

import pytest

from paceline.scheduler.policy import BatchPolicy
from paceline.scheduler.turns import ArrivalModel
from tests.unit.scheduler.workbench import Bench, one_turn

MS = 1_000_000
CALLERS = tuple("abcdefgh")


def takes_ns(requests: int) -> int:
    """How long a batch takes: 5 ms, and 0.4 ms for each row."""
    return 5 * MS + requests * MS * 2 // 5


async def executed(bench: Bench, *callers: str, in_ns: int = 0) -> None:
    futures = await bench.submit(*callers)
    bench.clock.advance(in_ns or takes_ns(len(callers)))
    bench.runner.finish(str.upper)
    await asyncio.gather(*futures)


async def all_together(bench: Bench, pause_ms: int) -> None:
    """Let the batcher learn what a single request costs, and that all eight callers come again after such a pause."""
    for _ in range(3):
        await executed(bench, "x")
    for _ in range(50):
        bench.clock.advance(pause_ms * MS)
        await executed(bench, *CALLERS)
    assert [len(batch) for batch in bench.runner.batches[-10:]] == [8] * 10


async def few_turns() -> None:
    """Fewer loop iterations than an instance waits for a crowd."""
    for _ in range(3):
        await asyncio.sleep(0)


async def test_callers_who_keep_an_instance_waiting_longer_than_a_batch_costs_take_turns_in_two_groups() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=16), arrivals=ArrivalModel())
    await all_together(bench, pause_ms=6)
    futures = bench.put(*"abc")
    await few_turns()
    assert not bench.runner.busy
    futures += bench.put("d")
    await few_turns()
    futures += bench.put(*"efgh")
    for group in ("abcd", "efgh"):
        await one_turn()
        assert bench.runner.batches[-1] == list(group)
        bench.clock.advance(takes_ns(4))
        bench.runner.finish(str.upper)
    assert await asyncio.gather(*futures) == list("ABCDEFGH")
    bench.batcher.close()


@pytest.mark.parametrize("pause_ms", [0, 3, 9, 200])
async def test_callers_for_whom_two_batches_would_cost_more_stay_together(pause_ms: int) -> None:
    bench = Bench(BatchPolicy(max_batch_rows=16), arrivals=ArrivalModel())
    await all_together(bench, pause_ms)
    futures = bench.put(*"abcdefg")
    await few_turns()
    assert not bench.runner.busy
    futures += bench.put("h")
    await few_turns()
    assert bench.runner.batches[-1] == list(CALLERS)
    bench.runner.finish(str.upper)
    assert await asyncio.gather(*futures) == list("ABCDEFGH")
    bench.batcher.close()


async def test_callers_stay_together_again_once_executions_are_short() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=16), arrivals=ArrivalModel())
    await all_together(bench, pause_ms=6)
    await executed(bench, *CALLERS, in_ns=MS // 2)
    bench.clock.advance(6 * MS)
    futures = bench.put(*"abcdefg")
    await few_turns()
    assert not bench.runner.busy
    futures += bench.put("h")
    await one_turn()
    assert bench.runner.batches[-1] == list(CALLERS)
    bench.runner.finish(str.upper)
    await asyncio.gather(*futures)
    bench.batcher.close()
