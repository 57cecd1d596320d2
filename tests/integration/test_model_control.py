"""Models loaded and unloaded by RPC: what each of the RPCs does, refuses and leaves as it was."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from backends.errors import LoadError
from backends.memory import MemoryModel
from protos import inference_pb2 as pb
from server.config import ControlMode, Settings
from server.errors import StartError
from tests.integration.controlling import all_left, explicit, index, load, load_request, ready, unload
from tests.integration.serving import Served, echo_model, failure_of, serving, write_model
from tests.polling import eventually_async
from tests.wire import infer, rows_of_floats

Code = grpc.StatusCode
ROW = rows_of_floats(1)
KNOWN_DIMS = 'input { name: "a" data_type: TYPE_FP32 dims: 2 }'
"""A configuration of known dims has the model warmed up, which a closed gate holds up: a load that takes its time."""
READY_M = [("m", "1", "READY", "")]


def ask(model: str = "m", version: str = "") -> pb.ModelInferRequest:
    return infer(model, {"a": ROW}, version=version)


async def answers(served: Served, model: str = "m", version: str = "") -> bool:
    answer = await served.infer(ask(model, version))
    return bool(answer.raw_output_contents[0] == ROW.tobytes())


async def model_ready(served: Served, model: str = "m", version: str = "") -> bool:
    answer = await served.stub.ModelReady(pb.ModelReadyRequest(name=model, version=version), timeout=20)
    return bool(answer.ready)


def slow_model() -> MemoryModel:
    """One whose load waits at its gate."""
    model = echo_model()
    model.gate.close()
    return model


async def loading(served: Served, model: MemoryModel, name: str = "m", **parameters: object) -> asyncio.Task[None]:
    """A load that waits at the gate of `model`."""
    task = asyncio.create_task(load(served, name, **parameters))
    await asyncio.to_thread(model.gate.wait_entered, 1)
    return task


# Modes


async def test_explicit_mode_without_load_model_starts_with_nothing_and_is_ready(tmp_path: Path) -> None:
    async with serving(tmp_path, {"m": echo_model()}, settings=explicit(tmp_path)) as served:
        assert await index(served) == [("m", "", "", "")]
        assert await index(served, ready=True) == []
        assert await ready(served)
        assert not await model_ready(served)
        assert await failure_of(served.infer(ask())) == (
            Code.NOT_FOUND,
            "model 'm' has no available versions: it was never loaded",
        )


async def test_explicit_mode_with_load_model_starts_with_these_alone(tmp_path: Path) -> None:
    models = {name: echo_model() for name in "abc"}
    async with serving(tmp_path, models, settings=explicit(tmp_path, load=("c", "a", "c"))) as served:
        assert await index(served, ready=True) == [("a", "1", "READY", ""), ("c", "1", "READY", "")]
        assert await answers(served, "a")
        assert await ready(served)


async def test_explicit_mode_with_a_star_starts_with_all(tmp_path: Path) -> None:
    models = {name: echo_model() for name in "abc"}
    async with serving(tmp_path, models, settings=explicit(tmp_path, load=("*",))) as served:
        assert [line[0] for line in await index(served, ready=True)] == ["a", "b", "c"]


async def test_explicit_mode_starts_on_an_empty_repository(tmp_path: Path) -> None:
    async with serving(tmp_path, settings=explicit(tmp_path)) as served:
        assert await index(served) == []
        assert await ready(served)


async def test_load_model_of_a_name_that_is_not_there_is_missing_until_it_is_loaded(tmp_path: Path) -> None:
    models = {"m": echo_model()}
    async with serving(tmp_path, models, settings=explicit(tmp_path, load=("n", "m"))) as served:
        assert await index(served) == [*READY_M, ("n", "", "UNAVAILABLE", f"no model of that name in {tmp_path}")]
        assert not await ready(served)
        write_model(tmp_path, "n")
        models["n"] = echo_model()
        await load(served, "n")
        assert await ready(served)
    with pytest.raises(StartError, match="failed to load model 'nn': no model of that name in"):
        async with serving(tmp_path, settings=explicit(tmp_path, load=("nn",), exit_on_error=True)):
            pass


@pytest.mark.parametrize("mode", [ControlMode.NONE, ControlMode.POLL])
async def test_load_and_unload_are_refused_in_other_modes_saying_what_to_switch_on(
    tmp_path: Path, mode: ControlMode
) -> None:
    settings = Settings(paths=(tmp_path,), model_control_mode=mode, repository_poll_secs=1e6)
    async with serving(tmp_path, {"m": echo_model()}, settings=settings) as served:
        for call in (load(served, "m"), unload(served, "m")):
            code, text = await failure_of(call)
            assert code is Code.UNIMPLEMENTED
            assert text == (
                "explicit model load / unload is not allowed: expected a server with --model-control-mode explicit, "
                f"got one with {mode.value}"
            )
        assert await index(served) == READY_M
        assert await answers(served)
        metadata = await served.stub.ServerMetadata(pb.ServerMetadataRequest())
        assert not {"model_repository", "model_repository(unload_dependents)"} & set(metadata.extensions)


async def test_extensions_are_advertised_where_they_work(tmp_path: Path) -> None:
    async with serving(tmp_path, settings=explicit(tmp_path)) as served:
        metadata = await served.stub.ServerMetadata(pb.ServerMetadataRequest())
        assert {"model_repository", "model_repository(unload_dependents)"} <= set(metadata.extensions)


# Load


async def test_load_returns_when_the_model_serves(tmp_path: Path) -> None:
    model = slow_model()
    async with serving(tmp_path, {"m": model}, config=KNOWN_DIMS, settings=explicit(tmp_path)) as served:
        task = await loading(served, model)
        assert await index(served) == [("m", "1", "LOADING", "")]
        assert not await model_ready(served)
        assert not await ready(served)
        assert await failure_of(served.infer(ask())) == (Code.UNAVAILABLE, "model 'm' is not ready: LOADING")
        assert not task.done()
        model.gate.open()
        await task
        assert await index(served) == READY_M
        assert await answers(served)
        assert await ready(served)


async def test_load_finds_a_model_that_came_after_the_start(tmp_path: Path) -> None:
    models = {"m": echo_model()}
    async with serving(tmp_path, models, settings=explicit(tmp_path)) as served:
        write_model(tmp_path, "late")
        models["late"] = echo_model()
        assert await index(served) == [("late", "", "", ""), ("m", "", "", "")]
        await load(served, "late")
        assert await answers(served, "late")


async def test_load_in_another_repository(tmp_path: Path) -> None:
    write_model(tmp_path / "two", "m")
    (tmp_path / "one").mkdir()
    settings = explicit(tmp_path / "one", tmp_path / "two")
    async with serving(tmp_path / "two", {"m": echo_model()}, settings=settings) as served:
        await load(served, "m")
        assert await answers(served)


async def test_load_takes_the_versions_that_the_policy_asks_for_now(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "m", "version_policy { latest { num_versions: 2 } }")
    async with serving(tmp_path, {"m": echo_model()}, settings=explicit(tmp_path)) as served:
        await load(served, "m")
        (folder / "2").mkdir()
        (folder / "10").mkdir()
        assert await index(served) == READY_M
        await load(served, "m")
        await all_left(served)
        assert await index(served) == [
            ("m", "1", "UNAVAILABLE", "unloaded"),
            ("m", "2", "READY", ""),
            ("m", "10", "READY", ""),
        ]
        assert (await served.infer(ask())).model_version == "10"
        code, text = await failure_of(served.infer(ask(version="1")))
        assert (code, text) == (Code.NOT_FOUND, "model 'm' version 1 is not found; versions served: ['2', '10']")


async def test_reload_serves_the_old_one_until_the_new_one_is_warm_and_closes_it_then(tmp_path: Path) -> None:
    old, new = echo_model(), slow_model()
    models = {"m": old}
    config = "max_batch_size: 8 " + KNOWN_DIMS
    async with serving(tmp_path, models, config=config, settings=explicit(tmp_path, load=("m",))) as served:
        models["m"] = new
        task = await loading(served, new)
        assert await index(served) == READY_M
        assert await ready(served)
        assert await answers(served)
        assert not old.closed
        new.gate.open()
        await task
        await eventually_async(lambda: old.closed, "the old model closed")
        assert old.open_instances == 0
        before = len(new.batches)
        assert await answers(served)
        assert len(new.batches) == before + 1
        assert await index(served) == READY_M


async def test_reload_answers_what_the_old_one_executes_and_has_queued(tmp_path: Path) -> None:
    old, new = echo_model(), echo_model()
    models = {"m": old}
    config = "max_batch_size: 4 dynamic_batching { max_queue_delay_microseconds: 100000000 }"
    async with serving(tmp_path, models, config=config, settings=explicit(tmp_path, load=("m",))) as served:
        old.gate.close()
        running = asyncio.create_task(served.infer(infer("m", {"a": rows_of_floats(4)})))
        await asyncio.to_thread(old.gate.wait_entered, 1)
        waiting = [asyncio.create_task(served.infer(ask())) for _ in range(2)]
        await eventually_async(lambda: served.waiting("m") == 2, "two requests waiting")
        models["m"] = new
        await load(served, "m")
        assert await index(served) == READY_M
        newcomer = asyncio.create_task(served.infer(infer("m", {"a": rows_of_floats(4)})))
        assert (await newcomer).raw_output_contents[0] == rows_of_floats(4).tobytes()
        assert new.batches == [(4,)]
        assert not running.done()
        assert not old.closed
        old.gate.open()
        assert (await running).raw_output_contents[0] == rows_of_floats(4).tobytes()
        for answer in await asyncio.gather(*waiting):
            assert answer.raw_output_contents[0] == ROW.tobytes()
        await eventually_async(lambda: old.closed, "the old model closed")
        assert old.batches == [(4,), (1, 1)]
        # Statistics are those of the new one alone, metrics go on with what both count.
        told = await served.stub.ModelStatistics(pb.ModelStatisticsRequest(name="m"), timeout=20)
        assert told.model_stats[0].inference_count == 4
        assert await served.metric("nv_inference_count", 'model="m",version="1"') == 10
        assert await served.metric("nv_inference_request_success", 'model="m",version="1"') == 4


async def test_reload_answers_a_split_request_whose_parts_are_not_all_queued_yet(tmp_path: Path) -> None:
    old, new = echo_model(), echo_model()
    models = {"m": old}
    config = """max_batch_size: 2
        dynamic_batching { default_queue_policy { max_queue_size: 1 } }
        parameters { key: "paceline.split_oversized" value { string_value: "true" } }"""
    async with serving(tmp_path, models, config=config, settings=explicit(tmp_path, load=("m",))) as served:
        old.gate.close()
        split = asyncio.create_task(served.infer(infer("m", {"a": rows_of_floats(9)})))
        await asyncio.to_thread(old.gate.wait_entered, 1)
        models["m"] = new
        await load(served, "m")
        assert await answers(served)
        assert not split.done()
        old.gate.open()
        assert (await split).raw_output_contents[0] == rows_of_floats(9).tobytes()
        assert sum(rows for batch in old.batches for rows in batch) == 9
        await eventually_async(lambda: old.closed, "the old model closed")


async def check_failed_reload(served: Served, reason: str) -> None:
    """Version 1 of `m` serves as before, everybody is told so, and why it is still the old one."""
    code, text = await failure_of(load(served, "m"))
    assert code is Code.INVALID_ARGUMENT
    assert text.startswith("load failed for model 'm': ")
    assert reason in text
    assert await answers(served)
    assert await ready(served)
    assert await model_ready(served)
    (line,) = await index(served, ready=True)
    assert line[:3] == ("m", "1", "READY")
    assert line[3].startswith("the last load failed: ")
    assert reason in line[3]


async def test_reload_that_fails_keeps_the_old_versions_and_says_why(tmp_path: Path) -> None:
    models = {"m": echo_model()}
    async with serving(tmp_path, models, config=KNOWN_DIMS, settings=explicit(tmp_path, load=("m",))) as served:
        config = tmp_path / "m" / "config.pbtxt"
        good = config.read_text()
        config.write_text(good + " sequence_batching { }")
        await check_failed_reload(served, "sequence_batching is not supported by this build")
        config.write_text(good + " nonsense")
        await check_failed_reload(served, "config.pbtxt:")
        config.write_text('backend: "tensorrt"')
        await check_failed_reload(served, "expected one of identity, onnxruntime")
        config.write_text(good)
        (tmp_path / "m" / "1").rmdir()
        await check_failed_reload(served, "no version to load")
        (tmp_path / "m" / "1").mkdir()
        await load(served, "m")
        assert await index(served) == READY_M


async def test_reload_to_a_version_that_fails_shows_it_unavailable_beside_the_old_one(tmp_path: Path) -> None:
    async with serving(tmp_path, {"m": echo_model()}, settings=explicit(tmp_path, load=("m",))) as served:
        (tmp_path / "m" / "2").mkdir()
        (tmp_path / "m" / "config.pbtxt").write_text('backend: "memory" max_batch_size: 4 input { name: "z" }')
        code, _ = await failure_of(load(served, "m"))
        assert code is Code.INVALID_ARGUMENT
        one, two = await index(served)
        assert (one[:3], two[:3]) == (("m", "1", "READY"), ("m", "2", "UNAVAILABLE"))
        assert two[3]
        assert await ready(served)
        assert await failure_of(served.infer(ask(version="2"))) == (
            Code.UNAVAILABLE,
            f"model 'm' version 2 is not at ready state: {two[3]}",
        )
        assert not await model_ready(served, version="2")


async def test_load_that_fails_for_a_new_model_leaves_it_unavailable_and_the_next_one_mends_it(tmp_path: Path) -> None:
    models: dict[str, MemoryModel] = {}
    write_model(tmp_path, "m")
    models["other"] = echo_model()
    async with serving(tmp_path, models, settings=explicit(tmp_path)) as served:
        code, text = await failure_of(load(served, "m"))
        assert code is Code.INVALID_ARGUMENT
        reason = "no such model in memory, only ['other']"
        assert text == f"load failed for model 'm': {reason}"
        assert (await index(served))[0] == ("m", "1", "UNAVAILABLE", reason)
        assert not await ready(served)
        assert await failure_of(served.infer(ask())) == (Code.UNAVAILABLE, f"model 'm' is not ready: {reason}")
        models["m"] = echo_model()
        await load(served, "m")
        assert (await index(served))[0] == READY_M[0]
        assert await ready(served)


async def test_load_of_a_model_that_is_gone_fails_and_what_serves_goes_on(tmp_path: Path) -> None:
    async with serving(tmp_path, {"m": echo_model()}, settings=explicit(tmp_path, load=("m",))) as served:
        (tmp_path / "m").rename(tmp_path.parent / f"{tmp_path.name}-gone")
        expected = f"failed to load 'm', failed to poll from model repository: no model of that name in {tmp_path}"
        assert await failure_of(load(served, "m")) == (Code.NOT_FOUND, expected)
        assert await answers(served)
        assert await index(served) == READY_M
        await unload(served, "m")
        await all_left(served)
        assert await index(served) == []


async def test_load_of_a_model_that_never_was_leaves_no_trace(tmp_path: Path) -> None:
    async with serving(tmp_path, {"m": echo_model()}, settings=explicit(tmp_path, load=("m",))) as served:
        code, _ = await failure_of(load(served, "nobody"))
        assert code is Code.NOT_FOUND
        assert await index(served) == READY_M
        assert await ready(served)


async def test_load_of_a_name_in_two_repositories_is_refused_and_listed_once(tmp_path: Path) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    write_model(one, "m")
    write_model(two, "m")
    async with serving(one, {"m": echo_model()}, settings=explicit(one, two)) as served:
        rivals = ("m", "", "UNAVAILABLE", "model appears in two or more repositories")
        assert await index(served) == [rivals]
        assert await ready(served)
        assert await failure_of(load(served, "m")) == (
            Code.INVALID_ARGUMENT,
            f"load failed for model 'm': model appears in two or more repositories: {one}/m, {two}/m",
        )
        assert await index(served) == [rivals]
        (two / "m").rename(two / "n")
        await load(served, "m")
        assert await index(served, ready=True) == READY_M


async def test_loads_of_one_model_take_turns(tmp_path: Path) -> None:
    first, second = slow_model(), slow_model()
    models = {"m": first}
    async with serving(tmp_path, models, config=KNOWN_DIMS, settings=explicit(tmp_path)) as served:
        one = await loading(served, first)
        models["m"] = second
        two = asyncio.create_task(load(served, "m"))
        # The loop has seen the second load by the time that it has answered something sent later.
        assert await index(served) == [("m", "1", "LOADING", "")]
        assert second.gate.entered == 0
        first.gate.open()
        await one
        await asyncio.to_thread(second.gate.wait_entered, 1)
        assert await answers(served)
        second.gate.open()
        await two
        await eventually_async(lambda: first.closed, "the first model closed")
        assert not second.closed


async def test_loads_of_different_models_go_on_at_the_same_time(tmp_path: Path) -> None:
    models = {"a": slow_model(), "b": slow_model()}
    async with serving(tmp_path, models, config=KNOWN_DIMS, settings=explicit(tmp_path)) as served:
        tasks = [await loading(served, model, name) for name, model in models.items()]
        for model in models.values():
            model.gate.open()
        await asyncio.gather(*tasks)
        assert [line[2] for line in await index(served)] == ["READY", "READY"]


async def test_load_whose_caller_gives_up_goes_on(tmp_path: Path) -> None:
    model = slow_model()
    async with serving(tmp_path, {"m": model}, config=KNOWN_DIMS, settings=explicit(tmp_path)) as served:
        task = await loading(served, model)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await index(served) == [("m", "1", "LOADING", "")]
        model.gate.open()
        await eventually_async(lambda: served.server.repository.models, "the model serving")
        assert await answers(served)


async def test_load_is_tried_again_as_often_as_configured(tmp_path: Path) -> None:
    class Flaky(MemoryModel):
        failures = 2

        def instance(self, *args: Any) -> Any:
            if self.failures:
                self.failures -= 1
                raise LoadError("not this time")
            return super().instance(*args)

    models: dict[str, MemoryModel] = {"m": Flaky(echo_model().spec)}
    async with serving(tmp_path, models, settings=explicit(tmp_path, model_load_retry_count=1)) as served:
        code, text = await failure_of(load(served, "m"))
        assert (code, text) == (Code.INVALID_ARGUMENT, "load failed for model 'm': not this time")
        models["m"] = Flaky(echo_model().spec)
        models["m"].failures = 1  # type: ignore[attr-defined]
        await load(served, "m")
        assert await answers(served)


# Unload


async def test_unload_refuses_new_requests_and_answers_those_that_are_there(tmp_path: Path) -> None:
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
            "model 'm' has no available versions: it was unloaded",
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


async def test_unload_forgets_what_was_counted_and_load_brings_it_back_from_zero(tmp_path: Path) -> None:
    async with serving(tmp_path, {"m": echo_model()}, settings=explicit(tmp_path, load=("m",))) as served:
        assert await answers(served)
        assert await served.metric("nv_inference_count") == 1
        await unload(served, "m")
        await all_left(served)
        assert not [name for name in await served.metrics() if 'model="m"' in name]
        await load(served, "m")
        assert await served.metric("nv_inference_count") == 0


async def test_load_after_unload_serves_while_the_unloaded_one_still_executes(tmp_path: Path) -> None:
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
    async with serving(tmp_path, {"m": model}, config=KNOWN_DIMS, settings=explicit(tmp_path)) as served:
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


async def test_unload_of_a_model_that_failed_makes_the_server_ready(tmp_path: Path) -> None:
    write_model(tmp_path, "m", "sequence_batching { }")
    async with serving(tmp_path, settings=explicit(tmp_path, load=("m",))) as served:
        assert not await ready(served)
        await unload(served, "m")
        assert await ready(served)
        assert await index(served) == [("m", "", "UNAVAILABLE", "unloaded")]


@pytest.mark.parametrize("name", ["nobody", "never"])
async def test_unload_of_what_is_not_loaded_is_fine_and_changes_nothing(tmp_path: Path, name: str) -> None:
    models = {"m": echo_model(), "never": echo_model()}
    async with serving(tmp_path, models, settings=explicit(tmp_path, load=("m",))) as served:
        before = await index(served)
        await unload(served, name)
        assert await index(served) == before
        assert await answers(served)


async def test_unload_twice_is_fine(tmp_path: Path) -> None:
    async with serving(tmp_path, {"m": echo_model()}, settings=explicit(tmp_path, load=("m",))) as served:
        await unload(served, "m")
        await unload(served, "m")
        await all_left(served)
        assert await index(served) == [("m", "1", "UNAVAILABLE", "unloaded")]


async def test_unload_with_dependents_is_taken_and_other_parameters_are_not(tmp_path: Path) -> None:
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


# What comes along with a load


async def test_config_override_holds_for_this_load_and_the_next_reads_the_disk(tmp_path: Path) -> None:
    config = "max_batch_size: 4"
    async with serving(tmp_path, {"m": echo_model()}, config=config, settings=explicit(tmp_path)) as served:
        await load(served, "m", config=json.dumps({"backend": "memory", "max_batch_size": 2}))
        three = infer("m", {"a": rows_of_floats(3)})
        code, text = await failure_of(served.infer(three))
        assert (code, "2" in text) == (Code.INVALID_ARGUMENT, True)
        await load(served, "m")
        assert (await served.infer(three)).raw_output_contents[0] == rows_of_floats(3).tobytes()


async def test_config_override_picks_the_versions(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "m")
    (folder / "2").mkdir()
    config = json.dumps({"name": "m", "backend": "memory", "version_policy": {"specific": {"versions": [1]}}})
    async with serving(tmp_path, {"m": echo_model()}, settings=explicit(tmp_path)) as served:
        await load(served, "m", config=config)
        assert await index(served) == READY_M


IDENTITY = json.dumps(
    {
        "backend": "identity",
        "maxBatchSize": 8,
        "input": [{"name": "a", "dataType": "TYPE_FP32", "dims": ["2"]}],
        "output": [{"name": "x", "dataType": "TYPE_FP32", "dims": ["2"]}],
    }
)


async def test_file_override_is_all_that_the_model_consists_of_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    write_model(tmp_path / "repository", "m")
    async with serving(tmp_path / "repository", settings=explicit(tmp_path / "repository")) as served:
        await load(served, "m", config=IDENTITY, **{"file:7/model.onnx": b"whatever"})
        assert await index(served) == [("m", "7", "READY", "")]
        assert await answers(served)
        await load(served, "brandnew", config=IDENTITY, **{"file:1/model.onnx": b""})
        assert await answers(served, "brandnew")
        code, _ = await failure_of(load(served, "m", config=IDENTITY, **{"file:notes/readme": b"no version"}))
        assert code is Code.INVALID_ARGUMENT
        assert list(scratch.iterdir()) == []
        assert await failure_of(load(served, "brandnew"))
        assert await answers(served, "brandnew")


BAD_LOADS: list[tuple[str, dict[str, object], str]] = [
    ("", {}, "model name cannot be empty"),
    ("..", {}, "model name must not contain path traversal characters"),
    (".", {}, "model name must not contain path traversal characters"),
    ("../outside", {}, "model name must not contain path traversal characters"),
    ("/etc", {}, "model name must not contain path traversal characters"),
    ("m/1", {}, "model name must not contain path traversal characters"),
    ("a\\b", {}, "model name must not contain path traversal characters"),
    ("m", {"config": b"{}"}, "invalid value type for load parameter 'config', expected string_param, got bytes_param"),
    ("m", {"config": True}, "invalid value type for load parameter 'config', expected string_param, got bool_param"),
    ("m", {"config": "{"}, "load parameter 'config': expected a ModelConfig as JSON"),
    ("m", {"config": ""}, "load parameter 'config': expected a ModelConfig as JSON"),
    ("m", {"config": "[" * 100_000}, "load parameter 'config': expected a ModelConfig as JSON"),
    ("m", {"config": '{"max_batchsize": 3}'}, "max_batchsize"),
    ("m", {"config": '{"max_batch_size": "many"}'}, "load parameter 'config': expected a ModelConfig as JSON"),
    ("m", {"config": '{"name": "other"}'}, "name: expected 'm', the name of its folder, got 'other'"),
    ("m", {"config": '{"backend": "memory", "sequence_batching": {}}'}, "sequence_batching is not supported"),
    ("m", {"force": True}, "unrecognized load parameter 'force'"),
    ("m", {"file:1/model.onnx": b""}, "load parameter 'config': expected one beside 'file:...', got none"),
    (
        "m",
        {"config": IDENTITY, "file:1/model.onnx": "text"},
        "invalid value type for load parameter 'file:1/model.onnx', expected bytes_param, got string_param",
    ),
    ("m", {"config": IDENTITY, "file:../1/model.onnx": b""}, "expected a path inside the model's folder"),
    ("m", {"config": IDENTITY, "file:1/../../x": b""}, "expected a path inside the model's folder"),
    ("m", {"config": IDENTITY, "file:/tmp/x": b""}, "expected a path inside the model's folder"),
    ("m", {"config": IDENTITY, "file:": b""}, "expected a path inside the model's folder"),
    ("m", {"config": IDENTITY, "file:.": b""}, "expected a path inside the model's folder"),
    ("m", {"config": IDENTITY, "file:1\0/model.onnx": b""}, "expected a path inside the model's folder"),
    ("m", {"config": IDENTITY, "file:1": b"", "file:1/model.onnx": b""}, "another file has its place"),
    ("m", {"config": IDENTITY, "file:1//x": b"", "file:1/x": b""}, "expected each file once, got '1/x' twice"),
    ("m", {"config": IDENTITY, f"file:1/{'x' * 300}": b""}, "File name too long"),
]


@pytest.mark.parametrize(("name", "parameters", "text"), BAD_LOADS, ids=lambda value: str(value)[:40])
async def test_load_of_a_bad_request_is_refused_and_what_serves_goes_on(
    tmp_path: Path, name: str, parameters: dict[str, object], text: str
) -> None:
    write_model(tmp_path, "outside")
    repository = tmp_path / "repository"
    async with serving(repository, {"m": echo_model()}, settings=explicit(repository, load=("m",))) as served:
        code, details = await failure_of(load(served, name, **parameters))
        assert code is Code.INVALID_ARGUMENT
        assert text in details
        assert await answers(served)
        assert [line[:3] for line in await index(served)] == [("m", "1", "READY")]
        assert await ready(served)
        await load(served, "m")
        assert await index(served) == READY_M


async def test_requests_that_name_a_repository_are_unimplemented(tmp_path: Path) -> None:
    async with serving(tmp_path, {"m": echo_model()}, settings=explicit(tmp_path)) as served:
        load_one = load_request("m")
        load_one.repository_name = "one"
        for call in (
            served.stub.RepositoryModelLoad(load_one),
            served.stub.RepositoryModelUnload(pb.RepositoryModelUnloadRequest(repository_name="one", model_name="m")),
            served.stub.RepositoryIndex(pb.RepositoryIndexRequest(repository_name="one")),
        ):
            assert await failure_of(call) == (
                Code.UNIMPLEMENTED,
                "'repository_name' specification is not supported: expected none, got 'one'",
            )


async def test_index_of_repositories_that_cannot_be_read_is_of_what_is_known(tmp_path: Path) -> None:
    repository = tmp_path / "repository"
    async with serving(repository, {"m": echo_model()}, settings=explicit(repository, load=("m",))) as served:
        repository.rename(tmp_path / "elsewhere")
        assert await index(served) == READY_M
        code, text = await failure_of(load(served, "m"))
        assert (code, text.startswith("failed to load 'm', failed to poll from model repository: ")) == (
            Code.UNAVAILABLE,
            True,
        )
        assert await answers(served)
        assert await index(served) == READY_M


# Readiness


async def test_health_follows_loads_and_unloads(tmp_path: Path) -> None:
    model = slow_model()
    async with serving(tmp_path, {"m": model}, config=KNOWN_DIMS, settings=explicit(tmp_path)) as served:
        watch = health_pb2_grpc.HealthStub(served.channel).Watch(health_pb2.HealthCheckRequest())
        statuses = [(await watch.read()).status]
        task = await loading(served, model)
        statuses.append((await watch.read()).status)
        model.gate.open()
        await task
        statuses.append((await watch.read()).status)
        watch.cancel()
    serving_, not_serving = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    assert statuses == [serving_, not_serving, serving_]


async def test_readiness_that_is_not_strict_does_not_ask_for_models(tmp_path: Path) -> None:
    write_model(tmp_path, "bad", "sequence_batching { }")
    settings = Settings(paths=(tmp_path,), strict_readiness=False)
    async with serving(tmp_path, {"m": echo_model()}, settings=settings) as served:
        assert await ready(served)
        assert not await model_ready(served, "bad")
        answer = await health_pb2_grpc.HealthStub(served.channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


# The end


async def test_stop_during_a_load_does_not_wait_for_it_and_closes_what_it_brings(tmp_path: Path) -> None:
    model = slow_model()
    async with serving(tmp_path, {"m": model}, config=KNOWN_DIMS, settings=explicit(tmp_path)) as served:
        task = await loading(served, model)
        assert not await served.server.stop(5)
        assert await failure_of(task) == (Code.UNAVAILABLE, "the server is stopping")
        model.gate.open()
        await eventually_async(lambda: model.closed, "what the load brought closed")
        assert model.open_instances == 0


async def test_stop_waits_for_what_an_unloaded_model_still_executes(tmp_path: Path) -> None:
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


async def test_stop_that_runs_out_of_time_gives_up_on_an_unloaded_model_without_closing_what_executes(
    tmp_path: Path,
) -> None:
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
