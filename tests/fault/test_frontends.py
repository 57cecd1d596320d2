"""Fronts that die, or whose server dies: no other front's requests are lost, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio import FIRST_COMPLETED
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from paceline.protos import inference_pb2 as pb
from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.fault.traffic import connected, pending, request, total
from tests.fronts import channel_each, fronts_of, is_alive
from tests.harness import ServerProcess, write_identity
from tests.polling import eventually, eventually_async
from tests.ports import free_port

OK, UNAVAILABLE, FULL = grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED
TWO = ("--frontends", "2")
PATIENT = "dynamic_batching { max_queue_delay_microseconds: 100000000 }"
SLOW = 'parameters { key: "execute_delay_ms" value { string_value: "1000" } }'


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("models")
    write_identity(folder, rows=4, extra=PATIENT + SLOW, dims="[ -1 ]")
    with ServerProcess(folder, args=TWO, fresh=True) as server:
        yield server


@pytest.fixture
def server(shared: ServerProcess) -> Iterator[ServerProcess]:
    """Batches leave when they are full, four rows, and take a second. After each test, the server has to be as good as
    new: the next one uses it too."""
    yield shared
    eventually(lambda: len(fronts_of(shared.pid)) == 2, "two fronts")
    eventually(lambda: shared.metrics()["paceline_frontends"] == 2, "two fronts that are known")
    assert pending(shared) == 0
    assert held_bytes(shared) == 0
    assert regions(shared) == 4
    with connected(shared) as client:
        assert client.code(request(rows=4)) is OK


class Since:
    """What a server has counted since this was made."""

    def __init__(self, server: ServerProcess) -> None:
        self._server = server
        self._before = self._now()

    def _now(self) -> list[float]:
        names = ("nv_inference_count", "nv_inference_exec_count")
        cancelled = self._server.metrics()['nv_inference_request_failure{model="echo",reason="CANCELED",version="1"}']
        return [*(total(self._server, name) for name in names), cancelled, restarts(self._server)]

    def __call__(self) -> list[float]:
        """Rows, batches, cancelled requests, replaced fronts."""
        return [now - before for now, before in zip(self._now(), self._before, strict=True)]


def send(channel: grpc.aio.Channel, rows: int = 1, columns: int = 16, first: float = 0) -> Any:
    stub: Any = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
    return stub.ModelInfer(request(rows, columns, first), timeout=60)


def held_bytes(server: ServerProcess) -> float:
    """Bytes of shared memory in use."""
    metrics = server.metrics()
    return sum(metrics[f'paceline_frontend_memory_bytes{{direction="{one}"}}'] for one in ("in", "out"))


def regions(server: ServerProcess) -> int:
    """Mappings of shared memory that the server has: two for each front."""
    return Path(f"/proc/{server.pid}/maps").read_text().count("memfd:paceline-tensors")


def restarts(server: ServerProcess) -> float:
    return server.metrics()["paceline_frontend_restarts"]


async def test_front_that_keeps_dying_is_replaced_each_time(server: ServerProcess) -> None:
    """The first test, as each front that has died makes the pauses longer."""
    told_before, before = len(server.log), restarts(server)
    for number in range(1, 4):
        await eventually_async(lambda: len(fronts_of(server.pid)) == 2, "two fronts")
        youngest = fronts_of(server.pid)[-1]
        os.kill(youngest, signal.SIGKILL)
        await eventually_async(lambda n=number: restarts(server) == before + n, f"{number} fronts replaced")

    def pauses() -> list[str]:
        told = [record["message"] for record in server.log[told_before:] if record["level"] == "ERROR"]
        return [text.rpartition("; starting another in ")[2] for text in told]

    await eventually_async(lambda: len(pauses()) == 3, "a line for each")
    assert pauses() == ["0.1 s", "0.2 s", "0.4 s"]


async def test_killed_fronts_requests_leave_the_queue_and_no_others(server: ServerProcess) -> None:
    counted = Since(server)
    async with channel_each(server.target, fronts_of(server.pid)) as channels:
        (doomed, hit), (_, other) = channels.items()
        lost = [send(hit, columns=20_000), send(hit, columns=20_000)]
        kept = send(other)
        await eventually_async(lambda: pending(server) == 3, "three requests in the queue")
        assert held_bytes(server) >= 80_000  # the first of its kind is parsed, and kept elsewhere
        os.kill(doomed, signal.SIGKILL)
        await eventually_async(lambda: pending(server) == 1, "the dead front's requests gone")
        assert [await call.code() for call in lost] == [UNAVAILABLE] * 2
        rest = send(other, rows=3, first=100)
        assert (await kept).raw_output_contents[0] == request().raw_input_contents[0]
        assert await rest.code() is OK
    await eventually_async(lambda: counted() == [4, 1, 2, 1], "the front replaced, and nothing else counted")
    assert any("was killed by SIGKILL; starting another in" in line["message"] for line in server.log)


async def test_front_killed_while_a_batch_executes_does_not_affect_the_others_answers(server: ServerProcess) -> None:
    counted = Since(server)
    async with channel_each(server.target, fronts_of(server.pid)) as channels:
        (doomed, hit), (_, other) = channels.items()
        lost = send(hit)
        await eventually_async(lambda: pending(server) == 1, "a request in the queue")
        os.kill(doomed, signal.SIGSTOP)  # so that it can't answer first, however long the rest takes
        kept = send(other, rows=3)
        await eventually_async(lambda: pending(server) == 0, "the batch executing")
        os.kill(doomed, signal.SIGKILL)
        assert (await kept).raw_output_contents[0] == request(rows=3).raw_input_contents[0]
        assert await lost.code() is UNAVAILABLE
    await eventually_async(lambda: counted()[3] == 1, "the front replaced")
    assert counted()[:2] == [4, 1]


async def test_channel_of_a_dead_front_is_served_again(server: ServerProcess) -> None:
    before = restarts(server)
    async with channel_each(server.target, fronts_of(server.pid)) as channels:
        front, channel = next(iter(channels.items()))
        os.kill(front, signal.SIGKILL)
        await eventually_async(lambda: restarts(server) == before + 1, "the front gone")
        await eventually_async(lambda: server.metrics()["paceline_frontends"] == 2, "its place taken")
        code = None
        while code is not OK:  # until the client has noticed as well
            code = await send(channel, rows=4).code()
            assert code in (OK, UNAVAILABLE)


async def test_hanging_front_is_killed_and_replaced(tmp_path: Path) -> None:
    write_identity(tmp_path)
    with ServerProcess(tmp_path, args=(*TWO, "--frontend-timeout-secs", "2")) as server:
        async with channel_each(server.target, fronts_of(server.pid)) as channels:
            (hung, to_hung), (other, to_other) = channels.items()
            os.kill(hung, signal.SIGSTOP)
            call = send(to_hung)
            await eventually_async(lambda: restarts(server) == 1, "the front taken for hung")
            assert not is_alive(hung)
            assert await call.code() is UNAVAILABLE
            assert await send(to_other).code() is OK
            await eventually_async(lambda: server.metrics()["paceline_frontends"] == 2, "its place taken")
            assert other in fronts_of(server.pid)
        assert any("has not responded for 2 s" in record["message"] for record in server.log)
        async with channel_each(server.target, fronts_of(server.pid)) as channels:
            assert [await send(channel).code() for channel in channels.values()] == [OK, OK]
        assert restarts(server) == 1


async def test_fronts_ignore_signals_meant_for_the_server(server: ServerProcess) -> None:
    before, fronts = restarts(server), fronts_of(server.pid)
    for front in fronts:
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(front, number)
    async with channel_each(server.target, fronts_of(server.pid)) as channels:
        assert [await send(channel, rows=4).code() for channel in channels.values()] == [OK, OK]
    assert (restarts(server), fronts_of(server.pid)) == (before, fronts)


async def test_fronts_end_when_their_server_is_killed(tmp_path: Path) -> None:
    write_identity(tmp_path, rows=4, extra=PATIENT)
    server = ServerProcess(tmp_path, args=TWO)
    server.start()
    try:
        server.wait_ready()
        async with channel_each(server.target, fronts_of(server.pid)) as channels:
            calls = [send(channel) for channel in channels.values()]
            await eventually_async(lambda: pending(server) == 2, "two requests in the queue")
            server.signal(signal.SIGKILL)
            assert [await call.code() for call in calls] == [UNAVAILABLE] * 2
            await eventually_async(lambda: not any(map(is_alive, channels)), "no front left")
    finally:
        server.kill()


async def test_calls_that_a_hanging_engine_keeps_out_are_counted(server: ServerProcess) -> None:
    refused = 'paceline_refused_rpcs{reason="unread"}'
    # To a front that serves: one that takes the place of another needs the engine for that.
    async with channel_each(server.target, fronts_of(server.pid)) as channels:
        stub: Any = GRPCInferenceServiceStub(next(iter(channels.values())))  # type: ignore[no-untyped-call]
        os.kill(server.pid, signal.SIGSTOP)
        try:
            calls = [stub.ModelReady(pb.ModelReadyRequest(name="m" * 2**21), timeout=60) for _ in range(40)]
            await asyncio.wait([asyncio.ensure_future(one.code()) for one in calls], return_when=FIRST_COMPLETED)
        finally:
            os.kill(server.pid, signal.SIGCONT)
        codes = [await one.code() for one in calls]
    assert set(codes) == {FULL, grpc.StatusCode.NOT_FOUND}
    await eventually_async(lambda: server.metrics()[refused] == codes.count(FULL), "each counted")


def test_fronts_end_when_their_server_is_killed_while_they_start(tmp_path: Path) -> None:
    write_identity(tmp_path)
    server = ServerProcess(tmp_path, args=TWO)
    server.start()
    try:
        eventually(lambda: len(fronts_of(server.pid)) == 2, "two fronts")
        fronts = fronts_of(server.pid)
        server.signal(signal.SIGKILL)
        eventually(lambda: not any(map(is_alive, fronts)), "no front left")
    finally:
        server.kill()
    # Anything that they wrote would be here.
    assert not [line for line in server.stderr if not line.startswith("{")]


def test_server_whose_fronts_cannot_listen_reports_it_and_ends(tmp_path: Path) -> None:
    write_identity(tmp_path)
    with ServerProcess(tmp_path, args=TWO) as first:
        second = ServerProcess(tmp_path, args=(*TWO, "--grpc-port", str(first.grpc_port)))
        second.start()
        assert second.wait() == 1
        assert "gRPC can't listen on" in second.stderr[-1]
        second.kill()


def test_port_can_be_reused_at_once_by_servers_with_and_without_fronts(tmp_path: Path) -> None:
    write_identity(tmp_path)
    port = ("--grpc-port", str(free_port()))
    for args in ((), TWO, ()):
        with ServerProcess(tmp_path, args=(*args, *port)) as server, connected(server) as client:
            assert client.code(request()) is OK


async def test_hanging_front_does_not_keep_the_server_from_ending(tmp_path: Path) -> None:
    write_identity(tmp_path)
    with ServerProcess(tmp_path, args=(*TWO, "--exit-timeout-secs", "1")) as server:
        async with channel_each(server.target, fronts_of(server.pid)) as channels:
            (hung, _), (other, channel) = channels.items()
            os.kill(hung, signal.SIGSTOP)
            assert await send(channel).code() is OK
            server.signal(signal.SIGTERM)
            assert await asyncio.to_thread(server.wait, 20) == 0
        assert not is_alive(hung)
        assert not is_alive(other)
        assert any("did not end in time and is killed" in record["message"] for record in server.log)


def test_signal_while_fronts_start_ends_gracefully(tmp_path: Path) -> None:
    write_identity(tmp_path)
    server = ServerProcess(tmp_path, args=TWO)
    server.start()
    try:
        eventually(lambda: len(fronts_of(server.pid)) == 2, "two fronts")
        fronts = fronts_of(server.pid)
        server.signal(signal.SIGTERM)
        assert server.wait(20) == 0
        assert not any(map(is_alive, fronts))
        assert not [line for line in server.stderr if not line.startswith("{")]
    finally:
        server.kill()
