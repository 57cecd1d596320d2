"""A request larger than a batch is split: its parts are joined exactly, and all withdrawn if one of them fails."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from paceline.backends.errors import ExecutionError
from paceline.backends.spec import Tensors
from paceline.scheduler.batcher import Batcher
from paceline.scheduler.errors import ExecutionFailed, QueueFull
from paceline.scheduler.observer import Drop
from paceline.scheduler.policy import BatchPolicy, QueueLimits, QueuePolicy
from paceline.scheduler.request import Request
from paceline.scheduler.testing import ManualClock, RecordingObserver, StepRunner
from paceline.server.requests.parts import Parts
from tests.unit.scheduler.workbench import submit
from tests.wire import Array, rows_of_floats


class Bench:
    def __init__(self, policy: BatchPolicy, instances: int = 1) -> None:
        self.clock = ManualClock(now_ns=1)
        self.runners: list[StepRunner[Tensors, Tensors]] = [StepRunner(self.clock) for _ in range(instances)]
        self.seen = RecordingObserver()
        self.batcher: Batcher[Tensors, Tensors] = Batcher(policy, self.runners, clock=self.clock, observer=self.seen)
        self.batcher.start()

    def submit(self, *inputs: Array, size_bytes: int = 0) -> Request[Any, Any]:
        whole: Request[Any, Any] = Request(inputs, inputs[0].shape[0], "k", size_bytes=size_bytes)
        Parts(whole, self.batcher)
        return whole

    @property
    def rows(self) -> list[list[int]]:
        """For each batch that began, the rows of its requests."""
        return [[inputs[0].shape[0] for inputs in batch] for runner in self.runners for batch in runner.batches]

    async def run_all(self) -> None:
        await several_turns()
        while busy := [runner for runner in self.runners if runner.busy]:
            for runner in reversed(busy):
                runner.finish(negated)
            await several_turns()


def negated(inputs: Tensors) -> Sequence[Array]:
    return [-array for array in inputs]


async def several_turns() -> None:
    for _ in range(70):
        await asyncio.sleep(0)


@pytest.mark.parametrize("rows", [9, 16, 17, 100])
@pytest.mark.parametrize("instances", [1, 3])
async def test_split_any_number_of_rows_is_joined_exactly(rows: int, instances: int) -> None:
    bench = Bench(BatchPolicy(max_batch_rows=8), instances)
    a, b = rows_of_floats(rows, 3), rows_of_floats(rows, 1, first=1000)
    call = bench.submit(a, b)
    await bench.run_all()
    x, y = await call
    np.testing.assert_array_equal(x, -a)
    np.testing.assert_array_equal(y, -b)
    assert call.facts is not None
    assert call.facts.rows == (rows % 8 or 8)
    assert max(sum(batch) for batch in bench.rows) == 8
    assert sum(sum(batch) for batch in bench.rows) == rows
    bench.batcher.close()


async def test_split_bytes_are_joined_exactly() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=2))
    text = np.array([[b"a"], [b""], [b"\x00\xff"], [b"d" * 100], [b"e"]], object)
    call = bench.submit(text)
    await several_turns()
    while bench.runners[0].busy:
        bench.runners[0].finish(list)
        await several_turns()
    (joined,) = await call
    assert joined.tolist() == text.tolist()
    bench.batcher.close()


async def test_split_remainder_may_share_a_batch_with_other_requests() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=8))
    other = submit(bench.batcher, (rows_of_floats(1),), 1, "k")
    call = bench.submit(rows_of_floats(12))
    await bench.run_all()
    await call
    await other
    assert sorted(map(sorted, bench.rows)) in ([[1, 4], [8]], [[1], [4], [8]])
    bench.batcher.close()


@pytest.mark.parametrize("failing", [0, 1, 2])
async def test_split_part_that_fails_fails_the_request_once_and_withdraws_the_others(failing: int) -> None:
    bench = Bench(BatchPolicy(max_batch_rows=4, isolate_failures=False))
    call = bench.submit(rows_of_floats(16))
    await several_turns()
    for _ in range(failing):
        bench.runners[0].finish(negated)
    bench.runners[0].fail(ExecutionError("bad part"))
    await several_turns()
    with pytest.raises(ExecutionFailed, match="bad part"):
        await call
    assert bench.batcher.waiting_requests == 0
    await bench.run_all()  # those that had already begun
    left = sum(len(report.waits_ns) + report.failed + report.cancelled for report in bench.seen.reports)
    assert left + bench.seen.count(Drop.CANCELLED) == 4
    bench.batcher.close()


@pytest.mark.parametrize(
    "policy",
    [
        BatchPolicy(max_batch_rows=4, queue=QueuePolicy(max_queue_size=2)),
        BatchPolicy(max_batch_rows=4, limits=QueueLimits(max_rows=10)),
        BatchPolicy(max_batch_rows=4, limits=QueueLimits(max_bytes=100)),
    ],
    ids=["requests", "rows", "bytes"],
)
async def test_split_request_larger_than_the_queue_is_not_refused_because_of_its_own_parts(policy: BatchPolicy) -> None:
    bench = Bench(policy)
    whole = rows_of_floats(16)
    call = bench.submit(whole, size_bytes=128)
    await several_turns()
    await bench.run_all()
    (joined,) = await call
    np.testing.assert_array_equal(joined, -whole)
    assert bench.rows == [[4], [4], [4], [4]]
    assert not bench.seen.drops
    bench.batcher.close()


async def test_split_request_is_refused_whole_if_others_leave_it_no_room() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=4, queue=QueuePolicy(max_queue_size=2)))
    runs = submit(bench.batcher, (rows_of_floats(4),), 4, "other")
    await several_turns()
    waits = submit(bench.batcher, (rows_of_floats(4),), 4, "other")
    with pytest.raises(QueueFull):
        await bench.submit(rows_of_floats(16), size_bytes=128)
    assert bench.batcher.waiting_requests == 1
    await bench.run_all()
    assert runs.done()
    assert waits.done()
    bench.batcher.close()


async def test_split_request_that_is_cancelled_withdraws_its_waiting_parts() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=4))
    call = bench.submit(rows_of_floats(16))
    await several_turns()
    call.cancel()
    await several_turns()
    assert call.cancelled()
    assert bench.batcher.waiting_requests == 0
    assert bench.seen.count(Drop.CANCELLED) == 3
    await bench.run_all()
    assert bench.rows == [[4]]
    bench.batcher.close()


async def test_split_parts_with_outputs_that_cannot_be_joined_are_an_execution_failure() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=1))
    call = bench.submit(rows_of_floats(2))
    await several_turns()
    for columns in (3, 4):
        bench.runners[0].finish(lambda inputs, columns=columns: [np.zeros((1, columns), np.float32)])
        await several_turns()
    with pytest.raises(ExecutionFailed, match=r"parts.*output 0.*\[1, 3\].*\[1, 4\]"):
        await call
    bench.batcher.close()
