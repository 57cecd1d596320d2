"""Equal requests in flight at the same time, to models with a response cache: executed once, each with an end of its
own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from paceline.server.limits import Limits
from tests.integration.caching import CACHED, counts, followed, held, with_cache
from tests.integration.scripted import Script, busy, mark_of, own, queued, request, send
from tests.integration.serving import failure_of, serving
from tests.integration.streams import Stream
from tests.polling import eventually_async

pytestmark = pytest.mark.usefixtures("frontends")

Code = grpc.StatusCode


@pytest.mark.parametrize("columns", [2, 50_000], ids=["small", "large"])
async def test_equal_requests_in_flight_are_executed_once(tmp_path: Path, columns: int) -> None:
    script = Script()
    async with serving(tmp_path, {"m": script.model}, config=CACHED, settings=with_cache(tmp_path)) as served:
        gate = script.hold(0)
        calls = send(served, request(0, columns=columns))
        await asyncio.to_thread(gate.wait_entered, 1)
        calls += await followed(served, *(request(0, columns=columns, timeout=0) for _ in range(5)))
        gate.open()
        answers = await asyncio.gather(*calls)
        assert {mark_of(answer) for answer in answers} == {0}
        assert await counts(served) == {"success": 6, "hits": 5, "misses": 1}
        assert await served.metric("nv_inference_count") == 1
        assert await served.metric("paceline_limit_used", 'limit="queued_requests"') == 0
    assert script.seen == [[0]]


async def test_large_equal_requests_in_one_split_are_executed_once(tmp_path: Path) -> None:
    script = Script()
    config = f"{CACHED} {own(split_oversized='true')}"
    async with serving(tmp_path, {"m": script.model}, config=config, settings=with_cache(tmp_path)) as served:
        gate = script.hold(0)
        calls = send(served, request(0, 6))
        await asyncio.to_thread(gate.wait_entered, 1)
        calls += await followed(served, request(0, 6))
        calls[0].cancel()
        await asyncio.wait(calls[:1])
        gate.open()
        assert list((await calls[1]).outputs[0].shape) == [6, 2]
    assert script.seen == [[0] * 4, [0] * 2]


async def test_first_that_is_cancelled_while_it_executes_harms_nobody(tmp_path: Path) -> None:
    script = Script()
    async with serving(tmp_path, {"m": script.model}, config=CACHED, settings=with_cache(tmp_path)) as served:
        first, gate = await held(served, script)
        others = await followed(served, request(0), request(0))
        first.cancel()
        await eventually_async(lambda: served.failed() == 1, "the cancellation")
        gate.open()
        assert [mark_of(answer) for answer in await asyncio.gather(*others)] == [0, 0]
        assert mark_of(await served.infer(request(0))) == 0
        assert await counts(served) == {"success": 3, "CANCELED": 1, "hits": 3, "misses": 1}
    assert script.seen == [[0]]


async def test_first_that_is_cancelled_in_the_queue_leaves_its_place_to_others(tmp_path: Path) -> None:
    script = Script()
    async with serving(tmp_path, {"m": script.model}, config=CACHED, settings=with_cache(tmp_path)) as served:
        async with busy(served, script):
            (first,) = await queued(served, [request(0)])
            others = await followed(served, request(0), request(0))
            first.cancel()
            await eventually_async(lambda: served.failed() == 1, "the cancellation")
            assert served.waiting("m") == 1
        assert [mark_of(answer) for answer in await asyncio.gather(*others)] == [0, 0]
    assert script.served == [[0]]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=str)
async def test_execution_that_nobody_waits_for_is_called_off(tmp_path: Path, order: tuple[int, ...]) -> None:
    script = Script()
    async with serving(tmp_path, {"m": script.model}, config=CACHED, settings=with_cache(tmp_path)) as served:
        async with busy(served, script):
            calls = [*await queued(served, [request(0)]), *await followed(served, request(0))]
            for number, which in enumerate(order, 1):
                calls[which].cancel()
                await eventually_async(lambda n=number: served.failed() == n, "the cancellation")
            await eventually_async(lambda: served.waiting("m") == 0, "an empty queue")
            calls = await queued(served, [request(0)])
        assert mark_of(await calls[0]) == 0
        assert await counts(served) == {"success": 2, "CANCELED": 2, "misses": 4}
    assert script.served == [[0]]


async def test_deadline_of_one_that_waits_is_its_own(tmp_path: Path) -> None:
    """It waits for the equal one that executes: the model's queue is full, and would refuse it."""
    script = Script()
    config = CACHED.replace("{ }", "{ default_queue_policy { max_queue_size: 1 } }")
    async with serving(tmp_path, {"m": script.model}, config=config, settings=with_cache(tmp_path)) as served:
        first, gate = await held(served, script)
        (other,) = await queued(served, [request(1)])
        code, text = await failure_of(served.infer(request(0, paceline_deadline_us=100_000)))
        assert (code, "Deadline Exceeded" in text) == (Code.DEADLINE_EXCEEDED, True)
        gate.open()
        assert [mark_of(await first), mark_of(await other)] == [0, 1]
        assert await counts(served) == {"success": 2, "REJECTED": 1, "misses": 3}
    assert script.seen == [[0], [1]]


