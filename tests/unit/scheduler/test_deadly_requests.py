"""Deadly requests, which end their instance: what is executed again, how often, what happens to waiting requests."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from paceline.scheduler.errors import NoInstance, QueueTimeout
from paceline.scheduler.observer import Drop
from paceline.scheduler.policy import BatchPolicy
from paceline.scheduler.request import Request
from paceline.scheduler.testing import StepRunner
from tests.lengths import LONG
from tests.unit.scheduler.workbench import LossBench, one_turn


@pytest.fixture
async def bench() -> AsyncIterator[LossBench]:
    bench = LossBench(BatchPolicy(max_batch_rows=16))
    yield bench
    bench.batcher.close()


class DeadlyBench(LossBench):
    """A payload with a `!` ends its instance, which is replaced."""

    async def run_all(self) -> list[Sequence[str]]:
        """Run all batches. Returns those that ended an instance."""
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


def outcomes(futures: Sequence[Request[str, str]]) -> list[str]:
    return ["failed" if future.exception() else future.result() for future in futures]


@pytest.mark.parametrize("deadly", [(0,), (7,), (3, 5)])
async def test_only_the_deadly_requests_of_a_batch_fail(deadly: tuple[int, ...]) -> None:
    bench = DeadlyBench(BatchPolicy(max_batch_rows=8))
    payloads = deadly_among(8, *deadly)
    futures = await bench.submit(*payloads)
    assert await bench.run_all() == [payloads, *([payloads[number]] for number in deadly)]
    executed = [batch for runner in bench.runners for batch in runner.batches]
    assert sorted(executed, key=len) == [*([payload] for payload in payloads), payloads]
    assert outcomes(futures) == ["failed" if "!" in payload else payload.upper() for payload in payloads]
    assert sum(report.failed for report in bench.seen.reports) == len(deadly)
    assert len(bench.lost) == 1 + len(deadly)
    bench.batcher.close()


async def test_one_batch_ends_four_instances_at_most() -> None:
    bench = DeadlyBench(BatchPolicy(max_batch_rows=16))
    futures = await bench.submit(*deadly_among(16, 2, 5, 9, 11, 12))
    waiting = await bench.submit("later")
    assert len(await bench.run_all()) == 4
    assert outcomes(futures) == ["P0", "P1", "failed", "P3", "P4", "failed", "P6", "P7", "P8", *["failed"] * 7]
    assert sum(report.failed for report in bench.seen.reports) == 9
    assert outcomes(waiting) == ["LATER"]
    bench.batcher.close()


async def test_deadly_batch_fails_as_a_whole_where_failures_are_not_isolated() -> None:
    bench = DeadlyBench(BatchPolicy(max_batch_rows=8, isolate_failures=False))
    futures = await bench.submit(*deadly_among(8, 3))
    assert len(await bench.run_all()) == 1
    assert outcomes(futures) == ["failed"] * 8
    bench.batcher.close()


async def test_cancelled_request_is_not_executed_again_after_its_instance_ended() -> None:
    bench = DeadlyBench(BatchPolicy(max_batch_rows=4))
    futures = await bench.submit("a", "b!", "gone")
    bench.runner.fail(ChildProcessError())
    futures[2].cancel()
    another = await bench.add()
    await bench.run_all()
    assert (outcomes(futures[:2]), another.batches) == (["A", "failed"], [["a"], ["b!"]])
    assert bench.seen.count(Drop.CANCELLED) == 1
    bench.batcher.close()


async def test_cancelled_requests_stop_waiting_for_another_instance(bench: LossBench) -> None:
    futures = await bench.submit("a", "b")
    bench.runner.fail(ChildProcessError())
    await one_turn()
    assert bench.batcher.waiting_requests == 2
    for future in futures:
        future.cancel()
    await asyncio.wait_for(bench.batcher.drain(), 5)
    assert bench.seen.count(Drop.CANCELLED) == 2


async def test_expired_requests_stop_waiting_for_another_instance(bench: LossBench) -> None:
    (hurried,) = bench.put("a", deadline_ns=bench.clock.now_ns() + 50)
    (patient,) = await bench.submit("b")
    bench.runner.fail(ChildProcessError())
    await one_turn()
    bench.clock.advance(50)
    assert isinstance(hurried.exception(), QueueTimeout)
    assert not patient.done()
    another = await bench.add()
    another.finish(str.upper)
    await one_turn()
    assert patient.result() == "B"


async def test_suspect_stays_alone_when_its_instance_ended_before_beginning_it() -> None:
    bench = LossBench(BatchPolicy(max_batch_rows=8))
    await bench.submit("a", "b")
    bench.runner.fail(ChildProcessError())
    second = await bench.add()
    others = await bench.submit("x", "y")
    assert second.batches == [["a"]]
    second.fail(EOFError())
    third = await bench.add()
    assert third.batches == [["b"]]
    third.finish(str.upper)
    await one_turn()
    assert third.batches[1:] == [["a"]]
    third.finish(str.upper)
    await one_turn()
    assert third.batches[2:] == [["x", "y"]]
    third.finish(str.upper)
    await one_turn()
    assert [future.result() for future in others] == ["X", "Y"]
    bench.batcher.close()


@pytest.mark.parametrize("seed", range(50 if LONG else 15))
async def test_every_request_is_answered_once_however_many_of_them_are_deadly(seed: int) -> None:
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


@pytest.mark.parametrize("seed", range(100 if LONG else 30))
async def test_every_request_is_answered_and_reported_once_whatever_happens(seed: int) -> None:
    bench = Chaos(seed)
    for _ in range(80):
        await bench.step()
    await bench.end()


class Chaos(LossBench):
    """Instances fail in every way, and are replaced after a while, or not; callers cancel, and run out of time."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.futures: list[Any] = []
        self.refused = 0
        policy = BatchPolicy(
            max_batch_rows=8,
            preserve_ordering=self.chance.random() < 0.3,
            isolate_failures=self.chance.random() < 0.9,
            batch_sizes=(1, 8) if self.chance.random() < 0.2 else (),
        )
        super().__init__(policy, instances=self.chance.randint(1, 3))

    @property
    def instances(self) -> int:
        return sum(not runner.stopped for runner in self.runners)

    async def step(self) -> None:
        chance = self.chance
        happens = chance.random()
        if happens < 0.3:
            await self.come(chance.randint(1, 6))
        elif happens < 0.4 and self.futures:
            chance.choice(self.futures).cancel()
        elif happens < 0.45:
            self.clock.advance(chance.randint(1, 30))
        elif happens < 0.47 and not self.instances:
            self.batcher.suspend()
        if (busy := [runner for runner in self.runners if runner.busy]) and chance.random() < 0.6:
            self.finish(chance.choice(busy))
        if self.instances < 2 and chance.random() < 0.5:
            await self.add()
        await one_turn()

    async def come(self, count: int) -> None:
        for number in range(count):
            payload = f"p{number}" + "!" * (self.chance.random() < 0.2)
            deadline_ns = self.clock.now_ns() + self.chance.choice([20, 500, 10**9])
            try:
                self.futures += self.put(payload, key=self.chance.choice("kkq"), deadline_ns=deadline_ns)
            except NoInstance:
                self.refused += 1

    def finish(self, runner: StepRunner[str, str]) -> None:
        if any("!" in payload for payload in runner.batches[-1]):
            runner.fail(ChildProcessError())
        elif self.chance.random() < 0.15:
            runner.fail(self.chance.choice([ValueError(), EOFError(), MemoryError(), OSError()]))
        else:
            runner.finish(str.upper)

    async def end(self) -> None:
        draining = asyncio.create_task(self.batcher.drain())
        for _ in range(600):
            await one_turn()
            if draining.done():
                break
            if not self.instances:
                await self.add()
            for runner in [runner for runner in self.runners if runner.busy]:
                self.finish(runner)
        self.batcher.close()
        await draining
        for future in self.futures:
            assert future.cancelled() or future.exception() or future.result().isupper()
        told = sum(len(report.waits_ns) + report.failed + report.cancelled for report in self.seen.reports)
        assert told + len(self.seen.drops) == len(self.futures) + self.refused
