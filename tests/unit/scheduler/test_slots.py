"""Several runners of one instance: one executes, the others get only batches that can't become any larger."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from paceline.scheduler.errors import ExecutionTimeout
from paceline.scheduler.failures import Blame
from paceline.scheduler.instances import Slots
from paceline.scheduler.policy import BatchPolicy
from paceline.scheduler.testing import StepRunner
from tests.unit.scheduler.workbench import Bench, one_turn

MS = 1_000_000


def slots_of(names: str) -> Slots[str]:
    """Runners such as `a1`, slot 1 of instance a."""
    slots: Slots[str] = Slots(lambda runner: runner[0])
    for name in names.split():
        slots.add(name)
    return slots


def test_first_batches_go_to_slots_of_idle_instances() -> None:
    slots = slots_of("a0 a1 b0 b1")
    assert (len(slots.idle), slots.free - len(slots.idle)) == (2, 2)
    first, second = slots.take(), slots.take()
    assert {first[0], second[0]} == {"a", "b"}
    assert (len(slots.idle), slots.free - len(slots.idle)) == (0, 2)
    assert {slots.take()[0], slots.take()[0]} == {"a", "b"}
    assert (len(slots.idle), slots.free - len(slots.idle), slots.free) == (0, 0, 0)


def test_spare_slots_are_of_the_instance_likely_to_be_done_first_whatever_ran_before() -> None:
    slots = slots_of("a0 a1 b0 b1")
    before = slots.take()
    assert before[0] == "b"
    slots.back(before)
    slots.put_last(before)
    assert "".join(slots.take()[0] for _ in range(4)) == "abab"


def test_instance_is_idle_when_all_its_slots_are_back() -> None:
    slots = slots_of("a0 a1")
    one, two = slots.take(), slots.take()
    slots.back(one)
    assert (len(slots.idle), slots.free - len(slots.idle)) == (0, 1)
    slots.back(two)
    assert (len(slots.idle), slots.free - len(slots.idle)) == (1, 1)


def test_instances_of_one_slot_each_are_taken_like_a_stack() -> None:
    slots = slots_of("a0 b0 c0")
    assert (len(slots.idle), slots.free - len(slots.idle)) == (3, 0)
    assert slots.take() == "c0"
    assert slots.take() == "b0"
    slots.back("c0")
    assert [slots.take(), slots.take()] == ["c0", "a0"]


@pytest.mark.parametrize("taken", [0, 1, 2])
@pytest.mark.parametrize("gone", ["a0", "a1"])
def test_removed_slot_is_not_taken_again_whether_it_executes_or_not(taken: int, gone: str) -> None:
    slots = slots_of("a0 a1")
    executing = [slots.take() for _ in range(taken)]
    slots.remove(gone)
    for runner in executing:
        if runner != gone:
            slots.back(runner)
    assert (len(slots.idle), slots.free - len(slots.idle), slots.free) == (1, 0, 1)
    assert slots.take() != gone


def test_slots_of_a_removed_instance_leave_nothing_behind() -> None:
    slots = slots_of("a0 a1")
    slots.remove(slots.take())
    slots.remove(next(iter(slots._free["a"])))
    assert (len(slots.idle), slots.free - len(slots.idle), slots.free) == (0, 0, 0)
    assert slots._free == slots._taken == slots.idle == slots._busy == {}


class SlotsBench(Bench):
    """Instances of two slots each."""

    def __init__(self, policy: BatchPolicy, instances: int = 1) -> None:
        self.hung: list[tuple[Any, Sequence[Any]]] = []
        self.lost: list[Any] = []
        self.returned: list[Any] = []
        super().__init__(
            policy,
            2 * instances,
            replacer=self,
            instance_of=lambda runner: self.runners.index(runner) // 2,
            blames=lambda error: Blame.INSTANCE if isinstance(error, OSError) else Blame.NOBODY,
        )

    def on_hang(self, runner: Any, others: Sequence[Any]) -> None:
        self.hung.append((runner, others))

    def on_loss(self, runner: Any, error: BaseException) -> None:
        self.lost.append(runner)

    def on_return(self, runner: Any) -> None:
        self.returned.append(runner)

    @property
    def executing(self) -> list[str]:
        return sorted("".join(runner.batches[-1]) for runner in self.runners if runner.busy)

    def runner_of(self, batch: str) -> StepRunner[str, str]:
        return next(one for one in self.runners if one.busy and "".join(one.batches[-1]) == batch)

    async def finish(self, batch: str) -> None:
        self.runner_of(batch).finish(str.upper)
        await one_turn()


@pytest.fixture
async def bench() -> AsyncIterator[SlotsBench]:
    bench = SlotsBench(BatchPolicy(max_batch_rows=4, execution_limit_ns=100 * MS, isolate_failures=False))
    yield bench
    bench.batcher.close()


async def test_second_slot_takes_no_batch_that_other_requests_could_join(bench: SlotsBench) -> None:
    await bench.submit(*"a")
    await bench.submit(*"bcd")
    assert bench.executing == ["a"]
    await bench.finish("a")
    assert bench.executing == ["bcd"]


async def test_second_slot_takes_a_full_batch_and_the_rest_waits(bench: SlotsBench) -> None:
    await bench.submit(*"a")
    await bench.submit(*"bcdefg")
    assert bench.executing == ["a", "bcde"]
    await bench.finish("a")
    assert bench.executing == ["bcde"]
    assert bench.batcher.waiting_requests == 2
    await bench.finish("bcde")
    assert bench.executing == ["fg"]


async def test_both_slots_are_always_busy_at_saturation(bench: SlotsBench) -> None:
    futures = await bench.submit(*"abcdefghijklmnop")
    assert bench.executing == ["abcd", "efgh"]
    await bench.finish("abcd")
    assert bench.executing == ["efgh", "ijkl"]
    for batch in ("efgh", "ijkl", "mnop"):
        await bench.finish(batch)
    assert [future.result() for future in futures] == list("ABCDEFGHIJKLMNOP")


async def test_full_batch_does_not_overtake_an_older_request_of_another_shape(bench: SlotsBench) -> None:
    await bench.submit(*"a")
    await bench.submit(*"x", key="rare")
    await bench.submit(*"bcdefghi")
    assert bench.executing == ["a"]
    await bench.finish("a")
    assert bench.executing == ["bcde", "x"]


async def test_requests_that_never_share_a_batch_are_taken_ahead_one_by_one() -> None:
    bench = SlotsBench(BatchPolicy(max_batch_rows=4, max_batch_requests=1))
    await bench.submit(*"abc")
    assert bench.executing == ["a", "b"]
    await bench.finish("a")
    assert bench.executing == ["b", "c"]
    bench.batcher.close()


async def test_two_instances_are_both_given_batches_before_either_gets_a_second() -> None:
    bench = SlotsBench(BatchPolicy(max_batch_rows=4), instances=2)
    await bench.submit(*"abcdefgh")
    assert [runner.busy for runner in bench.runners].count(True) == 2
    assert {bench.runners.index(runner) // 2 for runner in bench.runners if runner.busy} == {0, 1}
    await bench.submit(*"ijklmnopqrst")
    assert [runner.busy for runner in bench.runners] == [True] * 4
    bench.batcher.close()


async def test_hang_in_one_slot_takes_the_other_out_once_it_is_done(bench: SlotsBench) -> None:
    first = await bench.submit(*"abcd")
    bench.clock.advance(50 * MS)
    second = await bench.submit(*"efghij")
    hanging, other = bench.runner_of("abcd"), bench.runner_of("efgh")
    bench.clock.advance(60 * MS)
    await one_turn()
    assert bench.hung == [(hanging, [other])]
    assert all(isinstance(future.exception(), ExecutionTimeout) for future in first)
    await bench.finish("efgh")
    assert [future.result() for future in second[:4]] == list("EFGH")
    assert (bench.returned, other.stopped, bench.executing) == ([other], True, ["abcd"])
    hanging.finish(str.upper)
    assert bench.returned == [other, hanging]
    fresh: StepRunner[str, str] = StepRunner(bench.clock)
    bench.runners += [fresh, StepRunner(bench.clock)]
    bench.batcher.add(fresh)
    await one_turn()
    assert fresh.batches == [["i", "j"]]


async def test_hang_in_both_slots_is_reported_once(bench: SlotsBench) -> None:
    futures = await bench.submit(*"abcdefgh")
    slots = [bench.runner_of("abcd"), bench.runner_of("efgh")]
    bench.clock.advance(100 * MS)
    await one_turn()
    assert len(bench.hung) == 1
    assert all(isinstance(future.exception(), ExecutionTimeout) for future in futures)
    for slot in slots:
        slot.finish(str.upper)
    assert bench.returned == slots


async def test_loss_takes_both_slots_out_whether_they_execute_or_not(bench: SlotsBench) -> None:
    await bench.submit(*"abcdefgh")
    lost, other = bench.runner_of("abcd"), bench.runner_of("efgh")
    lost.fail(OSError("gone"))
    await one_turn()
    assert (bench.lost, lost.stopped, other.stopped) == ([lost], True, False)
    other.fail(OSError("gone too"))
    await one_turn()
    assert (bench.lost, bench.returned, other.stopped) == ([lost], [other], True)
    await bench.submit(*"x")
    assert bench.executing == []
    fresh: StepRunner[str, str] = StepRunner(bench.clock)
    bench.runners += [fresh]
    bench.batcher.add(fresh)
    await one_turn()
    assert fresh.batches == [["x"]]
