"""Requests that may not wait, or no longer: refused, expired and cancelled ones, and their neighbours."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.integration.serving import Served, echo_model, failure_of, serving
from tests.memory_models import MemoryModel
from tests.polling import eventually_async
from tests.wire import infer, rows_of_floats

pytestmark = pytest.mark.usefixtures("frontends")

Code = grpc.StatusCode

ONE = infer("m", {"a": rows_of_floats(1)})
HASTY = infer("m", {"a": rows_of_floats(1)}, parameters={"priority": 2})
PATIENT_UNLESS_HASTY = "priority_levels: 2 default_priority_level: 1 priority_queue_policy { key: 1 value { } }"
"""The default policy doesn't apply to requests without a priority."""


def config(queue: str = "", batching: str = "") -> str:
    return f"max_batch_size: 4 dynamic_batching {{ {batching} default_queue_policy {{ {queue} }} }}"


@asynccontextmanager
async def busy_server(tmp_path: Path, configuration: str) -> AsyncIterator[tuple[Served, MemoryModel]]:
    """A server whose model is busy with one request until the block ends; that request must be answered, and so must
    the next; nothing may be left in the queue."""
    model = echo_model()
    async with serving(tmp_path, {"m": model}, config=configuration) as served:
        model.gate.close()
        blocker = asyncio.create_task(served.infer(ONE, timeout_s=None))
        await asyncio.to_thread(model.gate.wait_entered, 1)
        yield served, model
        model.gate.open()
        assert (await blocker).raw_output_contents[0] == ONE.raw_input_contents[0]
        assert (await served.infer(ONE, timeout_s=None)).raw_output_contents[0] == ONE.raw_input_contents[0]
        assert await served.metric("nv_inference_pending_request_count") == 0
        assert await served.metric("paceline_lanes") == 0
        assert await served.metric("nv_inference_count") == sum(sum(batch) for batch in model.batches)


async def waiting(served: Served, count: int) -> list[asyncio.Task[Any]]:
    """`count` more requests of one row, all in the queue."""
    before = served.waiting("m")
    calls = [asyncio.create_task(served.infer(ONE)) for _ in range(count)]
    await eventually_async(lambda: served.waiting("m") == before + count, f"{count} requests waiting")
    return calls


async def failures(served: Served, reason: str) -> float:
    return await served.metric("nv_inference_request_failure", f'model="m",reason="{reason}",version="1"')


@pytest.mark.parametrize("limit", [1, 2, 5])
async def test_full_queue_refuses_exactly_the_requests_beyond_its_limit(tmp_path: Path, limit: int) -> None:
    async with busy_server(tmp_path, config(f"max_queue_size: {limit}")) as (served, model):
        accepted = await waiting(served, limit)
        for _ in range(3):
            assert await failure_of(served.infer(ONE)) == (
                Code.RESOURCE_EXHAUSTED,
                f"model 'm': Exceeds maximum queue size of {limit} requests",
            )
        model.gate.open()
        await asyncio.gather(*accepted)
        assert await failures(served, "REJECTED") == 3
    assert sum(len(batch) for batch in model.batches) == limit + 2


@pytest.mark.parametrize("columns", [2, 5_000], ids=["small", "large"])
async def test_full_queue_refuses_requests_whichever_process_read_them(
    tmp_path: Path, frontends: int, columns: int
) -> None:
    one = infer("m", {"a": rows_of_floats(1, columns)})
    async with busy_server(tmp_path, config("max_queue_size: 1")) as (served, model):
        accepted = await waiting(served, 1)
        assert await failure_of(served.infer(one)) == (
            Code.RESOURCE_EXHAUSTED,
            "model 'm': Exceeds maximum queue size of 1 requests",
        )
        assert await failures(served, "REJECTED") == 1
        model.gate.open()
        await asyncio.gather(*accepted)
        assert (await served.infer(one)).raw_output_contents[0] == one.raw_input_contents[0]


async def test_queue_limit_counts_requests_and_not_rows(tmp_path: Path) -> None:
    async with busy_server(tmp_path, config("max_queue_size: 2")) as (served, model):
        big = infer("m", {"a": rows_of_floats(4)})
        accepted = [asyncio.create_task(served.infer(big)) for _ in range(2)]
        await eventually_async(lambda: served.waiting("m") == 2, "two requests waiting")
        assert (await failure_of(served.infer(ONE)))[0] is Code.RESOURCE_EXHAUSTED
        model.gate.open()
        await asyncio.gather(*accepted)


async def test_cancelled_request_frees_its_place_in_the_queue(tmp_path: Path) -> None:
    async with busy_server(tmp_path, config("max_queue_size: 1")) as (served, model):
        (first,) = await waiting(served, 1)
        first.cancel()
        await eventually_async(lambda: served.waiting("m") == 0, "the cancelled request gone")
        second = await waiting(served, 1)
        model.gate.open()
        await asyncio.gather(*second)
        assert await failures(served, "CANCELED") == 1
    assert len(model.batches) == 3


