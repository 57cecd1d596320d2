"""Stopping a server that has work to do: what it answers until it ends, and what happens when its time runs out."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.integration.serving import RETRY_CANCELLED, Served, echo_model, failure_of, serving
from tests.memory_models import MemoryModel
from tests.polling import eventually_async
from tests.wire import infer, rows_of_floats

pytestmark = pytest.mark.usefixtures("frontends")

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
ONE = infer("m", {"a": rows_of_floats(1)})
CONFIG = "max_batch_size: 4 dynamic_batching { max_queue_delay_microseconds: 100000000 }"


@dataclass
class Busy:
    """A server with a full batch held at its model's gate, and two requests that wait for more."""

    served: Served
    model: MemoryModel
    running: asyncio.Task[Any]
    waiting: list[asyncio.Task[Any]]


@pytest.fixture
async def busy(tmp_path: Path) -> AsyncIterator[Busy]:
    model = echo_model()
    async with serving(tmp_path, {"m": model}, config=CONFIG, options=RETRY_CANCELLED) as served:
        model.gate.close()
        running = asyncio.create_task(served.infer(infer("m", {"a": rows_of_floats(4)})))
        await asyncio.to_thread(model.gate.wait_entered, 1)
        waiting = [asyncio.create_task(served.infer(ONE)) for _ in range(2)]
        await eventually_async(lambda: served.waiting("m") == 2, "two requests waiting")
        yield Busy(served, model, running, waiting)


def listens(served: Served) -> bool:
    try:
        socket.create_connection(("127.0.0.1", served.server.grpc_port), timeout=20).close()
    except ConnectionError:
        return False
    return True


async def test_stop_answers_accepted_requests_and_refuses_all_others(busy: Busy) -> None:
    served = busy.served
    health = health_pb2_grpc.HealthStub(served.channel)
    watch = health.Watch(health_pb2.HealthCheckRequest())
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    stopping = asyncio.create_task(served.server.stop(30))
    assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    assert await watch.read() is grpc.aio.EOF
    # Refused at first; then the client is told to close its connection, and can't open another.
    assert (await failure_of(served.infer(ONE)))[0] is UNAVAILABLE
    ready = grpc.ChannelConnectivity.READY
    await eventually_async(lambda: served.channel.get_state() is not ready, "the client to be told to go")
    await eventually_async(lambda: not listens(served), "the port to be closed")
    assert (await failure_of(served.infer(ONE)))[0] is UNAVAILABLE
    assert not stopping.done()
    busy.model.gate.open()
    assert (await busy.running).raw_output_contents[0] == rows_of_floats(4).tobytes()
    for response in await asyncio.gather(*busy.waiting):
        assert response.raw_output_contents[0] == ONE.raw_input_contents[0]
    assert await stopping
    assert busy.model.batches == [(4,), (1, 1)]
    assert (busy.model.closed, busy.model.open_instances) == (True, 0)


async def test_stop_that_runs_out_of_time_fails_the_remaining_requests(busy: Busy) -> None:
    assert not await busy.served.server.stop(0.1)
    for call in (busy.running, *busy.waiting):
        assert await failure_of(call) == (
            UNAVAILABLE,
            "model 'm': the model is being unloaded or the server is stopping",
        )
    assert busy.model.batches == [(4,)]


async def test_stop_with_cancelled_requests_waits_only_for_the_execution(busy: Busy) -> None:
    stopping = asyncio.create_task(busy.served.server.stop(30))
    for call in (busy.running, *busy.waiting):
        call.cancel()
    await eventually_async(lambda: busy.served.waiting("m") == 0 or busy.model.gate.entered > 1, "an empty queue")
    busy.model.gate.open()
    assert await stopping
