"""gRPC in several processes: whichever of them a client is connected to, it gets the same server, and the memory
between them is bounded. Other tests run both with and without them (`frontends`), to show that all else is the same."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from itertools import count
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.backends.spec import ModelSpec, Tensors, TensorSpec
from paceline.protos import inference_pb2 as pb
from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceStub
from paceline.server.app import Server
from paceline.server.config import Settings
from paceline.server.errors import StartError
from tests.fronts import channel_each, fronts_of
from tests.harness import ServerProcess, write_identity
from tests.integration.controlling import explicit, load, unload
from tests.integration.front_memory import BATCHED, nothing_held, through_each, two
from tests.integration.regions import in_region, register
from tests.integration.regions import settings as with_shared_memory
from tests.integration.serving import Served, echo_model, failure_of, serving, write_model
from tests.memory_models import MemoryModel
from tests.nursery import ForkedFront, start_front
from tests.polling import eventually_async
from tests.ports import free_port
from tests.shared_objects import shared_object
from tests.wire import infer, rows_of_floats

Code = grpc.StatusCode


# ---- One server ------------------------------------------------------------------------------------------------------


async def test_requests_of_several_fronts_share_a_batch_and_are_counted_together(tmp_path: Path) -> None:
    model = echo_model()
    async with serving(tmp_path, {"m": model}, config=BATCHED, settings=two(tmp_path)) as served:
        model.gate.close()
        async with through_each(served) as sides:
            blocker = asyncio.create_task(sides[0].infer(infer("m", {"a": rows_of_floats(1)})))
            await asyncio.to_thread(model.gate.wait_entered, 1)
            asked = [rows_of_floats(2, first=10 * number) for number in range(4)]
            calls = [
                asyncio.create_task(sides[number % 2].infer(infer("m", {"a": array})))
                for number, array in enumerate(asked)
            ]
            await eventually_async(lambda: served.waiting("m") == 4, "four requests in the queue")
            model.gate.open()
            await blocker
            answers = await asyncio.gather(*calls)
            statistics = [
                (await side.stub.ModelStatistics(pb.ModelStatisticsRequest(name="m"))).model_stats[0] for side in sides
            ]
        assert [one.raw_output_contents[0] for one in answers] == [array.tobytes() for array in asked]
        assert model.batches == [(1,), (2, 2, 2, 2)]
        assert statistics[0] == statistics[1]
        assert statistics[0].inference_stats.success.count == 5
        assert await served.metric("nv_inference_request_success") == 5
        assert await served.metric("nv_inference_count") == 9


async def test_models_loaded_through_one_front_serve_at_once_through_the_other(tmp_path: Path) -> None:
    write_model(tmp_path, "m", BATCHED)
    one_row = infer("m", {"a": rows_of_floats(1)})
    models = {"m": echo_model()}
    settings = explicit(tmp_path, frontends=2)
    async with serving(tmp_path, models, settings=settings) as served, through_each(served) as (first, second):
        for _ in range(5):
            await load(first, "m")
            assert (await second.infer(one_row)).raw_output_contents[0] == one_row.raw_input_contents[0]
            await unload(second, "m")
            for side in (first, second):
                code, text = await failure_of(side.infer(one_row))
                assert (code, text) == (
                    Code.NOT_FOUND,
                    "Request for unknown model: 'm' has no available versions: it was unloaded",
                )


async def test_regions_registered_through_one_front_serve_requests_of_the_other(tmp_path: Path) -> None:
    settings = with_shared_memory(tmp_path, frontends=2)
    async with serving(tmp_path, {"m": echo_model()}, config=BATCHED, settings=settings) as served:
        with shared_object(4096) as memory:
            rows = rows_of_floats(2)
            memory.put(rows)
            async with through_each(served) as (first, second):
                await register(first, "r", memory.key, 4096)
                assert (await second.infer(in_region(rows=2))).raw_output_contents[0] == rows.tobytes()
                await second.infer(in_region(rows=2, target=1024))
            assert memory.get(16, 1024) == rows.tobytes()


async def test_health_and_readiness_are_reported_by_every_front(tmp_path: Path) -> None:
    write_model(tmp_path, "m", BATCHED)
    settings = explicit(tmp_path, load=("m",), frontends=2)
    async with (
        serving(tmp_path, {"m": echo_model()}, settings=settings) as served,
        channel_each(served.target, served.fronts) as channels,
    ):
        health = [health_pb2_grpc.HealthStub(channel) for channel in channels.values()]
        stubs: list[Any] = [GRPCInferenceServiceStub(one) for one in channels.values()]  # type: ignore[no-untyped-call]
        for stub in stubs:
            assert (await stub.ServerLive(pb.ServerLiveRequest())).live
            assert (await stub.ServerReady(pb.ServerReadyRequest())).ready
            assert (await stub.ModelReady(pb.ModelReadyRequest(name="m"))).ready
        watches = [one.Watch(health_pb2.HealthCheckRequest()) for one in health]
        assert [(await watch.read()).status for watch in watches] == [health_pb2.HealthCheckResponse.SERVING] * 2
        stopping = asyncio.create_task(served.server.stop(5))
        status = health_pb2.HealthCheckResponse.NOT_SERVING
        assert [(await watch.read()).status for watch in watches] == [status] * 2
        assert await stopping


async def test_log_settings_changed_through_one_front_apply_to_all(tmp_path: Path) -> None:
    write_identity(tmp_path)
    change = pb.LogSettingsRequest()
    change.settings["log_verbose_level"].uint32_param = 1
    with ServerProcess(tmp_path, args=("--frontends", "2", "--allow-remote-settings", "true")) as server:
        async with channel_each(server.target, fronts_of(server.pid)) as channels:
            (first, stub) = (GRPCInferenceServiceStub(one) for one in channels.values())  # type: ignore[no-untyped-call]
            await first.LogSettings(change)
            told = await stub.LogSettings(pb.LogSettingsRequest())
        assert told.settings["log_verbose_level"].uint32_param == 1
        await eventually_async(
            lambda: [one["message"] for one in server.log].count("a frontend has applied the new log settings") == 2,
            "a line of each",
        )


async def test_port_is_not_shared_with_another_server(tmp_path: Path) -> None:
    async with serving(tmp_path, {"m": echo_model()}, settings=two(tmp_path)) as served:
        port = served.server.grpc_port
        for frontends in (1, 2):
            other = Settings(paths=(), grpc_address="127.0.0.1", grpc_port=port, frontends=frontends, metrics_port=None)
            with pytest.raises(StartError, match=f"gRPC can't listen on 127.0.0.1:{port}: Address already in use"):
                await Server(other).start()
        assert not fronts_of(os.getpid()), "the other has left none"


# ---- Tensors on their way --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [1, 2048, 2049, 3_000_000], ids=["tiny", "inline", "shared", "12 MB"])
async def test_tensors_of_any_size_arrive_unchanged(tmp_path: Path, columns: int) -> None:
    async with serving(tmp_path, {"m": echo_model()}, config=BATCHED, settings=two(tmp_path)) as served:
        arrays = [rows_of_floats(rows, columns, first=rows) for rows in (1, 2)]
        answers = await asyncio.gather(*(served.infer(infer("m", {"a": array})) for array in arrays))
        assert [one.raw_output_contents[0] for one in answers] == [array.tobytes() for array in arrays]
        await nothing_held(served)


async def test_texts_of_any_length_arrive_unchanged(tmp_path: Path) -> None:
    texts = np.array([[b""], [b"a" * 10_000], ["grün €".encode()], [b"\x00" * 100_000]], object)
    async with serving(tmp_path, {"t": echo_model("BYTES", 1)}, config=BATCHED, settings=two(tmp_path)) as served:
        for array in (texts, texts[:1], texts[2:3]):
            request = infer("t", {"a": array})
            assert (await served.infer(request)).raw_output_contents[0] == request.raw_input_contents[0]
        await nothing_held(served)


class FrontStarter:
    """Starts fronts as long as it `works`."""

    works = True

    async def start(self, descriptors: tuple[int, int, int]) -> ForkedFront:
        if not self.works:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        return await start_front(descriptors)


async def readiness(served: Served) -> tuple[int, str]:
    """Status and text of `/readyz`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.server.metrics_port)
    writer.write(b"GET /readyz HTTP/1.0\r\n\r\n")
    head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    return int(head.split()[1]), body


