"""Hanging instances: how they are replaced, and what happens if that fails, or on an unload or reload meanwhile."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path

import grpc
import numpy as np
import pytest

from paceline.backends.base import Device
from paceline.backends.errors import LoadError
from paceline.backends.spec import ModelSpec
from paceline.protos import inference_pb2 as pb
from paceline.server.config import Settings
from tests import models, odd_models
from tests.harness import touch
from tests.integration.controlling import explicit, load, unload
from tests.integration.serving import echo_model, failure_of, serving
from tests.memory_models import MemoryInstance, MemoryModel
from tests.polling import eventually_async
from tests.wire import infer, rows_of_floats

ONE = infer("m", {"a": rows_of_floats(1)})
LIMITED = 'max_batch_size: 4 parameters { key: "paceline.execution_timeout_ms" value { string_value: "200" } }'


class Scarce(MemoryModel):
    """A model that can create only `spare` more instances: at first one."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.spare = 1

    def instance(self, spec: ModelSpec, device: Device) -> MemoryInstance:
        if not self.spare:
            raise LoadError("no room for another")
        self.spare -= 1
        return super().instance(spec, device)


async def test_failed_replacement_of_a_hanging_instance_is_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = Scarce(echo_model().spec)
    with caplog.at_level(logging.WARNING, "paceline.server.instances"):
        async with serving(tmp_path, {"m": model}, config=LIMITED) as served:
            model.gate.close()
            assert (await failure_of(served.infer(ONE)))[0] is grpc.StatusCode.INTERNAL
            await eventually_async(lambda: "no room for another" in caplog.text, "a first attempt")
            assert not served.server.repository.ready
            model.gate.open()
            model.spare = 1
            assert (await served.infer(ONE)).raw_output_contents[0] == ONE.raw_input_contents[0]
            assert served.server.repository.ready
    assert model.closed
    assert model.open_instances == 0


async def test_hang_between_operators_of_an_onnx_model_is_ended_and_leaves_nothing_behind(tmp_path: Path) -> None:
    path = models.write(odd_models.endless(), tmp_path / "m" / "1" / "model.onnx")
    (path.parents[1] / "config.pbtxt").write_text(LIMITED)
    async with serving(tmp_path) as served:

        def counting_to(number: float) -> pb.ModelInferRequest:
            return infer("m", {"INPUT0": np.full((1, 1), number, np.float32)})

        assert (await served.infer(counting_to(3))).raw_output_contents[0] == np.float32(3).tobytes()
        assert (await failure_of(served.infer(counting_to(1e12))))[0] is grpc.StatusCode.INTERNAL
        assert (await served.infer(counting_to(4))).raw_output_contents[0] == np.float32(4).tobytes()
        assert await served.metric("paceline_hung_executions", 'model="m",version="1"') == 1
        await eventually_async(lambda: not served.server.repository.hangs, "the end of what hung")


