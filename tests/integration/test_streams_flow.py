"""Streams under load, with slow or vanished readers, and while the server stops."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.server.config import Settings
from tests.integration.scripted import Script, busy, mark_of, request, totals
from tests.integration.serving import RETRY_CANCELLED, Served, failure_of, serving
from tests.integration.streams import Stream
from tests.polling import eventually_async

pytestmark = pytest.mark.usefixtures("frontends")

Code = grpc.StatusCode
MERGE = "max_batch_size: 4 dynamic_batching { }"
LARGE = 100_000
"""Columns of a request whose answer exceeds what gRPC buffers on its own."""


@asynccontextmanager
async def stopping(served: Served) -> AsyncIterator[asyncio.Task[bool]]:
    """Stop the server. The block begins once the process that speaks gRPC with these clients knows."""
    watch = health_pb2_grpc.HealthStub(served.channel).Watch(health_pb2.HealthCheckRequest(), timeout=20)
    await watch.read()
    task = asyncio.create_task(served.server.stop(30))
    while await watch.read() is not grpc.aio.EOF:
        pass
    yield task
    assert await task


@pytest.fixture
def script() -> Script:
    return Script()


async def test_stream_has_at_most_the_configured_number_of_requests_under_way(tmp_path: Path, script: Script) -> None:
    settings = Settings(paths=(tmp_path,), grpc_max_stream_requests=3)
    async with serving(tmp_path, {"m": script.model}, config=MERGE, settings=settings) as served:
        stream, other = Stream(served), Stream(served)
        async with busy(served, script):
            await stream.send(*(request(mark) for mark in range(10)))
            await eventually_async(lambda: served.waiting("m") == 3, "three requests waiting")
            # The bound is per stream, and by now the fourth request would have been read if it could be.
            await other.send(request(100))
            await eventually_async(lambda: served.waiting("m") == 4, "four requests waiting")
        assert await stream.many(10) == list(range(10))
        assert await other.next() == 100


async def test_stream_whose_answers_nobody_reads_is_not_read_further(tmp_path: Path, script: Script) -> None:
    settings = Settings(paths=(tmp_path,), grpc_max_stream_requests=4)
    # Otherwise its window may grow to tens of MB, depending on how fast other answers come.
    steady = [("grpc.http2.bdp_probe", 0)]
    async with serving(tmp_path, {"m": script.model}, config=MERGE, settings=settings, options=steady) as served:
        stream = Stream(served)
        sending = asyncio.create_task(stream.send(*(request(mark, columns=LARGE) for mark in range(60))))
        await eventually_async(lambda: len(script.seen) > 0, "the first execution")
        # The stream stands still once nothing changes any more while others are answered.
        before = -1
        while (now := sum(map(len, script.seen))) != before:
            before = now
            for mark in range(100, 120):
                assert mark_of(await served.infer(request(mark))) == mark
            before += 20
        taken = [mark for batch in script.seen for mark in batch if mark < 100]
        # 4 under way, and the 400 kB answers that the buffers of both ends hold.
        assert len(taken) < 30
        assert await stream.many(60) == list(range(60))
        await sending


async def test_streams_whose_clients_leave_while_answers_are_written_leave_nothing_behind(
    tmp_path: Path, script: Script, caplog: pytest.LogCaptureFixture, frontends: int
) -> None:
    text = "max_batch_size: 32 dynamic_batching { }"
    # gRPC then buffers 64 KiB for a client that reads nothing, however much time the machine has.
    options = [("grpc.http2.bdp_probe", 0)]
    async with (
        serving(tmp_path, {"m": script.model}, config=text) as served,
        grpc.aio.insecure_channel(served.target, options=options) as channel,
    ):
        for _ in range(3):
            before = sum(map(len, script.seen))
            streams = [Stream(replace(served, channel=channel)) for _ in range(3)]
            for stream in streams:
                await stream.send(*(request(mark, columns=LARGE) for mark in range(40)))
            done = before + 120
            await eventually_async(lambda n=done: sum(map(len, script.seen)) == n, "all of them executed")
            for stream in streams:
                stream.call.cancel()
        assert mark_of(await served.infer(request(99))) == 99
        # The other connection's end may be noticed later than that.
        ended = served.server.repository.get("m", "").statistics
        await eventually_async(lambda: ended.requests.count + ended.failed > 3 * 3 * 40, "all of them counted")
        assert await served.metric("nv_inference_pending_request_count") == 0
        # Each is counted once, also those whose answers existed but weren't written yet.
        counted = totals(await served.metrics())
        assert sum(counted.values()) == counted["success"] + counted["CANCELED"] == 3 * 3 * 40 + 1
        # With fronts, a request counts as answered once its front has the answer.
        assert counted["CANCELED"] > 0 or frontends > 1
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


async def test_64_concurrent_streams_each_get_their_own_answers_in_order(tmp_path: Path, script: Script) -> None:
    text = "max_batch_size: 32 dynamic_batching { } instance_group { count: 2 }"
    async with serving(tmp_path, {"m": script.model}, config=text) as served:

        async def use(number: int) -> list[object]:
            stream = Stream(served, timeout_s=100)
            for each in range(40):
                await stream.send(request(number * 100 + each, 1 + each % 3))
            await stream.end()
            return [*await stream.rest(), await stream.status()]

        for number, answers in enumerate(await asyncio.gather(*map(use, range(64)))):
            assert answers == [*(number * 100.0 + each for each in range(40)), (Code.OK, "")]
        assert await served.metric("nv_inference_pending_request_count") == 0
        assert await served.metric("nv_inference_request_success") == 64 * 40
    assert max(map(len, script.seen)) > 3


# ---- Stopping the server ---------------------------------------------------------------------------------------------


async def test_stop_answers_stream_requests_under_way_and_refuses_the_rest_in_the_stream(
    tmp_path: Path, script: Script
) -> None:
    async with serving(tmp_path, {"m": script.model}, config=MERGE, options=RETRY_CANCELLED) as served:
        stream = Stream(served)
        async with busy(served, script) as gate:
            await stream.send(request(1), request(2))
            await eventually_async(lambda: served.waiting("m") == 2, "two requests waiting")
            async with stopping(served) as stop:
                # Refused by the server, or by its closed port.
                assert (await failure_of(Stream(served).next()))[0] is Code.UNAVAILABLE
                await stream.send(request(3, paceline_unordered=True))
                assert await stream.next() == ("UNAVAILABLE", "the server is stopping")
                assert not stop.done()
                gate.open()
                assert await stream.rest() == [1, 2]
                assert await stream.status() == (Code.UNAVAILABLE, "the server is stopping")
    assert script.served == [[1, 2]]


async def test_stop_is_not_held_up_by_idle_streams(tmp_path: Path, script: Script) -> None:
    async with serving(tmp_path, {"m": script.model}, config=MERGE) as served:
        Stream(served)  # without requests
        used = Stream(served)
        await used.send(request(1))
        assert await used.next() == 1
        began_s = time.monotonic()
        assert await served.server.stop(30)
        assert time.monotonic() - began_s < 15
        assert await used.rest() == []
        assert await used.status() == (Code.UNAVAILABLE, "the server is stopping")


async def test_stop_that_times_out_fails_the_requests_of_streams_too(tmp_path: Path, script: Script) -> None:
    async with serving(tmp_path, {"m": script.model}, config=MERGE) as served:
        gate = script.hold(1)
        stream = Stream(served)
        await stream.send(request(1))
        await asyncio.to_thread(gate.wait_entered, 1)
        await stream.send(request(2))
        await eventually_async(lambda: served.waiting("m") == 1, "one request waiting")
        assert not await served.server.stop(0.1)
        text = "model 'm': the model is being unloaded or the server is stopping"
        assert await stream.rest() == [("UNAVAILABLE", text)] * 2
        assert await stream.status() == (Code.UNAVAILABLE, "the server is stopping")
        gate.open()
