"""Instances whose device is lost: which answers requests get, what health reports, and how the model recovers."""

from __future__ import annotations

import asyncio
import logging
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.backends.base import Device
from paceline.backends.errors import (
    DeviceLost,
    InstanceLost,
    LoadError,
    OutOfMemory,
    ProcessEndedBeforeBatch,
    StalePlan,
)
from paceline.backends.spec import ModelSpec
from tests.integration.probing import probe
from tests.integration.serving import Served, echo_model, failure_of, serving, write_model
from tests.memory_models import MemoryInstance, MemoryModel
from tests.polling import eventually_async
from tests.rlimits import without_threads
from tests.wire import infer, rows_of_floats

ONE = infer("m", {"a": rows_of_floats(1)})
BATCHED = "max_batch_size: 4"
BROKEN = DeviceLost("onnx runtime error 1: CUDA failure 700: an illegal memory access was encountered ; GPU=0")
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class ModelOnBrokenDevice(MemoryModel):
    """A model that can't create instances while its device is `broken`."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.broken = False

    def instance(self, spec: ModelSpec, device: Device) -> MemoryInstance:
        if self.broken:
            raise LoadError("onnxruntime couldn't use GPU 0")
        return super().instance(spec, device)


async def health(served: Served, service: str = "") -> int:
    stub: Any = health_pb2_grpc.HealthStub(served.channel)
    return int((await stub.Check(health_pb2.HealthCheckRequest(service=service))).status)


async def test_lost_instance_fails_its_batch_and_the_next_request_waits_for_its_replacement(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = echo_model()
    with caplog.at_level(logging.WARNING, "paceline.server.instances"):
        async with serving(tmp_path, {"m": model}, config=BATCHED) as served:
            model.faults.raise_next(BROKEN)
            assert await failure_of(served.infer(ONE)) == (grpc.StatusCode.INTERNAL, f"model 'm': {BROKEN}")
            assert (await served.infer(ONE)).raw_output_contents[0] == ONE.raw_input_contents[0]
            assert await served.metric("paceline_lost_instances") == 1
            assert served.server.repository.ready
    assert [record.getMessage() for record in caplog.records if record.name.endswith("instances")] == [
        f"model 'm' version 1: an instance is lost: {BROKEN}; instances left: 0",
        "model 'm' version 1: an instance has been replaced",
    ]


async def test_lost_batch_is_not_run_again_since_its_tensors_may_have_broken_the_device(tmp_path: Path) -> None:
    model = echo_model()
    delay = "dynamic_batching { max_queue_delay_microseconds: 60000000 }"
    config = f"{BATCHED} {delay} instance_group {{ count: 2 kind: KIND_CPU }}"
    async with serving(tmp_path, {"m": model}, config=config) as served:
        model.faults.raise_next(BROKEN)
        failures = await asyncio.gather(*(failure_of(served.infer(ONE)) for _ in range(4)))
        assert failures == [(grpc.StatusCode.INTERNAL, f"model 'm': {BROKEN}")] * 4
        assert model.batches == [(1, 1, 1, 1)]
        assert served.server.repository.ready


@pytest.mark.parametrize(
    "error", [StalePlan("outdated"), ProcessEndedBeforeBatch("gone")], ids=lambda e: type(e).__name__
)
async def test_batch_that_its_lost_instance_did_not_begin_runs_whole_on_another(
    tmp_path: Path, error: InstanceLost
) -> None:
    model = echo_model()
    delay = "dynamic_batching { max_queue_delay_microseconds: 60000000 }"
    config = f"{BATCHED} {delay} instance_group {{ count: 2 kind: KIND_CPU }}"
    async with serving(tmp_path, {"m": model}, config=config) as served:
        model.faults.raise_next(error)
        for answer in await asyncio.gather(*(served.infer(ONE) for _ in range(4))):
            assert answer.raw_output_contents[0] == ONE.raw_input_contents[0]
        assert model.batches == [(1, 1, 1, 1)] * 2


async def test_lost_device_is_neither_ready_nor_live_until_back(tmp_path: Path, frontends: int) -> None:
    model = ModelOnBrokenDevice(echo_model().spec)
    async with serving(tmp_path, {"m": model}, config=BATCHED) as served:
        model.gate.close()
        first = asyncio.create_task(failure_of(served.infer(ONE)))
        await asyncio.to_thread(model.gate.wait_entered, 1)
        waiting = asyncio.create_task(failure_of(served.infer(ONE)))
        await eventually_async(lambda: served.waiting("m") == 1, "one that waits")
        model.faults.raise_next(BROKEN)
        model.broken = True
        assert await health(served, "liveness") == SERVING
        model.gate.open()
        gone = (
            grpc.StatusCode.UNAVAILABLE,
            "model 'm': no instance of the model is left; the server keeps trying to start another",
        )
        assert (await first)[0] is grpc.StatusCode.INTERNAL
        assert await waiting == gone
        assert await failure_of(served.infer(ONE)) == gone
        assert await probe(served, "/readyz") == (503, "models have no instance left: 'm'\n")
        assert await probe(served, "/livez") == (503, f"model 'm': {BROKEN}\n")
        while (await health(served), await health(served, "liveness")) != (NOT_SERVING, NOT_SERVING):
            await asyncio.sleep(0.01)
        model.broken = False
        await eventually_async(lambda: served.server.repository.ready, "an instance again")
        assert (await served.infer(ONE)).raw_output_contents[0] == ONE.raw_input_contents[0]
        assert await probe(served, "/livez") == (200, "ok\n")
        while (await health(served), await health(served, "liveness")) != (SERVING, SERVING):
            await asyncio.sleep(0.01)
        drops = await served.metrics()
        assert drops['paceline_dropped_requests{model="m",reason="no_instance",version="1"}'] == 2


async def test_model_whose_device_is_lost_can_be_stopped_with_its_instance_still_open(tmp_path: Path) -> None:
    model = ModelOnBrokenDevice(echo_model().spec)
    async with serving(tmp_path, {"m": model}, config=BATCHED) as served:
        model.faults.raise_next(BROKEN)
        model.broken = True
        await failure_of(served.infer(ONE))
        await eventually_async(lambda: not served.server.repository.ready, "a model that can't")
        assert served.server.repository.hangs
    assert model.open_instances == 1
    assert not model.closed


SAMPLE = """max_batch_size: 4 model_warmup { name: "s" batch_size: 2 inputs { key: "a" value {
    data_type: TYPE_FP32 dims: [ 1 ] input_data_file: "a" } } }"""


def write_sampled(repository: Path) -> Path:
    """A model with a sample for its warm-up; returns the folder with the sample's file."""
    folder = write_model(repository, "m", SAMPLE) / "warmup"
    folder.mkdir()
    (folder / "a").write_bytes(np.float32([7]).tobytes())
    return folder


