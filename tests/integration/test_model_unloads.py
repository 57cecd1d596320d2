"""Models unloaded by RPC, and a server that stops while it loads or unloads."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.protos import inference_pb2 as pb
from tests.integration.controlling import (
    READY_M,
    ROW,
    WARMED_UP_CONFIG,
    all_left,
    answers,
    ask,
    explicit,
    index,
    load,
    loading,
    model_ready,
    ready,
    slow_model,
    unload,
)
from tests.integration.serving import echo_model, failure_of, serving, write_model
from tests.polling import eventually_async
from tests.rlimits import without_threads
from tests.wire import infer, rows_of_floats

Code = grpc.StatusCode


async def test_unload_refuses_new_requests_and_answers_those_already_accepted(tmp_path: Path) -> None:
    model = echo_model()
    config = "max_batch_size: 4 dynamic_batching { max_queue_delay_microseconds: 100000000 }"
    async with serving(tmp_path, {"m": model}, config=config, settings=explicit(tmp_path, load=("m",))) as served:
        model.gate.close()
        running = asyncio.create_task(served.infer(infer("m", {"a": rows_of_floats(4)})))
        await asyncio.to_thread(model.gate.wait_entered, 1)
        waiting = asyncio.create_task(served.infer(ask()))
        await eventually_async(lambda: served.waiting("m") == 1, "a request waiting")
        await unload(served, "m")
        assert await index(served) == [("m", "1", "UNLOADING", "")]
        assert await failure_of(served.infer(ask())) == (
            Code.NOT_FOUND,
            "Request for unknown model: 'm' has no available versions: it was unloaded",
        )
        assert not await model_ready(served)
        assert await ready(served)
        assert not model.closed
        model.gate.open()
        assert (await running).raw_output_contents[0] == rows_of_floats(4).tobytes()
        assert (await waiting).raw_output_contents[0] == ROW.tobytes()
        await eventually_async(lambda: model.closed, "the model closed")
        assert model.open_instances == 0
        await all_left(served)
        assert await index(served) == [("m", "1", "UNAVAILABLE", "unloaded")]
        assert await ready(served)


async def test_unload_when_no_thread_can_start_closes_the_model_once_one_can(tmp_path: Path) -> None:
    model = echo_model()
    # Looking for GPUs leaves a thread behind that could close the model.
    settings = explicit(tmp_path, allow_gpu_metrics=False)
    async with serving(tmp_path, {"m": model}, settings=settings) as served:
        await load(served, "m")
        with without_threads():
            await unload(served, "m")
            assert not await model_ready(served)
            assert served.server.repository.leaving
        await eventually_async(lambda: model.closed, "the model closed")
        assert model.open_instances == 0
        await all_left(served)


async def test_unload_drops_the_models_metrics_and_load_restarts_them_at_zero(tmp_path: Path) -> None:
    async with serving(tmp_path, {"m": echo_model()}, settings=explicit(tmp_path, load=("m",))) as served:
        assert await answers(served)
        assert await served.metric("nv_inference_count") == 1
        await unload(served, "m")
        await all_left(served)
        assert not [name for name in await served.metrics() if 'model="m"' in name]
        await load(served, "m")
        assert await served.metric("nv_inference_count") == 0


async def test_load_after_unload_serves_while_the_unloaded_model_still_executes(tmp_path: Path) -> None:
    old, new = echo_model(), echo_model()
    models = {"m": old}
    async with serving(tmp_path, models, settings=explicit(tmp_path, load=("m",))) as served:
        old.gate.close()
        running = asyncio.create_task(served.infer(ask()))
        await asyncio.to_thread(old.gate.wait_entered, 1)
        await unload(served, "m")
        models["m"] = new
        await load(served, "m")
        assert await index(served) == READY_M
        assert await answers(served)
        old.gate.open()
        await running
        await eventually_async(lambda: old.closed, "the old model closed")
        assert await index(served) == READY_M


async def test_unload_during_a_load_waits_for_it_and_then_unloads(tmp_path: Path) -> None:
    model = slow_model()
    async with serving(tmp_path, {"m": model}, config=WARMED_UP_CONFIG, settings=explicit(tmp_path)) as served:
        load_task = await loading(served, model)
        unload_task = asyncio.create_task(unload(served, "m"))
        assert await index(served) == [("m", "1", "LOADING", "")]
        assert not unload_task.done()
        model.gate.open()
        await load_task
        await unload_task
        await eventually_async(lambda: model.closed, "the model closed")
        await all_left(served)
        assert await index(served) == [("m", "1", "UNAVAILABLE", "unloaded")]


async def test_unload_of_a_failed_model_makes_the_server_ready(tmp_path: Path) -> None:
    write_model(tmp_path, "m", "instance_group { passive: true }")
    async with serving(tmp_path, settings=explicit(tmp_path, load=("m",))) as served:
        assert not await ready(served)
        await unload(served, "m")
        assert await ready(served)
        assert await index(served) == [("m", "", "UNAVAILABLE", "unloaded")]


@pytest.mark.parametrize("name", ["nobody", "never"])
async def test_unload_of_a_model_that_is_not_loaded_succeeds_and_changes_nothing(tmp_path: Path, name: str) -> None:
    models = {"m": echo_model(), "never": echo_model()}
    async with serving(tmp_path, models, settings=explicit(tmp_path, load=("m",))) as served:
        before = await index(served)
        await unload(served, name)
        assert await index(served) == before
        assert await answers(served)


async def test_unload_twice_succeeds(tmp_path: Path) -> None:
    async with serving(tmp_path, {"m": echo_model()}, settings=explicit(tmp_path, load=("m",))) as served:
        await unload(served, "m")
        await unload(served, "m")
        await all_left(served)
        assert await index(served) == [("m", "1", "UNAVAILABLE", "unloaded")]


async def test_unload_accepts_unload_dependents_and_refuses_other_parameters(tmp_path: Path) -> None:
    async with serving(tmp_path, {"m": echo_model()}, settings=explicit(tmp_path, load=("m",))) as served:
        request = pb.RepositoryModelUnloadRequest(model_name="m")
        request.parameters["unload_dependents"].string_param = "yes"
        assert await failure_of(served.stub.RepositoryModelUnload(request)) == (
            Code.INVALID_ARGUMENT,
            "invalid value type for unload parameter 'unload_dependents', expected bool_param, got string_param",
        )
        other = pb.RepositoryModelUnloadRequest(model_name="m")
        other.parameters["force"].bool_param = True
        code, text = await failure_of(served.stub.RepositoryModelUnload(other))
        assert (code, text.split(":")[0]) == (Code.INVALID_ARGUMENT, "unrecognized unload parameter 'force'")
        assert await answers(served)
        request.parameters["unload_dependents"].bool_param = True
        await served.stub.RepositoryModelUnload(request)
        assert not await model_ready(served)


async def test_stop_during_a_load_closes_the_loaded_model(tmp_path: Path) -> None:
    model = slow_model()
    async with serving(tmp_path, {"m": model}, config=WARMED_UP_CONFIG, settings=explicit(tmp_path)) as served:
        task = await loading(served, model)
        assert not await served.server.stop(5)
        assert await failure_of(task) == (Code.UNAVAILABLE, "the server is stopping")
        model.gate.open()
        await eventually_async(lambda: model.closed, "what the load brought closed")
        assert model.open_instances == 0


async def test_stop_waits_for_the_executions_of_an_unloaded_model(tmp_path: Path) -> None:
    model = echo_model()
    async with serving(tmp_path, {"m": model}, settings=explicit(tmp_path, load=("m",))) as served:
        model.gate.close()
        running = asyncio.create_task(served.infer(ask()))
        await asyncio.to_thread(model.gate.wait_entered, 1)
        await unload(served, "m")
        watch = health_pb2_grpc.HealthStub(served.channel).Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        stopping = asyncio.create_task(served.server.stop(20))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert not stopping.done()
        model.gate.open()
        assert (await running).raw_output_contents[0] == ROW.tobytes()
        assert await stopping
        assert model.closed


async def test_stop_that_times_out_gives_up_on_an_unloaded_model_without_closing_it(tmp_path: Path) -> None:
    model = echo_model()
    async with serving(tmp_path, {"m": model}, settings=explicit(tmp_path, load=("m",))) as served:
        model.gate.close()
        running = asyncio.create_task(served.infer(ask()))
        await asyncio.to_thread(model.gate.wait_entered, 1)
        await unload(served, "m")
        assert not await served.server.stop(0.1)
        code, _ = await failure_of(running)
        assert code is Code.UNAVAILABLE
        assert (model.closed, model.open_instances) == (False, 1)
