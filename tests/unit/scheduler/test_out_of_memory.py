"""Executions that run out of memory: which requests fail, and which batches and instances are used afterwards."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from paceline.scheduler.errors import ExecutionFailed, QueueTimeout
from paceline.scheduler.policy import BatchPolicy
from paceline.scheduler.sizing import PAUSE_NS
from tests.unit.scheduler.workbench import LossBench, one_turn, submit


class ShortBench(LossBench):
    """Has memory for as many rows as `run_all` says."""

    async def run_all(self, fits: int) -> list[tuple[int, bool]]:
        """Run all batches; those of more rows than `fits` fail. Returns their sizes, and whether they failed."""
        ran: list[tuple[int, bool]] = []
        while busy := [runner for runner in self.runners if runner.busy]:
            runner = busy[0]
            rows = runner.padded_rows[-1]
            ran.append((rows, rows > fits))
            assert len(ran) < 1_000
            if rows > fits:
                runner.fail(MemoryError())
            else:
                runner.finish(str.upper)
            await one_turn()
        return ran


@pytest.fixture
async def bench() -> AsyncIterator[ShortBench]:
    bench = ShortBench(BatchPolicy(max_batch_rows=16))
    yield bench
    bench.batcher.close()


def names(count: int) -> list[str]:
    return [f"p{number}" for number in range(count)]


async def test_batch_too_large_for_the_memory_runs_again_in_parts_and_no_request_fails(bench: ShortBench) -> None:
    futures = await bench.submit(*names(16))
    assert await bench.run_all(fits=5) == [(16, True), (8, True), (4, False), (4, False), (4, False), (4, False)]
    assert [future.result() for future in futures] == [name.upper() for name in names(16)]
    assert bench.batcher.allowed_rows == 4


async def test_batches_are_smaller_for_a_while_and_then_grow_again(bench: ShortBench) -> None:
    await bench.submit(*names(16))
    await bench.run_all(fits=8)
    await bench.submit(*names(20))
    assert await bench.run_all(fits=8) == [(8, False), (8, False), (4, False)]
    bench.clock.advance(PAUSE_NS)
    await bench.submit(*names(16))
    assert await bench.run_all(fits=16) == [(16, False)]
    assert bench.batcher.allowed_rows == 16


async def test_request_too_large_by_itself_fails_and_the_others_do_not(bench: ShortBench) -> None:
    (large,) = await bench.submit("large", rows=6)
    small = await bench.submit(*names(4), rows=2)
    await bench.run_all(fits=2)
    with pytest.raises(ExecutionFailed):
        large.result()
    assert [future.result() for future in small] == ["P0", "P1", "P2", "P3"]
    assert bench.seen.reports[0].failed == 1


async def test_request_of_more_rows_than_currently_allowed_runs_alone(bench: ShortBench) -> None:
    await bench.submit(*names(16))
    await bench.run_all(fits=4)
    first, large, last = (submit(bench.batcher, name, rows, "k") for name, rows in (("a", 2), ("b", 10), ("c", 2)))
    await one_turn()
    assert await bench.run_all(fits=10) == [(2, False), (10, False), (2, False)]
    assert [await first, await large, await last] == ["A", "B", "C"]


@pytest.mark.parametrize("place", range(8))
async def test_request_that_needs_too_much_by_itself_makes_no_other_batches_smaller(
    bench: ShortBench, place: int
) -> None:
    given = names(8)
    given[place] = "greedy"
    futures = await bench.submit(*given)
    while bench.runner.busy:
        if "greedy" in bench.runner.batches[-1]:
            bench.runner.fail(MemoryError())
        else:
            bench.runner.finish(str.upper)
        await one_turn()
    assert [isinstance(future.exception(), ExecutionFailed) for future in futures] == [one == "greedy" for one in given]
    assert bench.batcher.allowed_rows == 16
    await bench.submit(*names(16))
    assert await bench.run_all(fits=16) == [(16, False)]
    bench.clock.advance(3 * PAUSE_NS)
    await bench.submit(*names(16))
    assert await bench.run_all(fits=8) == [(16, True), (8, False), (8, False)], "shortages are still learned of"
    assert bench.batcher.allowed_rows == 8


async def test_failed_batch_of_a_single_request_makes_no_other_batches_smaller(bench: ShortBench) -> None:
    (large,) = await bench.submit("large", rows=6)
    assert await bench.run_all(fits=0) == [(6, True)]
    assert isinstance(large.exception(), ExecutionFailed)
    assert bench.batcher.allowed_rows == 16


async def test_each_request_fails_once_where_nothing_fits(bench: ShortBench) -> None:
    futures = await bench.submit(*names(16))
    ran = await bench.run_all(fits=0)
    assert [rows for rows, _ in ran] == [16, 8, 4, 2, *[1] * 16]
    assert all(isinstance(future.exception(), ExecutionFailed) for future in futures)
    assert sum(report.failed for report in bench.seen.reports) == 16


async def test_batch_fails_and_the_next_is_smaller_where_failures_are_not_isolated() -> None:
    bench = ShortBench(BatchPolicy(max_batch_rows=16, isolate_failures=False))
    futures = await bench.submit(*names(16))
    assert await bench.run_all(fits=8) == [(16, True)]
    assert all(isinstance(future.exception(), ExecutionFailed) for future in futures)
    await bench.submit(*names(16))
    assert await bench.run_all(fits=8) == [(8, False), (8, False)]
    bench.batcher.close()


async def test_batch_of_the_smallest_allowed_size_does_not_run_again() -> None:
    bench = ShortBench(BatchPolicy(max_batch_rows=16, batch_sizes=(8, 16)))
    futures = await bench.submit(*names(16))
    assert await bench.run_all(fits=0) == [(16, True), (8, True), (8, True)]
    assert all(isinstance(future.exception(), ExecutionFailed) for future in futures)
    bench.batcher.close()


async def test_request_cancelled_or_expired_meanwhile_does_not_run_again(bench: ShortBench) -> None:
    late = submit(bench.batcher, "late", 1, "k", deadline_ns=bench.clock.now_ns() + 5)
    gone, good, other = await bench.submit("gone", "good", "other")
    gone.cancel()
    bench.clock.advance(5)
    bench.runners[0].fail(MemoryError())
    await bench.run_all(fits=2)
    assert isinstance(late.exception(), QueueTimeout)
    assert [good.result(), other.result()] == ["GOOD", "OTHER"]
    assert bench.runners[0].batches[1:] == [["good", "other"]]


async def test_culprit_is_found_while_memory_is_short(bench: ShortBench) -> None:
    await bench.submit(*names(16))
    await bench.run_all(fits=4)
    futures = await bench.submit("a", "b!", "c", "d")
    while bench.runners[0].busy:
        batch = bench.runners[0].batches[-1]
        if "b!" in batch:
            bench.runners[0].fail(ValueError("bad") if len(batch) <= 2 else MemoryError())
        else:
            bench.runners[0].finish(str.upper)
        await one_turn()
    assert isinstance(futures[1].exception(), ExecutionFailed)
    assert [futures[place].result() for place in (0, 2, 3)] == ["A", "C", "D"]


async def test_two_instances_share_the_parts_of_a_batch_that_was_too_large() -> None:
    bench = ShortBench(BatchPolicy(max_batch_rows=16), instances=2)
    futures = await bench.submit(*names(16))
    busy = next(runner for runner in bench.runners if runner.busy)
    busy.fail(MemoryError())
    await one_turn()
    assert [runner.padded_rows[-1] for runner in bench.runners] == [8, 8]
    await bench.run_all(fits=8)
    assert [future.result() for future in futures] == [name.upper() for name in names(16)]
    bench.batcher.close()


@pytest.mark.parametrize("slots", [1, 2])
async def test_instance_without_memory_for_a_single_request_is_used_last(slots: int) -> None:
    groups: dict[int, int] = {}
    instance_of = {"instance_of": lambda runner: groups.setdefault(id(runner), len(groups) // 2)} if slots > 1 else {}
    bench = ShortBench(BatchPolicy(max_batch_rows=4), instances=2 * slots, **instance_of)

    async def answered_by() -> Any:
        (future,) = await bench.submit("a")
        (busy,) = (runner for runner in bench.runners if runner.busy)
        busy.finish(str.upper)
        assert await future == "A"
        return busy

    (future,) = await bench.submit("a")
    (full,) = (runner for runner in bench.runners if runner.busy)
    full.fail(MemoryError())
    with pytest.raises(ExecutionFailed):
        await future
    others = [await answered_by() for _ in range(5)]
    assert full not in others
    assert not groups or {groups[id(one)] for one in others} == {1 - groups[id(full)]}
    # It is used like the others while these are busy.
    await bench.submit("b", key="b")
    await bench.submit("c", key="c")
    assert not groups or {groups[id(one)] for one in bench.runners if one.busy} == {0, 1}
    assert slots > 1 or full.busy
    bench.batcher.close()


async def test_slot_without_memory_for_a_single_request_is_used_last() -> None:
    bench = ShortBench(BatchPolicy(max_batch_rows=4), instances=2, instance_of=lambda runner: 0)
    (future,) = await bench.submit("a")
    (full,) = (runner for runner in bench.runners if runner.busy)
    full.fail(MemoryError())
    with pytest.raises(ExecutionFailed):
        await future
    for _ in range(3):
        (future,) = await bench.submit("a")
        assert not full.busy
        (busy,) = (runner for runner in bench.runners if runner.busy)
        busy.finish(str.upper)
        assert await future == "A"
    bench.batcher.close()


async def test_lost_instance_that_had_no_memory_is_not_used_again() -> None:
    bench = ShortBench(BatchPolicy(max_batch_rows=1), instances=2)
    await bench.submit("a", "b")
    first, second = bench.runners
    bench.batcher.lose(first, OSError())
    first.fail(MemoryError())
    await one_turn()
    await bench.submit("c")
    assert not first.busy
    assert second.busy
    bench.batcher.close()
