"""Instances that hang: what becomes of their models when these are replaced, unloaded, or can't be had anew."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path

import grpc
import numpy as np
import pytest

from backends.base import Device, ModelSpec
from backends.errors import LoadError
from backends.memory import MemoryInstance, MemoryModel
from protos import inference_pb2 as pb
from server.config import Settings
from tests import models
from tests.integration.controlling import explicit, load, unload
from tests.integration.serving import echo_model, failure_of, serving
from tests.polling import eventually_async
from tests.wire import infer, rows_of_floats

pytestmark = pytest.mark.usefixtures("impatient")

ONE = infer("m", {"a": rows_of_floats(1)})
LIMITED = 'max_batch_size: 4 parameters { key: "paceline.execution_timeout_ms" value { string_value: "200" } }'


class Scarce(MemoryModel):
    """A model of which no second instance can be had, until `spare` says so."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.spare = 1

    def instance(self, spec: ModelSpec, device: Device) -> MemoryInstance:
        if not self.spare:
            raise LoadError("no room for another")
        self.spare -= 1
        return super().instance(spec, device)


async def test_hang_whose_instance_cannot_be_had_anew_is_tried_again(
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


async def test_hang_between_operators_of_an_onnx_model_is_ended_and_nothing_of_it_stays(tmp_path: Path) -> None:
    path = models.write(models.endless(), tmp_path / "m" / "1" / "model.onnx")
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
    """All instances but the first load until the model is abandoned."""

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


async def test_model_that_is_unloaded_while_an_instance_is_replaced_is_abandoned(tmp_path: Path) -> None:
    model = Loading(echo_model().spec)
    async with serving(tmp_path, {"m": model}, config=LIMITED) as served:
        model.gate.close()
        assert (await failure_of(served.infer(ONE)))[0] is grpc.StatusCode.INTERNAL
        await eventually_async(model.loading.is_set, "another one loads")
        assert not model.abandoned.is_set()
        model.gate.open()
    assert model.abandoned.is_set()
    await eventually_async(lambda: model.closed, "the model closed")


async def test_hang_in_what_was_to_replace_an_instance_is_given_up_and_it_is_tried_again(
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


async def test_hangs_in_what_was_to_replace_an_instance_are_tried_no_more_where_there_are_many(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("server.models.instances._MAX_HANGING", 1)
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


async def test_reload_while_an_instance_hangs_serves_the_new_and_gives_back_the_old_when_it_ends(
    tmp_path: Path,
) -> None:
    old, new = echo_model(), echo_model()
    models = {"m": old}
    async with serving(tmp_path, models, config=LIMITED, settings=explicit(tmp_path, load=("m",))) as served:
        old.gate.close()
        hung = asyncio.create_task(failure_of(served.infer(ONE)))
        await asyncio.to_thread(old.gate.wait_entered, 1)
        models["m"] = new
        await load(served, "m")
        assert (await served.infer(ONE)).raw_output_contents[0] == ONE.raw_input_contents[0]
        assert (await hung)[0] is grpc.StatusCode.INTERNAL
        assert served.server.repository.ready
        assert not old.closed
        old.gate.open()
        await eventually_async(lambda: old.closed, "what hung given back, and then the model")
        assert old.open_instances == 0
    assert new.open_instances == 0


async def test_model_that_hangs_before_it_is_ready_fails_alone(tmp_path: Path) -> None:
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
        assert served.server.repository.loads, "which is still under way"
        models["stuck"].gate.open()
        await eventually_async(lambda: models["stuck"].closed, "what hung closed")
        assert not models["m"].closed
