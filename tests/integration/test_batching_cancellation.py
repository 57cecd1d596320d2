"""Cancelled requests: in a batch in flight, or at the front, in the middle or at the end of the queue."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.integration.scripted import Call, Script, busy, mark_of, queued, request, totals
from tests.integration.serving import Served, serving
from tests.polling import eventually_async

pytestmark = pytest.mark.usefixtures("frontends")

MERGE = "max_batch_size: 4 dynamic_batching { }"
VICTIMS = pytest.mark.parametrize("victims", [{0}, {1, 3}, {0, 1, 2, 3}], ids=str)


async def cancel(served: Served, calls: list[Call], victims: set[int]) -> list[Call]:
    """Cancel the calls numbered in `victims`, and return the others."""
    for victim in victims:
        calls[victim].cancel()
    await asyncio.gather(*(calls[victim] for victim in victims), return_exceptions=True)
    return [call for number, call in enumerate(calls) if number not in victims]


@VICTIMS
async def test_cancellation_in_a_batch_in_flight_leaves_neighbours_their_answers(
    tmp_path: Path, victims: set[int]
) -> None:
    script = Script()
    gate = script.hold(0)
    text = f"{MERGE} instance_group {{ count: 2 }}"
    async with serving(tmp_path, {"m": script.model}, config=text) as served:
        async with busy(served, script, 2):
            calls = await queued(served, (request(mark) for mark in range(4)))
        await asyncio.to_thread(gate.wait_entered, 1)
        others = await cancel(served, calls, victims)
        gate.open()
        assert [mark_of(answer) for answer in await asyncio.gather(*others)] == sorted(set(range(4)) - victims)
        assert mark_of(await served.infer(request(9))) == 9
        assert await served.metric("nv_inference_pending_request_count") == 0
    assert script.served == [[0, 1, 2, 3], [9]]


@VICTIMS
async def test_request_cancelled_in_the_queue_is_not_executed_and_the_others_keep_their_order(
    tmp_path: Path, victims: set[int]
) -> None:
    script = Script()
    async with serving(tmp_path, {"m": script.model}, config=MERGE) as served:
        async with busy(served, script):
            calls = await queued(served, (request(mark) for mark in range(4)))
            others = await cancel(served, calls, victims)
            left = 4 - len(victims)
            await eventually_async(lambda: served.waiting("m") == left, "the cancelled ones gone")
        assert [mark_of(answer) for answer in await asyncio.gather(*others)] == sorted(set(range(4)) - victims)
        counted = totals(await served.metrics())
        assert (counted["success"], counted["CANCELED"]) == (1 + len(others), len(victims))
    assert script.served == ([sorted(set(range(4)) - victims)] if others else [])


async def test_cancelling_many_requests_while_batches_execute_loses_no_answer(tmp_path: Path) -> None:
    script = Script()
    script.model.latency = lambda rows: 0.002
    async with serving(tmp_path, {"m": script.model}, config=f"{MERGE} instance_group {{ count: 2 }}") as served:
        calls = [asyncio.create_task(served.infer(request(mark))) for mark in range(200)]
        for number, call in enumerate(calls):
            if number % 3 == 0:
                await eventually_async(lambda: len(script.seen) > 0, "the first batch")
                call.cancel()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for number, outcome in enumerate(outcomes):
            assert isinstance(outcome, asyncio.CancelledError) or mark_of(outcome) == number
            assert number % 3 == 0 or not isinstance(outcome, asyncio.CancelledError)
        await eventually_async(lambda: served.waiting("m") == 0, "an empty queue")
        assert mark_of(await served.infer(request(999))) == 999
        marks = [mark for batch in script.seen for mark in batch]
        assert len(marks) == len(set(marks))
