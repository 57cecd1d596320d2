"""What happens to requests while instances rest because they lack memory that others have."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from paceline.scheduler.errors import ExecutionFailed
from paceline.scheduler.policy import BatchPolicy
from paceline.scheduler.shortages import LONGEST_REST_NS, SHORTEST_REST_NS
from tests.unit.scheduler.memory_bench import MemoryBench
from tests.unit.scheduler.workbench import one_turn


async def refused_of(bench: MemoryBench, clients: int, took_ns: int = 5_000_000) -> int:
    """How many requests fail: `clients` clients ask again and again, while instance 0 fails at once, several times for
    each execution of another one, which takes `took_ns`."""
    refused = 0
    asking = await bench.submit(*"a" * clients)
    for _ in range(50):
        for _ in range(5):
            bench.clock.advance(took_ns // 5)
            await bench.end(0)
        await bench.end(1)
        for place, future in enumerate(asking):
            if future.done():
                refused += future.exception() is not None
                (asking[place],) = bench.put("a")
        await one_turn()
    while not all(future.done() for future in asking):
        await bench.end()
    return refused + sum(future.exception() is not None for future in asking)


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("clients", [1, 4, 9])
@pytest.mark.parametrize("took_ns", [SHORTEST_REST_NS // 2, 2 * SHORTEST_REST_NS, 20 * SHORTEST_REST_NS])
async def test_no_request_fails_that_another_instance_has_memory_for(slots: int, clients: int, took_ns: int) -> None:
    bench = MemoryBench(slots=slots)
    await bench.warm()
    bench.full = {0}
    assert await refused_of(bench, clients, took_ns) == 0
    assert bench.batcher.allowed_rows == 4
    assert len([batch for one in bench.runners[:slots] for batch in one.batches]) < 30, "it is tried ever more seldom"
    bench.batcher.close()


async def test_requests_fail_while_all_instances_are_full_and_all_serve_once_memory_is_free() -> None:
    bench = MemoryBench()
    await bench.warm()
    bench.full = {0, 1}
    assert await refused_of(bench, 3) > 40
    bench.full = set()
    bench.clock.advance(LONGEST_REST_NS)
    await one_turn()
    assert bench.batcher.resting_instances == 0
    futures = await bench.submit(*"a" * 8)
    await bench.end()
    assert [future.result() for future in futures] == ["A"] * 8


ONE_ROW = BatchPolicy(max_batch_rows=1, execution_limit_ns=1_000)


async def test_rest_ends_when_the_other_instances_are_lost_and_waiting_requests_run() -> None:
    bench = MemoryBench(policy=ONE_ROW)
    await bench.warm()
    bench.full = {0}
    futures = await bench.submit(*"abcd")
    await bench.end(0)
    assert bench.batcher.resting_instances == 1
    bench.full = set()
    (other,) = bench.busy()
    other.fail(OSError("lost"))
    await one_turn()
    assert bench.batcher.resting_instances == 0
    for _ in range(3):
        await bench.end(0)
    assert sorted(type(future.exception()) is ExecutionFailed for future in futures) == [False, False, False, True]
    bench.batcher.close()


async def resting(**how: Any) -> MemoryBench:
    """A bench whose instance 0 had no memory for a single request, and rests; all others execute."""
    bench = MemoryBench(**{"policy": ONE_ROW, **how})
    await bench.warm()
    bench.full = {0}
    await bench.submit(*"a" * len(bench.runners))
    bench.busy(0)[0].fail(MemoryError())
    await one_turn()
    assert bench.batcher.resting_instances == 1
    return bench


@pytest.mark.parametrize("lost", [True, False], ids=["lost", "hangs"])
async def test_resting_instance_given_up_because_of_its_other_slot_gets_nothing_more(lost: bool) -> None:
    bench = await resting(instances=4, slots=2)
    full, (sibling,) = bench.runner, bench.busy(0)
    bench.clock.advance(999)
    await bench.end(1, 2, 3)
    if lost:
        sibling.fail(OSError("lost"))
    else:
        bench.clock.advance(1)
    await one_turn()
    assert (bench.gone, full.stopped, bench.batcher.resting_instances) == ({0}, True, 0)
    bench.clock.advance(LONGEST_REST_NS)
    while bench.busy(1, 2, 3):
        await bench.end(1, 2, 3)
    futures = await bench.submit(*"efgh")
    while bench.busy(1, 2, 3):
        await bench.end(1, 2, 3)
    assert [future.result() for future in futures] == list("EFGH")
    bench.batcher.close()


async def test_slot_of_a_resting_instance_ends_its_execution_and_gets_nothing_until_the_rest_ends() -> None:
    bench = await resting(slots=2, policy=BatchPolicy(max_batch_rows=1))
    (sibling,) = bench.busy(0)
    sibling.finish(str.upper)
    await bench.submit(*"efgh")
    assert not bench.busy(0)
    assert len(bench.busy(1)) == 2
    bench.clock.advance(SHORTEST_REST_NS)
    await one_turn()
    assert len(bench.busy(0)) == 2, "who waits doesn't wait for the others when the rest is over"
    bench.batcher.close()


async def test_instance_that_has_rested_is_used_last() -> None:
    bench = await resting(policy=BatchPolicy(max_batch_rows=1))
    while bench.busy():
        await bench.end()
    bench.clock.advance(SHORTEST_REST_NS)
    await one_turn()
    assert bench.batcher.resting_instances == 0
    await bench.submit("a")
    assert not bench.busy(0)
    bench.batcher.close()


async def test_resting_instance_is_handed_no_batch_ahead() -> None:
    bench = MemoryBench(stages=True, policy=BatchPolicy(max_batch_rows=1))
    await bench.submit(*"w" * 12)
    while bench.busy():
        bench.clock.advance(10_000_000)
        await bench.end()
    await bench.submit(*"abcdef")
    bench.clock.advance(9_000_000)
    await one_turn()
    full = bench.runner
    assert full.next, "it is about to be done"
    bench.full = {0}
    bench.clock.advance(1_000_000)
    await bench.end(0)
    assert full.busy, "it has begun on that"
    for advance_ns in (0, 9_500_000):
        bench.clock.advance(advance_ns)
        await bench.end(1)
    assert bench.batcher.waiting_requests
    assert full.next is None
    bench.batcher.close()


class Chaos:
    """A batcher of one to four instances to which anything may happen at random."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.slots, self.instances = self.chance.choice([1, 1, 2]), self.chance.randint(1, 4)
        policy = BatchPolicy(
            max_batch_rows=self.chance.choice([1, 4]),
            execution_limit_ns=self.chance.choice([0, 50_000_000]),
            isolate_failures=self.chance.random() < 0.9,
        )
        stages = self.slots == 1 and self.chance.random() < 0.5
        self.bench = MemoryBench(self.instances, self.slots, policy=policy, stages=stages)
        self.futures: list[Any] = []
        self.was_full = False

    async def run(self) -> None:
        for _ in range(40):
            await self.step()
            self.check()
        self.bench.full = set()
        draining = asyncio.create_task(self.bench.batcher.drain())
        for _ in range(1_000):
            await self.bench.end()
            if draining.done() or len(self.bench.gone) == self.instances:
                break
        self.bench.batcher.close()
        await draining
        assert all(future.cancelled() or future.exception() or future.result() == "A" for future in self.futures)
        seen = self.bench.seen
        told = sum(len(report.waits_ns) + report.failed + report.cancelled for report in seen.reports)
        assert len(seen.drops) + told == len(self.futures), "each was told to the observer, and once"

    async def step(self) -> None:
        bench, chance = self.bench, self.chance
        self.futures += await bench.submit(*"a" * chance.randint(0, 5), key=chance.choice("kkkl"))
        bench.clock.advance(chance.choice([0, 100_000, 3_000_000, 20_000_000]))
        await one_turn()
        if chance.random() < 0.1:
            bench.full = {instance for instance in range(self.instances) if chance.random() < 0.4}
            self.was_full = self.was_full or bool(bench.full)
        if chance.random() < 0.2 and self.futures:
            chance.choice(self.futures).cancel()
        for runner in chance.sample(bench.busy(), len(bench.busy())):
            if chance.random() < 0.6 and runner.busy:
                self.end(runner)
                if chance.random() < 0.5:
                    await one_turn()
        await one_turn()

    def end(self, runner: Any) -> None:
        instance = self.bench.runners.index(runner) // self.slots
        if self.chance.random() < 0.02:
            runner.fail(self.chance.choice([OSError("lost"), EOFError("ended of it")]))
        elif instance in self.bench.full and self.chance.random() < 0.9:
            runner.fail(MemoryError())
        elif self.chance.random() < 0.05:
            runner.fail(ValueError("bad"))
        else:
            runner.finish(str.upper)

    def check(self) -> None:
        bench, left = self.bench, self.instances - len(self.bench.gone)
        assert bench.batcher.resting_instances <= left // 2
        executing = {bench.runners.index(one) // self.slots for one in bench.busy()} - bench.gone
        handed_over = sum(len(one.next or ()) for one in bench.runners)
        if bench.batcher.waiting_requests > handed_over:
            # A request that has left a full instance waits for another one, which executes.
            least = min(1, left) if self.was_full else left
            assert len(executing) >= least, "somebody waits for nothing"


@pytest.mark.parametrize("seed", range(150))
async def test_every_request_is_answered_and_none_waits_while_an_instance_is_idle(seed: int) -> None:
    await Chaos(seed).run()