async def test_server_whose_fronts_have_all_died_is_not_ready_until_one_listens_again(tmp_path: Path) -> None:
    starter = FrontStarter()
    async with serving(tmp_path, {"m": echo_model()}, settings=two(tmp_path), start_front=starter.start) as served:
        assert await readiness(served) == (200, "ok\n")
        starter.works = False
        for front in served.fronts:
            os.kill(front, signal.SIGKILL)
        while (said := await readiness(served))[0] == 200:
            pass
        assert said == (503, "no frontend is listening; another is being started\n")
        assert (await served.metrics())["paceline_frontends"] == 0
        starter.works = True
        while (await readiness(served))[0] != 200:
            pass
        assert (await served.metrics())["paceline_frontends"] > 0


async def test_stop_does_not_wait_for_the_restart_of_a_dead_front(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pause in ("_FIRST_PAUSE_S", "_LONGEST_PAUSE_S"):
        monkeypatch.setattr(f"paceline.server.fronts.pool.{pause}", 1_000_000.0)
    async with serving(tmp_path, {"m": echo_model()}, settings=two(tmp_path)) as served:
        os.kill(served.fronts[0], signal.SIGKILL)
        while not (await served.metrics())["paceline_frontend_restarts"]:
            await asyncio.sleep(0.01)
        await asyncio.wait_for(served.server.stop(100), 50)


async def test_the_first_front_serves_while_another_still_starts(tmp_path: Path) -> None:
    """And so does each front from when it listens, whatever the others do."""
    write_identity(tmp_path)
    port, starts, may_start = free_port(), count(), asyncio.Event()

    async def start(descriptors: tuple[int, int, int]) -> ForkedFront:
        if next(starts):
            await may_start.wait()
        return await start_front(descriptors)

    (tmp_path / "bad" / "1").mkdir(parents=True)
    on_port = {"grpc_address": "127.0.0.1", "grpc_port": port, "metrics_port": None}
    settings = explicit(tmp_path, load=("echo",), frontends=2, **on_port)
    server = Server(settings, start_front=start)
    request = infer("echo", {"INPUT0": rows_of_floats(1, 16)})
    soon = [("grpc.initial_reconnect_backoff_ms", 100), ("grpc.max_reconnect_backoff_ms", 100)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=soon) as channel:
        stub = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        starting = asyncio.create_task(server.start())
        try:
            first = await stub.ModelInfer(request, wait_for_ready=True, timeout=60)
            health = health_pb2_grpc.HealthStub(channel)
            before = await health.Check(health_pb2.HealthCheckRequest(), timeout=60)
            code, _ = await failure_of(stub.RepositoryModelLoad(pb.RepositoryModelLoadRequest(model_name="bad")))
            after = await health.Check(health_pb2.HealthCheckRequest(), timeout=60)
        finally:
            may_start.set()
            await starting
            await server.stop(5)
    assert first.model_name == "echo"
    assert before.status == health_pb2.HealthCheckResponse.SERVING
    assert code is not Code.OK
    assert after.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_answer_too_large_for_a_message_is_refused_although_memory_has_room_for_it(
    tmp_path: Path,
) -> None:
    def compute(inputs: Tensors) -> Tensors:
        return (np.zeros((1, 2**31), np.uint8),)  # nobody touches it, so that it takes no memory

    spec = ModelSpec((TensorSpec("a", "FP32", (-1, -1)),), (TensorSpec("x", "UINT8", (-1, -1)),))
    settings = two(tmp_path, memory_mb=2**13)
    async with serving(tmp_path, {"m": MemoryModel(spec, compute)}, config=BATCHED, settings=settings) as served:
        code, text = await failure_of(served.infer(infer("m", {"a": rows_of_floats(1, 300 * 256)})))
        assert (code, "outputs that one message can carry" in text) == (Code.RESOURCE_EXHAUSTED, True)
        assert await served.metric("nv_inference_request_success") == 0


async def test_outputs_that_cannot_be_encoded_give_the_same_error_when_memory_exceeds_a_message(
    tmp_path: Path,
) -> None:
    spec = ModelSpec((TensorSpec("a", "FP32", (-1, -1)),), (TensorSpec("x", "BYTES", (-1,)),))
    model = MemoryModel(spec, lambda inputs: (np.array([7], object),))
    async with serving(tmp_path, {"m": model}, config=BATCHED, settings=two(tmp_path, memory_mb=2**13)) as served:
        assert await failure_of(served.infer(infer("m", {"a": rows_of_floats(1, 300 * 256)}))) == (
            Code.INTERNAL,
            "model 'm': output 'x': expected bytes or str in element 0 of BYTES, got int",
        )
