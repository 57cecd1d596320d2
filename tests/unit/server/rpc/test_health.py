"""The standard health service, asked over a real connection."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, ClassVar

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.server.rpc.standard_services import LIVENESS, HealthService

Status = health_pb2.HealthCheckResponse
NAME = "some.Service"


@dataclass
class Bench:
    service: HealthService
    stub: Any

    async def check(self, service: str = "") -> int:
        answer = await self.stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=10)
        return int(answer.status)

    def watch(self, service: str = "") -> Any:
        return self.stub.Watch(health_pb2.HealthCheckRequest(service=service), timeout=10)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    server = grpc.aio.server()
    service = HealthService([NAME])
    health_pb2_grpc.add_HealthServicer_to_server(service, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Bench(service, health_pb2_grpc.HealthStub(channel))
    service.close()
    await server.stop(None)


@pytest.mark.parametrize("service", ["", NAME])
async def test_check_returns_the_status_that_was_set(bench: Bench, service: str) -> None:
    assert await bench.check(service) == Status.NOT_SERVING
    bench.service.set_serving(True)
    assert await bench.check(service) == Status.SERVING
    bench.service.set_serving(False)
    assert await bench.check(service) == Status.NOT_SERVING


async def test_check_of_liveness_is_serving_even_if_the_rest_is_not(bench: Bench) -> None:
    assert await bench.check(LIVENESS) == Status.SERVING
    bench.service.set_serving(True)
    bench.service.set_serving(False)
    bench.service.close()
    assert (await bench.check(), await bench.check(LIVENESS)) == (Status.NOT_SERVING, Status.SERVING)


async def test_watch_of_liveness_reports_serving_once_and_ends_with_the_server(bench: Bench) -> None:
    watch = bench.watch(LIVENESS)
    assert (await watch.read()).status == Status.SERVING
    bench.service.close()
    assert await watch.read() is grpc.aio.EOF


async def test_check_of_an_unknown_service_is_not_found(bench: Bench) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await bench.check("nope")
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.NOT_FOUND, "unknown service 'nope'")


async def test_watch_reports_the_status_and_each_change(bench: Bench) -> None:
    stream = bench.watch(NAME)
    assert (await stream.read()).status == Status.NOT_SERVING
    bench.service.set_serving(True)
    assert (await stream.read()).status == Status.SERVING
    bench.service.set_serving(False)
    assert (await stream.read()).status == Status.NOT_SERVING


async def test_watch_reports_nothing_if_nothing_changes(bench: Bench) -> None:
    stream = bench.watch()
    assert (await stream.read()).status == Status.NOT_SERVING
    bench.service.set_serving(False)
    bench.service.set_serving(True)
    assert (await stream.read()).status == Status.SERVING


async def test_watch_of_an_unknown_service_reports_that_and_stays_open(bench: Bench) -> None:
    stream = bench.watch("nope")
    assert (await stream.read()).status == Status.SERVICE_UNKNOWN
    bench.service.set_serving(True)
    bench.service.close()
    assert await stream.read() is grpc.aio.EOF


async def test_watch_ended_by_one_client_does_not_end_the_others(bench: Bench) -> None:
    streams = [bench.watch() for _ in range(3)]
    for stream in streams:
        assert (await stream.read()).status == Status.NOT_SERVING
    streams[1].cancel()
    bench.service.set_serving(True)
    for stream in (streams[0], streams[2]):
        assert (await stream.read()).status == Status.SERVING


async def test_close_is_reported_to_watchers_and_ends_their_streams(bench: Bench) -> None:
    bench.service.set_serving(True)
    stream = bench.watch()
    assert (await stream.read()).status == Status.SERVING
    bench.service.close()
    assert (await stream.read()).status == Status.NOT_SERVING
    assert await stream.read() is grpc.aio.EOF
    assert await stream.code() is grpc.StatusCode.OK


async def test_close_while_a_status_is_being_sent_is_reported_as_well() -> None:
    service = HealthService([])
    service.set_serving(True)

    class Context:
        told: ClassVar[list[int]] = []

        async def write(self, response: health_pb2.HealthCheckResponse) -> None:
            self.told.append(response.status)
            service.close()

    await asyncio.wait_for(service.Watch(health_pb2.HealthCheckRequest(), Context()), 10)
    assert Context.told == [Status.SERVING, Status.NOT_SERVING]


async def test_close_is_final_for_checks_and_new_watchers(bench: Bench) -> None:
    bench.service.close()
    assert await bench.check() == Status.NOT_SERVING
    assert [response.status async for response in bench.watch()] == [Status.NOT_SERVING]


async def test_set_serving_after_close_does_not_bring_the_server_back(bench: Bench) -> None:
    bench.service.close()
    bench.service.set_serving(True)
    assert await bench.check() == Status.NOT_SERVING


async def test_lost_liveness_is_reported_and_comes_back(bench: Bench) -> None:
    watch = bench.watch(LIVENESS)
    assert (await watch.read()).status == Status.SERVING
    bench.service.set_serving(False, live=False)
    assert (await watch.read()).status == Status.NOT_SERVING
    assert await bench.check(LIVENESS) == Status.NOT_SERVING
    bench.service.set_serving(True)
    assert (await watch.read()).status == Status.SERVING