async def test_replacement_of_a_lost_instance_is_warmed_up_with_the_samples_read_at_load(
    tmp_path: Path,
) -> None:
    folder, model = write_sampled(tmp_path), echo_model()
    async with serving(tmp_path, {"m": model}) as served:
        assert model.batches == [(1, 1)]
        shutil.rmtree(folder)
        model.faults.raise_next(BROKEN)
        await failure_of(served.infer(ONE))
        assert (await served.infer(ONE)).raw_output_contents[0] == ONE.raw_input_contents[0]
        assert model.batches == [(1, 1), (1,), (1, 1), (1,)]


async def test_replacement_that_is_lost_over_its_sample_is_closed_and_another_is_tried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_sampled(tmp_path)
    model = echo_model()
    async with serving(tmp_path, {"m": model}) as served:
        model.faults.raise_next(BROKEN, times=2)
        await failure_of(served.infer(ONE))
        await eventually_async(lambda: model.batches[3:] == [(1, 1)], "a sample of the next attempt")
        await eventually_async(lambda: served.server.repository.models[0].instances.can_execute, "an instance again")
        assert (await served.infer(ONE)).raw_output_contents[0] == ONE.raw_input_contents[0]
        assert model.open_instances == 2  # the lost one, and the one that executes
    assert f"model 'm': replacing an instance failed: failed to run warmup sample 's': {BROKEN}" in caplog.messages


