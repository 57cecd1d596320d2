"""Batches that fail: the requests at fault get the error, all others an answer, and the search is bounded."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from paceline.backends.errors import ExecutionError, InstanceError
from paceline.protos import inference_pb2 as pb
from tests.integration.scripted import Script, busy, mark_of, own, queued, request, send, totals
from tests.integration.serving import failure_of, serving
from tests.memory_models import lose_row
from tests.polling import eventually_async

INTERNAL = grpc.StatusCode.INTERNAL
MERGE = "max_batch_size: 32 dynamic_batching { }"
POISON = 13


def poisoned(error: BaseException) -> Script:
    script = Script()
    script.errors[POISON] = error
    return script


@pytest.mark.parametrize("instances", [1, 2])
async def test_poisoned_request_among_31_good_ones_fails_alone(tmp_path: Path, instances: int) -> None:
    script = poisoned(ExecutionError("that row again"))
    text = f"{MERGE} instance_group {{ count: {instances} }}"
    async with serving(tmp_path, {"m": script.model}, config=text) as served:
        async with busy(served, script, instances):
            calls = await queued(served, (request(mark) for mark in range(32)))
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [mark_of(one) for mark, one in enumerate(outcomes) if mark != POISON] == [
            mark for mark in range(32) if mark != POISON
        ]
        assert await failure_of(calls[POISON]) == (INTERNAL, "model 'm': that row again")
        assert totals(await served.metrics()) == {
            "success": 31 + instances, "REJECTED": 0, "CANCELED": 0, "BACKEND": 1, "OTHER": 0,
        }  # fmt: skip
        assert len(script.served) == 1 + 2 * 5  # five times in halves
        assert mark_of(await served.infer(request(99))) == 99


async def test_batch_of_poisoned_requests_fails_after_a_bounded_search(tmp_path: Path) -> None:
    script = Script()
    script.model.faults.raise_when(lambda inputs: bool((inputs[0] >= 0).any()), ExecutionError("no"))
    async with serving(tmp_path, {"m": script.model}, config=MERGE) as served:
        async with busy(served, script):
            calls = await queued(served, (request(mark) for mark in range(32)))
        assert await asyncio.gather(*map(failure_of, calls)) == [(INTERNAL, "model 'm': no")] * 32
        assert len(script.model.batches) <= 1 + 1 + 4 * 5 + 32
        assert {len(batch) for batch in script.model.batches[1 + 1 + 4 * 5 :]} == {1}
        assert totals(await served.metrics())["BACKEND"] == 32


async def test_poisoned_request_fails_its_whole_batch_with_isolation_switched_off(tmp_path: Path) -> None:
    script = poisoned(ExecutionError("all of you"))
    async with serving(tmp_path, {"m": script.model}, config=MERGE + own(isolate_failures=False)) as served:
        async with busy(served, script):
            calls = await queued(served, (request(mark) for mark in range(10, 18)))
        assert await asyncio.gather(*map(failure_of, calls)) == [(INTERNAL, "model 'm': all of you")] * 8
        assert totals(await served.metrics())["BACKEND"] == 8
    assert len(script.served) == 1


@pytest.mark.parametrize(
    "error", [InstanceError("cuBLAS failed"), SystemExit("bye"), KeyboardInterrupt("stop")],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
async def test_batch_is_not_run_again_after_a_failure_of_the_session(tmp_path: Path, error: BaseException) -> None:
    script = poisoned(error)
    async with serving(tmp_path, {"m": script.model}, config=MERGE) as served:
        async with busy(served, script):
            calls = await queued(served, (request(mark) for mark in range(10, 18)))
        assert await asyncio.gather(*map(failure_of, calls)) == [(INTERNAL, f"model 'm': {error}")] * 8
        assert len(script.served) == 1
        assert mark_of(await served.infer(request(1))) == 1


@pytest.mark.parametrize(
    "error", [ZeroDivisionError("x / 0"), KeyError("k"), StopIteration(), ExceptionGroup("e", [OSError()])],
    ids=lambda error: type(error).__name__,
)  # fmt: skip
async def test_failure_by_any_exception_is_isolated(tmp_path: Path, error: Exception) -> None:
    script = poisoned(error)
    async with serving(tmp_path, {"m": script.model}, config=MERGE) as served:
        async with busy(served, script):
            calls = await queued(served, (request(mark) for mark in (12, 13, 14)))
        assert (await failure_of(calls[1]))[0] is INTERNAL
        assert [mark_of(await calls[0]), mark_of(await calls[2])] == [12, 14]


async def test_batch_whose_outputs_lack_a_row_is_run_again_and_answered(tmp_path: Path) -> None:
    script = Script()
    async with serving(tmp_path, {"m": script.model}, config=MERGE) as served:
        async with busy(served, script) as gate:
            calls = await queued(served, (request(mark) for mark in range(4)))
            script.model.faults.distort_next(lambda outputs: outputs)  # of the request that keeps it busy
            script.model.faults.distort_next(lose_row)
            gate.open()
        assert [mark_of(answer) for answer in await asyncio.gather(*calls)] == [0, 1, 2, 3]
    assert [len(batch) for batch in script.served] == [4, 2, 2]


@pytest.mark.parametrize("gone", [10, POISON, 17])
async def test_failure_with_a_request_cancelled_meanwhile_answers_the_others(tmp_path: Path, gone: int) -> None:
    script = poisoned(ExecutionError("no"))
    gate = script.hold(POISON)
    async with serving(tmp_path, {"m": script.model}, config=MERGE) as served:
        async with busy(served, script):
            calls = await queued(served, (request(mark) for mark in range(10, 18)))
        await asyncio.to_thread(gate.wait_entered, 1)
        calls[gone - 10].cancel()
        await asyncio.gather(calls[gone - 10], return_exceptions=True)
        await served.stub.ServerLive(
            pb.ServerLiveRequest(), timeout=20
        )  # behind the cancellation on the same connection
        gate.open()
        for mark, call in zip(range(10, 18), calls, strict=True):
            if mark == POISON != gone:
                assert await failure_of(call) == (INTERNAL, "model 'm': no")
            elif mark != gone:
                assert mark_of(await call) == mark
        counted = totals(await served.metrics())
        assert sum(counted.values()) == 1 + 8
        assert await served.metric("nv_inference_pending_request_count") == 0


async def test_requests_that_wait_during_a_failure_are_served_afterwards(tmp_path: Path) -> None:
    script = poisoned(ExecutionError("no"))
    gate = script.hold(POISON)
    text = f"max_batch_size: 4 dynamic_batching {{ }} {own(isolate_failures=True)}"
    async with serving(tmp_path, {"m": script.model}, config=text) as served:
        async with busy(served, script):
            calls = await queued(served, (request(mark) for mark in (POISON, 1, 2, 3)))
        await asyncio.to_thread(gate.wait_entered, 1)
        behind = await queued(served, (request(mark) for mark in (4, 5, 6, 7, 8)))
        gate.open()
        assert await failure_of(calls[0]) == (INTERNAL, "model 'm': no")
        assert [mark_of(one) for one in await asyncio.gather(*calls[1:], *behind)] == [1, 2, 3, 4, 5, 6, 7, 8]


async def test_many_failures_leave_nothing_behind(tmp_path: Path) -> None:
    script = poisoned(ValueError("no"))
    async with serving(tmp_path, {"m": script.model}, config=MERGE) as served:
        for round_ in range(5):
            calls = send(served, *(request(POISON if mark % 4 == 0 else mark) for mark in range(1 + round_, 20)))
            await asyncio.gather(*calls, return_exceptions=True)
        await eventually_async(lambda: served.waiting("m") == 0, "an empty queue")
        sent = sum(19 - round_ for round_ in range(5))
        assert sum(totals(await served.metrics()).values()) == sent
        assert await served.metric("paceline_lanes") == 0
