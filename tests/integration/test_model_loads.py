"""Models loaded by RPC: what serves during and after a load, and what a failed load leaves behind."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc

from paceline.backends.errors import LoadError
from paceline.protos import inference_pb2 as pb
from tests.harness import touch
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
from tests.integration.serving import Served, echo_model, failure_of, serving, write_model
from tests.memory_models import MemoryModel
from tests.polling import eventually_async
from tests.wire import infer, rows_of_floats

Code = grpc.StatusCode


async def test_load_returns_when_the_model_serves(tmp_path: Path) -> None:
    model = slow_model()
    async with serving(tmp_path, {"m": model}, config=WARMED_UP_CONFIG, settings=explicit(tmp_path)) as served:
        task = await loading(served, model)
        assert await index(served) == [("m", "1", "LOADING", "")]
        assert not await model_ready(served)
        assert not await ready(served)
        assert await failure_of(served.infer(ask())) == (
            Code.UNAVAILABLE,
            "Request for unknown model: 'm' is not ready: LOADING",
        )
        assert not task.done()
        model.gate.open()
        await task
        assert await index(served) == READY_M
        assert await answers(served)
        assert await ready(served)


async def test_load_finds_a_model_added_after_the_start(tmp_path: Path) -> None:
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


async def test_load_applies_the_version_policy_to_versions_added_since(tmp_path: Path) -> None:
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
        assert (code, text) == (
            Code.NOT_FOUND,
            "Request for unknown model: 'm' version 1 is not found; versions served: ['2', '10']",
        )


async def test_reload_serves_the_old_model_until_the_new_is_warm(tmp_path: Path) -> None:
    old, new = echo_model(), slow_model()
    models = {"m": old}
    config = "max_batch_size: 8 " + WARMED_UP_CONFIG
    async with serving(tmp_path, models, config=config, settings=explicit(tmp_path, load=("m",))) as served:
        models["m"] = new
        touch(tmp_path / "m")
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


async def test_reload_answers_requests_executing_and_queued_in_the_old_model(tmp_path: Path) -> None:
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
        touch(tmp_path / "m")
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
        # Statistics are those of the new model alone; metrics continue with the counts of both.
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
        touch(tmp_path / "m")
        await load(served, "m")
        assert await answers(served)
        assert not split.done()
        old.gate.open()
        assert (await split).raw_output_contents[0] == rows_of_floats(9).tobytes()
        assert sum(rows for batch in old.batches for rows in batch) == 9
        await eventually_async(lambda: old.closed, "the old model closed")


async def check_failed_reload(served: Served, reason: str) -> None:
    """Assert that a load of `m` fails for `reason`, that version 1 serves as before, and that the index says why."""
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


async def test_failed_reload_keeps_the_old_version_and_says_why(tmp_path: Path) -> None:
    models = {"m": echo_model()}
    async with serving(tmp_path, models, config=WARMED_UP_CONFIG, settings=explicit(tmp_path, load=("m",))) as served:
        config = tmp_path / "m" / "config.pbtxt"
        good = config.read_text()
        config.write_text(good + " instance_group { passive: true }")
        await check_failed_reload(served, "instance_group.passive is not supported by this build")
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


async def test_reload_lists_a_version_that_fails_as_unavailable_beside_the_old_one(tmp_path: Path) -> None:
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
            f"Request for unknown model: 'm' version 2 is not at ready state: {two[3]}",
        )
        assert not await model_ready(served, version="2")


async def test_failed_load_of_a_new_model_leaves_it_unavailable_until_a_load_succeeds(tmp_path: Path) -> None:
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
        assert await failure_of(served.infer(ask())) == (
            Code.UNAVAILABLE,
            f"Request for unknown model: 'm' is not ready: {reason}",
        )
        models["m"] = echo_model()
        await load(served, "m")
        assert (await index(served))[0] == READY_M[0]
        assert await ready(served)


async def test_load_of_a_removed_model_fails_and_the_loaded_one_keeps_serving(tmp_path: Path) -> None:
    async with serving(tmp_path, {"m": echo_model()}, settings=explicit(tmp_path, load=("m",))) as served:
        (tmp_path / "m").rename(tmp_path.parent / f"{tmp_path.name}-gone")
        expected = f"failed to load 'm', failed to poll from model repository: no model of that name in {tmp_path}"
        assert await failure_of(load(served, "m")) == (Code.NOT_FOUND, expected)
        assert await answers(served)
        assert await index(served) == READY_M
        await unload(served, "m")
        await all_left(served)
        assert await index(served) == []


async def test_load_of_an_unknown_model_leaves_no_trace(tmp_path: Path) -> None:
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


async def test_loads_of_the_same_model_run_in_turn(tmp_path: Path) -> None:
    first, second = slow_model(), slow_model()
    models = {"m": first}
    async with serving(tmp_path, models, config=WARMED_UP_CONFIG, settings=explicit(tmp_path)) as served:
        one = await loading(served, first)
        models["m"] = second
        touch(tmp_path / "m")
        two = asyncio.create_task(load(served, "m"))
        # The event loop has seen the second load once it has answered a request sent after it.
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


async def test_loads_of_different_models_run_at_the_same_time(tmp_path: Path) -> None:
    models = {"a": slow_model(), "b": slow_model()}
    async with serving(tmp_path, models, config=WARMED_UP_CONFIG, settings=explicit(tmp_path)) as served:
        tasks = [await loading(served, model, name) for name, model in models.items()]
        for model in models.values():
            model.gate.open()
        await asyncio.gather(*tasks)
        assert [line[2] for line in await index(served)] == ["READY", "READY"]


async def test_load_continues_after_its_caller_gives_up(tmp_path: Path) -> None:
    model = slow_model()
    async with serving(tmp_path, {"m": model}, config=WARMED_UP_CONFIG, settings=explicit(tmp_path)) as served:
        task = await loading(served, model)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert await index(served) == [("m", "1", "LOADING", "")]
        model.gate.open()
        await eventually_async(lambda: served.server.repository.models, "the model serving")
        assert await answers(served)


async def test_load_is_retried_as_often_as_configured(tmp_path: Path) -> None:
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