async def test_replacement_that_fails_its_sample_serves_without_warm_up(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_sampled(tmp_path)
    model = echo_model()
    async with serving(tmp_path, {"m": model}) as served:
        model.faults.raise_next(BROKEN)
        model.faults.raise_next(OutOfMemory("full"))
        await failure_of(served.infer(ONE))
        assert (await served.infer(ONE)).raw_output_contents[0] == ONE.raw_input_contents[0]
        assert model.batches == [(1, 1), (1,), (1, 1), (1,)]
    assert "model 'm': an instance serves without warm-up: failed to run warmup sample 's': full" in caplog.messages


class Slot:
    """A slot of an instance; `start` runs a function on a thread, if there can be one."""

    gpu = None

    def __init__(self, instance: MemoryInstance, start: Callable[[str, Callable[[], None]], None]) -> None:
        self.device, self.execute, self.prepare = instance.device, instance.execute, instance.execute
        self.start = start


class Slotted(MemoryInstance):
    slots: Sequence[Slot] = ()


class ShortOfThreads(MemoryModel):
    """A model whose instances after the first have two slots each. There is no thread for the first slot of its second
    instance, nor for the second slot of its third; no others are expected."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__(spec)
        self.threads = iter((False, True, False))

    def instance(self, spec: ModelSpec, device: Device) -> MemoryInstance:
        if not self._instances:
            return super().instance(spec, device)
        instance = Slotted(self, spec, device)
        instance.slots = [Slot(instance, self._start) for _ in range(2)]
        self._instances.append(instance)
        return instance

    def _start(self, name: str, function: Callable[[], None]) -> None:
        if not next(self.threads):
            raise RuntimeError("can't start new thread")
        threading.Thread(target=function, name=name, daemon=True).start()


async def test_replacement_for_which_there_is_no_thread_is_closed_and_another_is_tried(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = ShortOfThreads(echo_model().spec)
    with caplog.at_level(logging.WARNING, "paceline.server.instances"):
        async with serving(tmp_path, {"m": model}, config=BATCHED) as served:
            model.faults.raise_next(BROKEN)
            assert await failure_of(served.infer(ONE)) == (grpc.StatusCode.INTERNAL, f"model 'm': {BROKEN}")
            await eventually_async(
                lambda: served.server.repository.models[0].instances.can_execute, "an instance again"
            )
            for _ in range(3):
                answer = await served.infer(ONE, timeout_s=60)
                assert answer.raw_output_contents[0] == ONE.raw_input_contents[0]
            assert served.server.repository.ready
            assert model.open_instances == 2  # the lost one, and the one that executes
    assert [record.getMessage() for record in caplog.records if record.name.endswith("instances")] == [
        f"model 'm' version 1: an instance is lost: {BROKEN}; instances left: 0",
        "model 'm': replacing an instance failed: can't start new thread",
        "model 'm' version 1: an instance runs with only 1 of its 2 slots: can't start new thread",
        "model 'm' version 1: an instance has been replaced",
    ]


async def test_instance_lost_while_no_threads_can_start_is_replaced_once_they_can(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = echo_model()
    with caplog.at_level(logging.WARNING, "paceline.server.instances"):
        async with serving(tmp_path, {"m": model}, config=BATCHED) as served:
            assert (await served.infer(ONE)).raw_output_contents[0] == ONE.raw_input_contents[0]
            model.faults.raise_next(ProcessEndedBeforeBatch("it ended before it began"))
            with without_threads():
                code, _ = await failure_of(served.infer(ONE))
            assert code is grpc.StatusCode.UNAVAILABLE
            await eventually_async(
                lambda: served.server.repository.models[0].instances.can_execute, "an instance again"
            )
            assert (await served.infer(ONE)).raw_output_contents[0] == ONE.raw_input_contents[0]
            await eventually_async(lambda: model.open_instances == 1, "the lost one's end")
            assert served.server.repository.ready