async def test_first_that_expires_in_the_queue_harms_nobody(tmp_path: Path) -> None:
    script = Script()
    async with serving(tmp_path, {"m": script.model}, config=CACHED, settings=with_cache(tmp_path)) as served:
        stream = Stream(served)
        async with busy(served, script):
            await stream.send(request(0, paceline_deadline_us=100_000), request(0), request(0))
            expired = await stream.next()
            assert isinstance(expired, tuple)
            assert expired[0] == "DEADLINE_EXCEEDED"
            await eventually_async(lambda: served.waiting("m") == 1, "another in its place")
        assert await stream.many(2) == [0, 0]
        assert await counts(served) == {"success": 3, "REJECTED": 1, "hits": 1, "misses": 3}
    assert script.served == [[0]]


async def test_failed_execution_fails_for_all_who_wait(tmp_path: Path) -> None:
    script = Script()
    script.errors[0] = ValueError("no good")
    async with serving(tmp_path, {"m": script.model}, config=CACHED, settings=with_cache(tmp_path)) as served:
        first, gate = await held(served, script)
        calls = [first, *await followed(served, request(0), request(0))]
        gate.open()
        for call in calls:
            code, text = await failure_of(call)
            assert (code, "no good" in text) == (Code.INTERNAL, True)
        script.errors.clear()
        assert mark_of(await served.infer(request(0))) == 0
        assert await counts(served) == {"success": 1, "BACKEND": 3, "misses": 4}
    assert script.seen == [[0], [0]]


async def test_urgent_request_waits_for_none_that_is_less_urgent(tmp_path: Path) -> None:
    script = Script()
    config = CACHED.replace("{ }", "{ priority_levels: 2 default_priority_level: 2 }")
    async with serving(tmp_path, {"m": script.model}, config=config, settings=with_cache(tmp_path)) as served:
        async with busy(served, script):
            calls = await queued(served, [request(0), request(1), request(0, priority=1)])
            calls += await followed(served, request(0, priority=1))
        assert [mark_of(answer) for answer in await asyncio.gather(*calls)] == [0, 1, 0, 0]
    assert sorted(mark for batch in script.served for mark in batch) == [0, 0, 1]


async def test_those_who_wait_take_no_place_in_the_models_queue(tmp_path: Path) -> None:
    script = Script()
    config = CACHED.replace("{ }", "{ default_queue_policy { max_queue_size: 1 } }")
    settings = with_cache(tmp_path, limits=Limits(queued_requests=3))
    async with serving(tmp_path, {"m": script.model}, config=config, settings=settings) as served:
        async with busy(served, script):
            calls = [*await queued(served, [request(0)]), *await followed(served, request(0), request(0))]
            code, text = await failure_of(served.infer(request(1)))
            assert (code, "1 requests" in text) == (Code.RESOURCE_EXHAUSTED, True)
            code, text = await failure_of(served.infer(request(0)))
            assert (code, "3 requests of all models" in text) == (Code.RESOURCE_EXHAUSTED, True)
        assert [mark_of(answer) for answer in await asyncio.gather(*calls)] == [0, 0, 0]
        assert mark_of(await served.infer(request(1))) == 1
