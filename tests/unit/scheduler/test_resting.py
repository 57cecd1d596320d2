"""What becomes of requests while instances rest, for want of memory that others have."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from scheduler.errors import ExecutionFailed, QueueFull
from scheduler.isolation import SHORTEST_WAIT_NS, Blame
from scheduler.policy import BatchPolicy, QueuePolicy
from scheduler.shortages import LONGEST_REST_NS, SHORTEST_REST_NS
from scheduler.testing import StepRunner
from tests.unit.scheduler.workbench import Bench, one_turn

BLAMES = {MemoryError: Blame.SIZE, OSError: Blame.INSTANCE, EOFError: Blame.FATAL, ValueError: Blame.REQUESTS}


class Gpus(Bench):
    """Instances of so many slots; those in `full` have no memory for anything."""

    def __init__(self, instances: int = 2, slots: int = 1, **more: Any) -> None:
        self.full: set[int] = set()
        self.gone: set[int] = set()
        self._slots = slots
        policy = more.pop("policy", BatchPolicy(max_batch_rows=4))
        if slots > 1:
            more["instance_of"] = self.instance_of
        super().__init__(policy, instances * slots, blames=lambda error: BLAMES[type(error)], hangs=self, **more)

    def instance_of(self, runner: Any) -> int:
        instance = self.runners.index(runner) // self._slots if runner in self.runners else -1
        assert instance not in self.gone, "nothing is known any more of what was given up"
        return instance

    def on_hang(self, runner: Any, others: Any) -> None:
        self.gone.add(self.runners.index(runner) // self._slots)

    def on_loss(self, runner: Any, error: BaseException) -> None:
        self.on_hang(runner, ())

    def on_return(self, runner: Any) -> None:
        pass

    def busy(self, *instances: int) -> list[Any]:
        """Runners that execute, of these or all instances."""
        return [
            one
            for place, one in enumerate(self.runners)
            if one.busy and place // self._slots in (instances or range(99))
        ]

    async def end(self, *instances: int) -> None:
        """Have these, or all, end what they execute."""
        for runner in self.busy(*instances):
            if self.runners.index(runner) // self._slots in self.full:
                runner.fail(MemoryError())
            else:
                runner.finish(str.upper)
        await one_turn()

    def executing(self, *names: str) -> list[Any]:
        """The runners that execute these."""
        return [next(one for one in self.busy() if one.batches[-1] == [name]) for name in names]

    async def warm(self) -> None:
        """Let each instance execute something."""
        await self.submit(*"w" * 4 * len(self.runners))
        assert len(self.busy()) == len(self.runners)
        while self.busy():
            await self.end()


async def refused_of(bench: Gpus, clients: int, took_ns: int = 5_000_000) -> int:
    """So many ask again and again, while instance 0 fails at once, time and again, before another one is done, which
    takes so long."""
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
async def test_no_request_is_refused_that_another_instance_has_memory_for(
    slots: int, clients: int, took_ns: int
) -> None:
    bench = Gpus(slots=slots)
    await bench.warm()
    bench.full = {0}
    assert await refused_of(bench, clients, took_ns) == 0
    assert bench.batcher.allowed_rows == 4
    assert len([batch for one in bench.runners[:slots] for batch in one.batches]) < 30, "it is tried ever more seldom"
    bench.batcher.close()


async def test_request_is_taken_on_past_as_many_instances_as_may_rest() -> None:
    bench = Gpus(4)
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
async def test_request_that_fits_nowhere_is_refused_although_all_execute_smaller_ones_like_it(
    instances: int, took_ns: int
) -> None:
    """Of the same key, so that each is a witness against the others again and again."""
    bench = Gpus(instances)
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


async def left_one(request: str, *others: str) -> tuple[Gpus, list[Any], list[Any]]:
    """An instance had no memory for `request` and rests, while the others execute. Their futures and runners."""
    bench = Gpus(1 + len(others), policy=BatchPolicy(max_batch_rows=1))
    await bench.warm()
    futures = await bench.submit(request, *others)
    runners = bench.executing(request, *others)
    runners[0].fail(MemoryError())
    await one_turn()
    assert bench.batcher.resting_instances == 1
    return bench, futures, runners


async def test_request_that_waits_for_another_instance_keeps_nobody_from_the_one_that_it_has_left() -> None:
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


async def test_request_goes_back_to_the_instance_that_it_has_left_where_there_is_no_other_any_more() -> None:
    bench, (moved, _), (here, there) = await left_one("moved", "lost")
    there.fail(OSError("lost"))
    await one_turn()
    here.finish(str.upper)
    assert await moved == "MOVED"
    bench.batcher.close()


@pytest.mark.parametrize("others", [["hangs"], ["hang", "all", "others"]])
@pytest.mark.parametrize("fits", [True, False])
async def test_request_waits_for_another_instance_no_longer_than_an_execution_may_take_and_tries_once_more(
    fits: bool, others: list[str]
) -> None:
    bench, (moved, *_), (here, *there) = await left_one("moved", *others)
    bench.clock.advance(SHORTEST_WAIT_NS - 1)
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


async def test_request_waits_longer_for_another_instance_where_executions_are_known_to_take_longer() -> None:
    bench = Gpus(policy=BatchPolicy(max_batch_rows=1))
    await bench.submit("a", "b")
    bench.clock.advance(2 * SHORTEST_WAIT_NS)
    await bench.end()
    (moved, _) = await bench.submit("moved", "long")
    here, there = bench.executing("moved", "long")
    here.fail(MemoryError())
    bench.clock.advance(2 * SHORTEST_WAIT_NS)
    await one_turn()
    assert not here.busy
    there.finish(str.upper)
    await one_turn()
    there.finish(str.upper)
    assert await moved == "MOVED"
    bench.batcher.close()


async def test_who_waits_for_another_instance_takes_room_in_the_queue() -> None:
    bench = Gpus(policy=BatchPolicy(max_batch_rows=1, queue=QueuePolicy(max_queue_size=3)))
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


async def test_request_waits_for_an_instance_that_rests_rather_than_go_back() -> None:
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


async def test_parts_of_a_batch_that_was_too_large_run_wherever_there_is_an_instance() -> None:
    bench = Gpus(policy=BatchPolicy(max_batch_rows=8))
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


async def test_instance_that_is_gone_is_none_of_those_that_had_no_memory_for_a_request() -> None:
    bench = Gpus(3, policy=BatchPolicy(max_batch_rows=1))
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


async def test_where_all_instances_are_full_each_request_fails_and_all_serve_when_there_is_memory_again() -> None:
    bench = Gpus()
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


async def test_rest_ends_where_the_others_are_lost_and_who_waits_is_executed() -> None:
    bench = Gpus(policy=ONE_ROW)
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


async def resting(**how: Any) -> Gpus:
    """Instance 0 had no memory for a request alone, and rests; all others execute."""
    bench = Gpus(**{"policy": ONE_ROW, **how})
    await bench.warm()
    bench.full = {0}
    await bench.submit(*"a" * len(bench.runners))
    bench.busy(0)[0].fail(MemoryError())
    await one_turn()
    assert bench.batcher.resting_instances == 1
    return bench


@pytest.mark.parametrize("lost", [True, False], ids=["lost", "hangs"])
async def test_resting_instance_that_is_given_up_over_its_other_slot_gets_nothing_more(lost: bool) -> None:
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


async def test_slot_of_a_resting_instance_ends_what_it_executes_and_gets_nothing_more() -> None:
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


async def test_instance_that_has_rested_comes_last() -> None:
    bench = await resting(policy=BatchPolicy(max_batch_rows=1))
    while bench.busy():
        await bench.end()
    bench.clock.advance(SHORTEST_REST_NS)
    await one_turn()
    assert bench.batcher.resting_instances == 0
    await bench.submit("a")
    assert not bench.busy(0)
    bench.batcher.close()


async def test_instance_that_rests_is_handed_nothing_to_go_on_with() -> None:
    bench = Gpus(stages=True, policy=BatchPolicy(max_batch_rows=1))
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
    """A batcher of one to four instances to which anything may happen, by chance."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.slots, self.instances = self.chance.choice([1, 1, 2]), self.chance.randint(1, 4)
        policy = BatchPolicy(
            max_batch_rows=self.chance.choice([1, 4]),
            execution_limit_ns=self.chance.choice([0, 50_000_000]),
            isolate_failures=self.chance.random() < 0.9,
        )
        stages = self.slots == 1 and self.chance.random() < 0.5
        self.bench = Gpus(self.instances, self.slots, policy=policy, stages=stages)
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
            # Who has left a full instance waits for another one, which executes.
            least = min(1, left) if self.was_full else left
            assert len(executing) >= least, "somebody waits for nothing"


@pytest.mark.parametrize("seed", range(150))
async def test_whatever_happens_everybody_is_answered_and_nobody_waits_while_an_instance_is_idle(seed: int) -> None:
    await Chaos(seed).run()
