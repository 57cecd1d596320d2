"""Requests that an instance had no memory for: where they are tried next, how long they wait, when they fail."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.scheduler.errors import ExecutionFailed, QueueFull
from paceline.scheduler.policy import BatchPolicy, QueuePolicy
from paceline.scheduler.shortages import LONGEST_REST_NS, SHORTEST_REST_NS
from paceline.scheduler.testing import StepRunner
from tests.unit.scheduler.memory_bench import MemoryBench
from tests.unit.scheduler.workbench import one_turn

SECOND = 1_000_000_000


async def test_request_moves_on_past_as_many_instances_as_may_rest() -> None:
    bench = MemoryBench(4)
    await bench.warm()
    bench.full = {0, 1, 2, 3}
    (future,) = await bench.submit("a")
    tried = []
    for _ in range(2):
        (runner,) = bench.busy()
        tried.append(bench.runners.index(runner))
        await bench.end()
    assert len({*tried}) == bench.batcher.resting_instances == 2
    bench.full = {*tried}
    await bench.end()
    assert await future == "A"
    bench.batcher.close()


@pytest.mark.parametrize("instances", [2, 4])
@pytest.mark.parametrize("took_ns", [0, SHORTEST_REST_NS, 10 * SHORTEST_REST_NS])
async def test_request_that_fits_nowhere_fails_though_all_instances_execute_smaller_ones_like_it(
    instances: int, took_ns: int
) -> None:
    """The smaller ones have its key, so each instance is a witness against the others again and again."""
    bench = MemoryBench(instances)
    await bench.warm()
    (huge,) = await bench.submit("huge", rows=4)
    tries = 0
    while not huge.done():
        await bench.submit(*"a" * instances, key="k")
        bench.clock.advance(took_ns)
        for runner in bench.busy():
            if runner.batches[-1] == ["huge"]:
                tries += 1
                runner.fail(MemoryError())
            else:
                runner.finish(str.upper)
        await one_turn()
        assert tries <= instances // 2 + 1
    assert isinstance(huge.exception(), ExecutionFailed)
    bench.batcher.close()


async def left_one(request: str, *others: str) -> tuple[MemoryBench, list[Any], list[Any]]:
    """A bench where one instance had no memory for `request` and rests, while the others execute. Also the futures and
    runners of all these requests. Their queue timeouts pass before any wait for another instance ends."""
    bench = MemoryBench(
        1 + len(others), policy=BatchPolicy(max_batch_rows=1, queue=QueuePolicy(default_timeout_ns=SECOND // 2))
    )
    await bench.warm()
    futures = await bench.submit(request, *others)
    runners = bench.executing(request, *others)
    runners[0].fail(MemoryError())
    await one_turn()
    assert bench.batcher.resting_instances == 1
    return bench, futures, runners


async def test_request_waiting_for_another_instance_does_not_block_the_one_it_left() -> None:
    bench, (huge, long), (here, there) = await left_one("huge", "long")
    small = await bench.submit(*"abc")
    bench.clock.advance(SHORTEST_REST_NS)
    await one_turn()
    for _ in small:
        here.finish(str.upper)
        await one_turn()
    assert [future.result() for future in small] == list("ABC")
    assert not here.busy
    assert not huge.done()
    for _ in (long, huge):
        there.finish(str.upper)
        await one_turn()
    assert (await long, await huge) == ("LONG", "HUGE")
    bench.batcher.close()


async def test_request_goes_back_to_the_instance_it_left_when_no_other_remains() -> None:
    bench, (moved, _), (here, there) = await left_one("moved", "lost")
    there.fail(OSError("lost"))
    await one_turn()
    here.finish(str.upper)
    assert await moved == "MOVED"
    bench.batcher.close()


@pytest.mark.parametrize("others", [["hangs"], ["hang", "all", "others"]])
@pytest.mark.parametrize("fits", [True, False])
async def test_request_waits_for_another_instance_as_long_as_an_execution_may_take_then_retries(
    fits: bool, others: list[str]
) -> None:
    bench, (moved, *_), (here, *there) = await left_one("moved", *others)
    bench.clock.advance(SECOND - 1)
    await one_turn()
    assert not here.busy
    bench.clock.advance(1)
    await one_turn()
    assert here.batches[-1] == ["moved"]
    if fits:
        here.finish(str.upper)
    else:
        here.fail(MemoryError())
    await one_turn()
    assert moved.done()
    assert (moved.exception() is None) == fits
    assert all(one.busy for one in there)
    bench.batcher.close()


async def left_where_executions_take(
    duration_ns: int,
) -> tuple[MemoryBench, Any, StepRunner[Any, Any], StepRunner[Any, Any]]:
    """The future of a request that has just left the first of two instances; the second one executes another."""
    bench = MemoryBench(policy=BatchPolicy(max_batch_rows=1))
    await bench.submit("a", "b")
    bench.clock.advance(duration_ns)
    await bench.end()
    (moved, _) = await bench.submit("moved", "long")
    here, there = bench.executing("moved", "long")
    here.fail(MemoryError())
    return bench, moved, here, there


async def test_request_waits_longer_for_another_instance_where_executions_are_known_to_be_long() -> None:
    bench, moved, here, there = await left_where_executions_take(2 * SECOND)
    bench.clock.advance(2 * SECOND)
    await one_turn()
    assert not here.busy
    there.finish(str.upper)
    await one_turn()
    there.finish(str.upper)
    assert await moved == "MOVED"
    bench.batcher.close()


async def test_request_waits_for_another_instance_ten_seconds_at_most() -> None:
    bench, moved, here, there = await left_where_executions_take(60 * SECOND)
    bench.clock.advance(10 * SECOND - 1)
    await one_turn()
    assert not here.busy
    bench.clock.advance(1)
    await one_turn()
    here.finish(str.upper)
    assert await moved == "MOVED"
    there.finish(str.upper)
    bench.batcher.close()


async def test_request_waits_again_for_each_further_instance_that_has_no_memory_for_it() -> None:
    bench, (moved, *_), (here, there, *_) = await left_one("moved", "short", "long", "long too")
    bench.clock.advance(SECOND // 2)
    there.finish(str.upper)
    await one_turn()
    assert there.batches[-1] == ["moved"]
    there.fail(MemoryError())
    bench.clock.advance(SECOND - 1)
    await one_turn()
    assert not here.busy
    assert not there.busy
    bench.clock.advance(1)
    await one_turn()
    assert [one.batches[-1] for one in (here, there) if one.busy] == [["moved"]]
    await bench.end()
    assert await moved == "MOVED"
    bench.batcher.close()


async def test_request_waiting_for_another_instance_takes_room_in_the_queue() -> None:
    bench = MemoryBench(policy=BatchPolicy(max_batch_rows=1, queue=QueuePolicy(max_queue_size=3)))
    await bench.submit("a", "b")
    await bench.end()
    futures = await bench.submit("huge", "long")
    here, there = bench.executing("huge", "long")
    for huge in ((), ("huge",), ("huge",)):
        futures += await bench.submit(*huge)
        here.fail(MemoryError())
        bench.clock.advance(LONGEST_REST_NS // 100)
    with pytest.raises(QueueFull):
        bench.put("huge")
    assert bench.batcher.waiting_requests == bench.batcher.waiting_of_level(0) == 3
    while not all(future.done() for future in futures):
        for one in (here, there):
            if one.busy:
                one.finish(str.upper)
        await one_turn()
    assert bench.batcher.waiting_requests == 0
    (other,) = await bench.submit("other")
    await bench.end()
    assert await other == "OTHER"
    bench.batcher.close()


async def test_request_waits_for_a_resting_instance_rather_than_going_back() -> None:
    bench, (moved, _), (here, there) = await left_one("moved", "huge")
    bench.clock.advance(SHORTEST_REST_NS)
    await bench.submit("small")
    here.finish(str.upper)
    await one_turn()
    there.fail(MemoryError())
    await one_turn()
    assert here.batches[-1] == ["huge"]
    here.fail(MemoryError())
    await one_turn()
    assert not here.busy
    bench.clock.advance(SHORTEST_REST_NS)
    await one_turn()
    assert there.batches[-1] == ["moved"]
    there.finish(str.upper)
    assert await moved == "MOVED"
    bench.batcher.close()


async def test_parts_of_a_batch_that_was_too_large_run_on_any_instance() -> None:
    bench = MemoryBench(policy=BatchPolicy(max_batch_rows=8))
    await bench.submit(*"w" * 16)
    await bench.end()
    await bench.submit("x")
    (here,) = bench.executing("x")
    here.fail(MemoryError())
    await bench.end()
    bench.clock.advance(SHORTEST_REST_NS)
    await bench.submit("long")
    (there,) = bench.executing("long")
    futures = await bench.submit(*"abcdefgh")
    here.fail(MemoryError())
    bench.clock.advance(2 * SHORTEST_REST_NS)
    await one_turn()
    there.finish(str.upper)
    await one_turn()
    there.fail(MemoryError())
    await one_turn()
    assert [one.batches[-1] for one in (here, there) if one.busy] == [list("efgh"), list("abcd")]
    await bench.end()
    assert [future.result() for future in futures] == list("ABCDEFGH")
    bench.batcher.close()


async def test_lost_instance_no_longer_counts_as_one_without_memory_for_a_request() -> None:
    bench = MemoryBench(3, policy=BatchPolicy(max_batch_rows=1))
    await bench.warm()
    (moved, _, _) = await bench.submit("moved", "b", "c")
    (first,) = bench.executing("moved")
    first.fail(MemoryError())
    await one_turn()
    bench.batcher.lose(first, OSError("lost"))
    second = StepRunner[str, str](bench.clock)
    bench.runners.append(second)
    bench.batcher.add(second)
    await one_turn()
    assert second.batches == [["moved"]]
    second.fail(MemoryError())
    await one_turn()
    assert not moved.done(), "it has been tried on one of three"
    await bench.end()
    await bench.end()
    assert await moved == "MOVED"
    bench.batcher.close()
