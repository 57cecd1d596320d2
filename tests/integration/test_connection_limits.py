"""Limits of connections, calls and streams: one too many is refused or waits, others are answered."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.protos import inference_pb2 as pb
from paceline.server.config import Settings
from paceline.server.limits import Connections
from tests.integration.http2 import begun_calls, calls_around, frames_until_the_end, next_answer, pings_answered
from tests.integration.limiting import executing, limited, one, refused, used, wait_for_value
from tests.integration.scripted import Script, mark_of, request
from tests.integration.serving import RETRY_UNAVAILABLE, echo_model, failure_of, serving
from tests.integration.streams import Stream
from tests.polling import eventually_async

Code = grpc.StatusCode
NO_BATCHES = "max_batch_size: 1"


# ---- Calls and streams -----------------------------------------------------------------------------------------------


async def test_calls_beyond_the_limit_are_refused_and_probes_are_not(tmp_path: Path, frontends: int) -> None:
    """One connection leads to one process, which has its share of the limit."""
    model, allowed = echo_model(), 4 // frontends
    async with serving(tmp_path, {"m": model}, config=NO_BATCHES, settings=limited(tmp_path, rpcs=4)) as served:
        calls = [await executing(served, model)]
        calls += [asyncio.create_task(served.infer(one())) for _ in range(allowed - 1)]
        await eventually_async(lambda: served.waiting("m") == allowed - 1, "all that may wait")
        await wait_for_value(served, used, "rpcs", allowed)
        text = f"the server has {allowed} calls in progress, which is the limit"
        assert await failure_of(served.infer(one())) == (Code.RESOURCE_EXHAUSTED, text)
        metadata = served.stub.ServerMetadata(pb.ServerMetadataRequest(), timeout=20)
        assert await failure_of(metadata) == (Code.RESOURCE_EXHAUSTED, text)
        assert (await served.stub.ServerReady(pb.ServerReadyRequest(), timeout=20)).ready
        health: Any = health_pb2_grpc.HealthStub(served.channel)  # type: ignore[no-untyped-call]
        assert (await health.Check(health_pb2.HealthCheckRequest(), timeout=20)).status == 1
        calls[-1].cancel()
        await eventually_async(lambda: served.waiting("m") == allowed - 2, "the cancelled one gone")
        calls[-1] = asyncio.create_task(served.infer(one()))
        model.gate.open()
        assert [(await call).raw_output_contents[0] for call in calls] == [one().raw_input_contents[0]] * allowed
        await wait_for_value(served, used, "rpcs", 0)
        await wait_for_value(served, refused, "rpcs", 2)
        await served.infer(one())


@pytest.mark.parametrize("rpc", ["/inference.GRPCInferenceService/ModelInfer", "/grpc.health.v1.Health/Watch"])
async def test_calls_without_a_message_keep_no_other_connection_out(tmp_path: Path, frontends: int, rpc: str) -> None:
    """Of a connection's calls some have to give way, but only as many as another one needs."""
    allowed = 8
    settings = limited(tmp_path, rpcs=allowed * frontends, streams=allowed * frontends)
    async with serving(tmp_path, {"m": echo_model()}, settings=settings) as served:
        server, limit = served.server, "rpcs" if rpc.endswith("Infer") else "streams"
        _, writer = await asyncio.open_connection("127.0.0.1", server.grpc_port)
        writer.write(begun_calls(20, rpc))
        await wait_for_value(served, refused, limit, 20 - allowed)
        health: Any = health_pb2_grpc.HealthStub(served.channel)  # type: ignore[no-untyped-call]
        for _ in range(3):
            await served.infer(one())
            watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=20)
            assert (await watch.read()).status == 1
            watch.cancel()
        assert await refused(served, limit) == 20 - allowed
        writer.close()
        await wait_for_value(served, used, limit, 0)


async def test_call_whose_request_is_late_is_ended_and_an_idle_stream_stays(tmp_path: Path, frontends: int) -> None:
    settings = Settings(paths=(tmp_path,), frontends=frontends, grpc_message_timeout_secs=0.2)
    async with serving(tmp_path, {"m": echo_model()}, settings=settings) as served:
        stream = Stream(served)
        await stream.call.wait_for_connection()
        call = served.channel.stream_unary("/inference.GRPCInferenceService/ModelInfer")()
        assert await failure_of(call) == (
            Code.DEADLINE_EXCEEDED,
            "expected the request within 0.2 s (--grpc-message-timeout-secs), got none",
        )
        await wait_for_value(served, refused, "no_message", 1)
        await stream.send(one())
        assert (await stream.message()).infer_response.outputs


