"""Bounds of the queue by requests, rows and bytes: they are exact, requests that leave make room at once, and each
request is counted once."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import grpc
import numpy as np
import pytest

from paceline.backends.errors import ExecutionError
from tests.integration.scripted import BUSY, Script, busy, own, queued, request, send, totals
from tests.integration.serving import echo_model, failure_of, serving
from tests.memory_models import MemoryModel
from tests.polling import eventually_async
from tests.wire import infer

Code = grpc.StatusCode
MERGE = "max_batch_size: 8 dynamic_batching { }"


def full(limit: int, what: str) -> tuple[grpc.StatusCode, str]:
    return Code.RESOURCE_EXHAUSTED, f"model 'm': Exceeds maximum queue size of {limit} {what}"


@pytest.mark.parametrize("instances", [1, 2])
async def test_bound_of_requests_does_not_count_executing_ones(tmp_path: Path, instances: int) -> None:
    """Eight may wait: of ten that arrive while all instances are busy, two are refused."""
    script = Script()
    text = f"max_batch_size: 32 instance_group {{ count: {instances} }} dynamic_batching {{ "
    text += "preferred_batch_size: [ 4, 8 ] default_queue_policy { max_queue_size: 8 } }"
    async with serving(tmp_path, {"m": script.model}, config=text) as served:
        async with busy(served, script, instances):
            calls = await queued(served, (request(mark) for mark in range(8)))
            for _ in range(2):
                assert await failure_of(served.infer(request(9))) == full(8, "requests")
        await asyncio.gather(*calls)
        assert totals(await served.metrics())["success"] == 8 + instances
        assert totals(await served.metrics())["REJECTED"] == 2


@pytest.mark.parametrize("order", [[3, 2], [5]])
async def test_bound_of_rows_is_exact_and_a_cancellation_makes_room(tmp_path: Path, order: list[int]) -> None:
    script = Script()
    async with serving(tmp_path, {"m": script.model}, config=MERGE + own(max_queue_rows=5)) as served:
        # Even though it wouldn't have to wait: a request that never fits is refused at once.
        assert await failure_of(served.infer(request(9, 6))) == full(5, "rows")
        async with busy(served, script):
            # The rows of all shapes count together.
            calls = await queued(served, (request(mark, rows, 2 + mark) for mark, rows in enumerate(order)))
            for rows in (1, 8):
                assert await failure_of(served.infer(request(9, rows))) == full(5, "rows")
            calls[-1].cancel()
            await eventually_async(lambda: served.waiting("m") == len(order) - 1, "the cancelled one gone")
            calls[-1:] = await queued(served, [request(8, order[-1])])
            assert await failure_of(served.infer(request(9))) == full(5, "rows")
        await asyncio.gather(*calls)
        await asyncio.gather(*send(served, *(request(10 + number) for number in range(5))))


async def test_bound_of_rows_admits_a_smaller_request_where_a_larger_one_has_no_room(tmp_path: Path) -> None:
    script = Script()
    async with serving(tmp_path, {"m": script.model}, config=MERGE + own(max_queue_rows=5)) as served:
        async with busy(served, script):
            calls = await queued(served, [request(0, 4)])
            assert await failure_of(served.infer(request(9, 2))) == full(5, "rows")
            calls += await queued(served, [request(1, 1)])
        await asyncio.gather(*calls)


async def test_bound_of_bytes_is_exact_and_a_cancellation_makes_room(tmp_path: Path) -> None:
    """A row of two floats is 8 bytes."""
    script = Script()
    async with serving(tmp_path, {"m": script.model}, config=MERGE + own(max_queue_bytes=24)) as served:
        async with busy(served, script):
            calls = await queued(served, [request(0, rows=2), request(1)])
            assert await failure_of(served.infer(request(9))) == full(24, "bytes")
            calls.pop().cancel()
            await eventually_async(lambda: served.waiting("m") == 1, "the cancelled one gone")
            assert await failure_of(served.infer(request(9, columns=3))) == full(24, "bytes")
            calls += await queued(served, [request(2)])
        await asyncio.gather(*calls)


async def test_bound_of_bytes_counts_text_at_its_cost(tmp_path: Path) -> None:
    model = echo_model("BYTES")

    def text(length: int) -> np.ndarray[tuple[int, int], np.dtype[np.object_]]:
        array = np.empty((1, 1), object)
        array[0, 0] = b"x" * length
        return array

    object_bytes = 8 + sys.getsizeof(b"")  # a reference, and what else an element has besides its text
    bound = 2 * object_bytes + 100
    async with serving(tmp_path, {"m": model}, config=MERGE + own(max_queue_bytes=bound)) as served:
        model.gate.close()
        # Even though it wouldn't have to wait: a request that never fits is refused at once.
        never = infer("m", {"a": text(bound - object_bytes + 1)})
        assert await failure_of(served.infer(never)) == full(bound, "bytes")
        calls = send(served, infer("m", {"a": text(1)}))
        await asyncio.to_thread(model.gate.wait_entered, 1)
        calls += await queued(served, [infer("m", {"a": text(60)}), infer("m", {"a": text(40)})])
        assert await failure_of(served.infer(infer("m", {"a": text(0)}))) == full(bound, "bytes")
        model.gate.open()
        await asyncio.gather(*calls)


async def test_counters_of_successes_and_all_kinds_of_failures_add_up_to_the_requests_sent(tmp_path: Path) -> None:
    script = Script()
    script.errors[13.0] = ExecutionError("unlucky")
    policy = "default_queue_policy { max_queue_size: 6 allow_timeout_override: true }"
    text = f"max_batch_size: 8 dynamic_batching {{ {policy} }} {own(deadline_aware=False)}"
    async with serving(tmp_path, {"m": script.model}, config=text) as served:
        async with busy(served, script):
            late = await failure_of(served.infer(request(5, timeout=10_000)))
            assert late[0] is Code.DEADLINE_EXCEEDED
            calls = await queued(served, (request(mark) for mark in (1, 13, 2, 3, 7)))
            (gone,) = await queued(served, [request(4)])
            refused = [await failure_of(served.infer(request(6))) for _ in range(3)]
            gone.cancel()
            await eventually_async(lambda: served.waiting("m") == 5, "the cancelled one gone")
            seen = await served.metrics()
            pending = seen['nv_inference_pending_request_count{model="m",version="1"}']
            assert sum(totals(seen).values()) + pending == 1 + 5 + 1 + 3  # all but the one that executes
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert [isinstance(outcome, Exception) for outcome in outcomes] == [False, True, False, False, False]
        assert all(one == full(6, "requests") for one in refused)
        seen = await served.metrics()
        assert totals(seen) == {"success": 5, "REJECTED": 4, "CANCELED": 1, "BACKEND": 1, "OTHER": 0}
        dropped = {
            reason: seen[f'paceline_dropped_requests{{model="m",reason="{reason}",version="1"}}']
            for reason in ("queue_full_requests", "expired", "unreachable", "cancelled")
        }
        assert dropped == {"queue_full_requests": 3, "expired": 1, "unreachable": 0, "cancelled": 1}
        assert seen['nv_inference_count{model="m",version="1"}'] == 5


async def test_bound_is_not_exceeded_when_many_requests_arrive_at_once(tmp_path: Path) -> None:
    script, limit = Script(), 3
    text = f"max_batch_size: 8 dynamic_batching {{ default_queue_policy {{ max_queue_size: {limit} }} }}"
    async with serving(tmp_path, {"m": script.model}, config=text) as served:
        async with busy(served, script):
            calls = send(served, *(request(mark) for mark in range(20)))
            await eventually_async(lambda: sum(call.done() for call in calls) == 20 - limit, "all others refused")
            assert served.waiting("m") == limit
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        assert sum(isinstance(outcome, grpc.aio.AioRpcError) for outcome in outcomes) == 20 - limit
        assert totals(await served.metrics()) == {
            "success": limit + 1, "REJECTED": 20 - limit, "CANCELED": 0, "BACKEND": 0, "OTHER": 0,
        }  # fmt: skip
    assert BUSY in script.seen[0]


async def test_bound_applies_to_each_model_separately(tmp_path: Path) -> None:
    script = Script()
    other: MemoryModel = echo_model()
    text = "max_batch_size: 8 dynamic_batching { default_queue_policy { max_queue_size: 1 } }"
    async with serving(tmp_path, {"m": script.model, "other": other}, config=text) as served:
        async with busy(served, script):
            calls = await queued(served, [request(0)])
            assert await failure_of(served.infer(request(9))) == full(1, "requests")
            await served.infer(request(1, model="other"))
        await asyncio.gather(*calls)