async def test_queue_timeout_of_the_policy_expires_requests_while_the_model_is_busy(tmp_path: Path) -> None:
    configuration = config("default_timeout_microseconds: 50000", PATIENT_UNLESS_HASTY)
    async with busy_server(tmp_path, configuration) as (served, model):
        code, text = await failure_of(served.infer(HASTY))
        assert code is Code.DEADLINE_EXCEEDED
        assert text.startswith("model 'm': Request timeout expired after ")
        assert int(text.split()[6]) >= 50_000
        assert await failures(served, "REJECTED") == 1
    assert len(model.batches) == 2


async def test_queue_timeout_of_the_request_expires_it_if_overriding_is_allowed(tmp_path: Path) -> None:
    queue = "default_timeout_microseconds: 100000000 allow_timeout_override: true"
    async with busy_server(tmp_path, config(queue)) as (served, model):
        patient = await waiting(served, 1)
        hasty = infer("m", {"a": rows_of_floats(1)}, parameters={"timeout": 20_000})
        code, text = await failure_of(served.infer(hasty))
        assert code is Code.DEADLINE_EXCEEDED
        assert "Request timeout expired" in text
        model.gate.open()
        await asyncio.gather(*patient)
    assert model.batches == [(1,), (1,), (1,)]


async def test_queue_timeout_of_the_request_is_ignored_unless_overriding_is_allowed(tmp_path: Path) -> None:
    async with busy_server(tmp_path, config()) as (served, model):
        hasty = infer("m", {"a": rows_of_floats(1)}, parameters={"timeout": 1})
        call = asyncio.create_task(served.infer(hasty))
        await eventually_async(lambda: served.waiting("m") == 1, "the request waiting")
        later = await waiting(served, 1)  # long after its timeout; each arrival makes the queue look for expired ones
        assert served.waiting("m") == 2
        model.gate.open()
        await asyncio.gather(call, *later)


async def test_queue_timeout_that_passes_during_a_delay_ends_the_wait_early(tmp_path: Path) -> None:
    model = echo_model()
    batching = f"max_queue_delay_microseconds: 100000000 {PATIENT_UNLESS_HASTY}"
    configuration = config("default_timeout_microseconds: 50000", batching)
    async with serving(tmp_path, {"m": model}, config=configuration) as served:
        assert (await failure_of(served.infer(HASTY)))[0] is Code.DEADLINE_EXCEEDED
        full = infer("m", {"a": rows_of_floats(4)})
        assert (await served.infer(full)).raw_output_contents[0] == full.raw_input_contents[0]
    assert model.batches == [(4,)]


async def test_request_whose_rpc_deadline_passes_in_the_queue_is_never_executed(tmp_path: Path) -> None:
    async with busy_server(tmp_path, config()) as (served, model):
        counted, timeout_s = 0.0, 0.1
        while not counted:  # again if a busy machine takes longer to bring it to the queue
            code, _ = await failure_of(served.infer(ONE, timeout_s=timeout_s))
            assert code is Code.DEADLINE_EXCEEDED
            await eventually_async(lambda: served.waiting("m") == 0, "the expired request gone")
            counted = await failures(served, "REJECTED") + await failures(served, "CANCELED")
            timeout_s *= 2
        assert counted == 1
    assert len(model.batches) == 2


async def test_request_whose_rpc_deadline_has_passed_on_arrival_is_never_queued(tmp_path: Path) -> None:
    async with busy_server(tmp_path, config()) as (served, model):
        code, _ = await failure_of(served.infer(ONE, timeout_s=0))
        assert code is Code.DEADLINE_EXCEEDED
        assert served.waiting("m") == 0
    assert len(model.batches) == 2


async def test_rpc_deadline_of_one_request_does_not_hurry_its_neighbours(tmp_path: Path) -> None:
    async with busy_server(tmp_path, config()) as (served, model):
        patient = await waiting(served, 2)
        assert (await failure_of(served.infer(ONE, timeout_s=0.05)))[0] is Code.DEADLINE_EXCEEDED
        await eventually_async(lambda: served.waiting("m") == 2, "the expired request gone")
        model.gate.open()
        await asyncio.gather(*patient)
    assert model.batches == [(1,), (1, 1), (1,)]


@pytest.mark.parametrize("victim", [0, 1, 2, 3])
async def test_cancel_in_the_queue_removes_one_request_and_leaves_its_neighbours(tmp_path: Path, victim: int) -> None:
    async with busy_server(tmp_path, config()) as (served, model):
        calls = await waiting(served, 4)
        calls[victim].cancel()
        await eventually_async(lambda: served.waiting("m") == 3, "the cancelled request gone")
        model.gate.open()
        others = [call for number, call in enumerate(calls) if number != victim]
        for response in await asyncio.gather(*others):
            assert response.raw_output_contents[0] == ONE.raw_input_contents[0]
    assert model.batches == [(1,), (1, 1, 1), (1,)]


async def test_cancel_during_execution_loses_one_answer_and_no_other(tmp_path: Path) -> None:
    async with busy_server(tmp_path, config()) as (served, model):
        calls = await waiting(served, 3)
        model.gate.release()
        await asyncio.to_thread(model.gate.wait_entered, 2)
        calls[1].cancel()
        assert (await asyncio.gather(calls[1], return_exceptions=True))[0].__class__ is asyncio.CancelledError
        model.gate.open()
        for call in (calls[0], calls[2]):
            assert (await call).raw_output_contents[0] == ONE.raw_input_contents[0]
    assert model.batches == [(1,), (1, 1, 1), (1,)]