@pytest.mark.usefixtures("frontends")
@pytest.mark.parametrize(
    "probe",
    [
        "/grpc.health.v1.Health/Check",
        "/inference.GRPCInferenceService/ServerLive",
        "/inference.GRPCInferenceService/ServerReady",
    ],
)
async def test_probes_are_answered_ahead_of_calls_that_nobody_has_looked_at(tmp_path: Path, probe: str) -> None:
    async with serving(tmp_path, {"m": echo_model()}, settings=Settings(paths=(tmp_path,))) as served:
        orders = []
        while [4003, 2001] not in orders:
            assert len(orders) < 20, orders
            reader, writer = await asyncio.open_connection("127.0.0.1", served.server.grpc_port)
            # Streams have odd numbers; without precedence, number 2001 would always be answered long before number
            # 4003. On a busy machine it may be with it, too: where the server has looked before all were there.
            writer.write(calls_around(1_000, "/inference.GRPCInferenceService/ServerMetadata", probe))
            orders.append([await next_answer(reader) for _ in range(2)])
            writer.close()
            await writer.wait_closed()


async def test_streams_beyond_the_limit_of_their_rpc_are_refused(tmp_path: Path, frontends: int) -> None:
    allowed = 2 // frontends
    async with serving(tmp_path, {"m": Script().model}, settings=limited(tmp_path, streams=2)) as served:
        streams = [Stream(served) for _ in range(allowed)]
        for mark, stream in enumerate(streams):
            await stream.send(request(mark))
            assert await stream.next() == mark
        surplus = Stream(served)
        text = f"the server has {allowed} streams of ModelStreamInfer open, which is the limit"
        assert (await surplus.rest(), await surplus.status()) == ([], (Code.RESOURCE_EXHAUSTED, text))
        health: Any = health_pb2_grpc.HealthStub(served.channel)  # type: ignore[no-untyped-call]
        watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=20)
        assert (await watch.read()).status == 1
        assert mark_of(await served.infer(request(1))) == 1
        await wait_for_value(served, used, "streams", allowed + 1)
        await wait_for_value(served, refused, "streams", 1)
        watch.cancel()
        streams[0].call.cancel()
        await wait_for_value(served, used, "streams", allowed - 1)
        another = Stream(served)
        await another.send(request(7))
        assert await another.next() == 7


# ---- Connections -----------------------------------------------------------------------------------------------------


_PING, _GOAWAY = 6, 7


@pytest.mark.usefixtures("frontends")
async def test_connection_that_is_old_enough_gets_a_goaway_and_is_closed(tmp_path: Path) -> None:
    settings = Settings(paths=(tmp_path,), connections=Connections(max_age_ms=50, max_age_grace_ms=50))
    async with serving(tmp_path, {"m": echo_model()}, settings=settings, options=RETRY_UNAVAILABLE) as served:
        assert _GOAWAY in await frames_until_the_end(served.server.grpc_port)
        for _ in range(3):
            await served.infer(one())


@pytest.mark.usefixtures("frontends")
async def test_connection_whose_client_answers_no_ping_is_closed(tmp_path: Path) -> None:
    # The timeout is long enough for a client that does answer, on a machine that is busy with something else.
    connections = Connections(keepalive_time_ms=50, keepalive_timeout_ms=2_000, keepalive_permit_without_calls=True)
    settings = Settings(paths=(tmp_path,), connections=connections)
    async with serving(tmp_path, {"m": echo_model()}, settings=settings, options=RETRY_UNAVAILABLE) as served:
        assert _PING in await frames_until_the_end(served.server.grpc_port)
        await served.infer(one())


@pytest.mark.usefixtures("frontends")
async def test_calls_beyond_a_connections_limit_wait_in_the_client(tmp_path: Path) -> None:
    async with serving(tmp_path, {"m": echo_model()}, settings=limited(tmp_path, connection_calls=4)) as served:
        for _ in range(5):
            await asyncio.gather(*(served.infer(one()) for _ in range(32)))


@pytest.mark.usefixtures("frontends")
async def test_connection_of_a_client_that_pings_too_often_is_closed(tmp_path: Path) -> None:
    settings = Settings(paths=(tmp_path,), connections=Connections(max_ping_strikes=1))
    async with serving(tmp_path, {"m": echo_model()}, settings=settings) as served:
        await frames_until_the_end(served.server.grpc_port, pings=10)
        await served.infer(one())


@pytest.mark.usefixtures("frontends")
@pytest.mark.parametrize(
    ("calls", "without_calls", "stays"), [(0, False, False), (1, False, True), (0, True, True), (1, True, True)]
)
async def test_interval_between_pings_applies_during_calls_or_if_pings_without_are_permitted(
    tmp_path: Path, calls: int, without_calls: bool, stays: bool
) -> None:
    connections = Connections(min_recv_ping_interval_without_data_ms=0, keepalive_permit_without_calls=without_calls)
    async with serving(
        tmp_path, {"m": echo_model()}, settings=Settings(paths=(tmp_path,), connections=connections)
    ) as served:
        assert (await pings_answered(served.server.grpc_port, 20, calls=calls) == 20) is stays
        await served.infer(one())


@pytest.mark.usefixtures("frontends")
async def test_idle_connection_gets_a_goaway_and_is_closed(tmp_path: Path) -> None:
    settings = Settings(paths=(tmp_path,), connections=Connections(max_idle_ms=50))
    async with serving(tmp_path, {"m": echo_model()}, settings=settings) as served:
        assert _GOAWAY in await frames_until_the_end(served.server.grpc_port)
        await served.infer(one())