class Loading(MemoryModel):
    """A model of which all instances but the first load until it is abandoned."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.first = True
        self.loading, self.abandoned = threading.Event(), threading.Event()

    def instance(self, spec: ModelSpec, device: Device) -> MemoryInstance:
        if not self.first:
            self.loading.set()
            self.abandoned.wait(20)
            raise LoadError("abandoned")
        self.first = False
        return super().instance(spec, device)

    def abandon(self) -> None:
        self.abandoned.set()


async def test_model_unloaded_while_an_instance_is_replaced_is_abandoned(tmp_path: Path) -> None:
    model = Loading(echo_model().spec)
    async with serving(tmp_path, {"m": model}, config=LIMITED) as served:
        model.gate.close()
        assert (await failure_of(served.infer(ONE)))[0] is grpc.StatusCode.INTERNAL
        await eventually_async(model.loading.is_set, "another one loads")
        assert not model.abandoned.is_set()
        model.gate.open()
    assert model.abandoned.is_set()
    await eventually_async(lambda: model.closed, "the model closed")


@pytest.mark.usefixtures("without_minimum_execution_limit")
async def test_replacement_instance_that_hangs_is_given_up_and_another_is_tried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = echo_model("FP32", 2)
    with caplog.at_level(logging.WARNING, "paceline.server.instances"):
        async with serving(tmp_path, {"m": model}, config=LIMITED) as served:
            model.gate.close()
            assert (await failure_of(served.infer(ONE)))[0] is grpc.StatusCode.INTERNAL
            await eventually_async(
                lambda: "replacing an instance failed: a trial or warm-up execution" in caplog.text, "a try"
            )
            assert not served.server.repository.ready
            model.gate.open()
            assert (await served.infer(ONE)).raw_output_contents[0] == ONE.raw_input_contents[0]
            await eventually_async(lambda: model.open_instances == 1, "those that hung closed")
    assert model.closed
    assert model.open_instances == 0


@pytest.mark.usefixtures("without_minimum_execution_limit")
async def test_replacement_is_no_longer_tried_once_too_many_instances_hang(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.server.models.model_instances._MAX_HANGING", 1)
    model = echo_model("FP32", 2)
    with caplog.at_level(logging.WARNING, "paceline.server.instances"):
        async with serving(tmp_path, {"m": model}, config=LIMITED, settings=explicit(tmp_path, load=("m",))) as served:
            model.gate.close()
            assert (await failure_of(served.infer(ONE)))[0] is grpc.StatusCode.INTERNAL
            await eventually_async(lambda: "2 instances hang, so no more are started" in caplog.text, "no more tries")
            await unload(served, "m")
            assert not model.closed
            model.gate.open()
            await eventually_async(lambda: model.closed, "those that hung closed, and then the model")
            assert model.open_instances == 0


async def test_reload_during_a_hang_serves_the_new_model(
    tmp_path: Path,
) -> None:
    old, new = echo_model(), echo_model()
    models = {"m": old}
    async with serving(tmp_path, models, config=LIMITED, settings=explicit(tmp_path, load=("m",))) as served:
        old.gate.close()
        hung = asyncio.create_task(failure_of(served.infer(ONE)))
        await asyncio.to_thread(old.gate.wait_entered, 1)
        models["m"] = new
        touch(tmp_path / "m")
        await load(served, "m")
        assert (await served.infer(ONE)).raw_output_contents[0] == ONE.raw_input_contents[0]
        assert (await hung)[0] is grpc.StatusCode.INTERNAL
        assert served.server.repository.ready
        assert not old.closed
        old.gate.open()
        await eventually_async(lambda: old.closed, "what hung given back, and then the model")
        assert old.open_instances == 0
    assert new.open_instances == 0


async def test_load_of_a_model_without_instances_loads_it_again(tmp_path: Path) -> None:
    old, new = Scarce(echo_model().spec), echo_model()
    models: dict[str, MemoryModel] = {"m": old}
    async with serving(tmp_path, models, config=LIMITED, settings=explicit(tmp_path, load=("m",))) as served:
        old.gate.close()
        assert (await failure_of(served.infer(ONE)))[0] is grpc.StatusCode.INTERNAL
        models["m"] = new
        await load(served, "m")
        assert (await served.infer(ONE)).raw_output_contents[0] == ONE.raw_input_contents[0]
        old.gate.open()
        await eventually_async(lambda: old.closed, "what hung given back, and then the model")


@pytest.mark.usefixtures("without_minimum_execution_limit")
async def test_model_that_hangs_while_it_is_loaded_fails_alone(tmp_path: Path) -> None:
    models = {"m": echo_model(), "stuck": echo_model("FP32", 2)}
    models["stuck"].gate.close()
    settings = Settings(paths=(tmp_path,), strict_readiness=False)
    async with serving(tmp_path, models, config=LIMITED, settings=settings) as served:
        assert (await served.infer(ONE)).raw_output_contents[0] == ONE.raw_input_contents[0]
        code, text = await failure_of(served.infer(infer("stuck", {"a": rows_of_floats(1)})))
        assert (code, "warm-up execution took longer than its limit: 0.2 s" in text) == (
            grpc.StatusCode.UNAVAILABLE,
            True,
        ), text
        assert served.server.repository.hangs, "which is still under way"
        models["stuck"].gate.open()
        await eventually_async(lambda: models["stuck"].closed, "what hung closed")
        assert not models["m"].closed
