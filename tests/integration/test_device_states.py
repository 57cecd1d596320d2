"""States that stay in a GPU's memory from step to step. A stand-in for the CUDA driver simulates the GPU and counts the
copies; ONNX Runtime computes on the CPU, staged as on a GPU."""

from __future__ import annotations

import asyncio
import ctypes
import gc
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import onnx
import onnxruntime
import pytest

from paceline.backends.cuda.driver import count_gpus
from paceline.backends.errors import DeviceError, LoadError
from paceline.backends.onnx.backend import OnnxBackend
from tests import models, state_models
from tests.cuda import stand_in
from tests.host_accelerator import HostAccelerator
from tests.integration.regions import settings
from tests.integration.scripted import own
from tests.integration.sequence_serving import (
    KEEPS,
    STATE,
    numbers,
    over_a_stream,
    over_calls,
    result,
    step,
    steps,
    sums,
)
from tests.integration.serving import Served, failure_of, serving
from tests.integration.test_cuda_shared_memory import Gpu, register_cuda
from tests.integration.test_sequence_lengths import CASES, alone
from tests.polling import eventually_async
from tests.shared_objects import add_shared_input, request_shared_output

SEEN = 'output { name: "STATE_OUT" data_type: TYPE_FP32 dims: 2 } input { name: "INPUT0" data_type: TYPE_FP32 dims: 2 }'
GRAPHS = "optimization { cuda { graphs: true } } " + own(batch_sizes="1,4,8")
GROWS = KEEPS.replace(
    STATE, STATE.replace(" }", ' dims: -1 initial_state { name: "n" data_type: TYPE_FP32 dims: 0 zero_data: true } }')
)


@pytest.fixture
def gpu(tmp_path: Path) -> Gpu:
    return Gpu(tmp_path)


@asynccontextmanager
async def served_on(
    folder: Path, accelerator: Callable[[object], Any], model: onnx.ModelProto, config: str, driver: Any = None
) -> AsyncIterator[Served]:
    path = models.write(model, folder / "models" / "m" / "1" / "model.onnx")
    (path.parents[1] / "config.pbtxt").write_text(config)
    given = settings(folder / "models", frontends=1)
    async with serving(
        folder / "models",
        settings=given,
        backends={"onnxruntime": OnnxBackend(accelerators=accelerator)},
        load=lambda name: driver if driver is not None else ctypes.CDLL(name),
    ) as served:
        yield served


async def live(served: Served) -> float:
    return await served.metric("paceline_sequences", 'model="m",state="live",version="1"')


@pytest.mark.parametrize("send", [over_calls, over_a_stream])
@pytest.mark.parametrize(
    ("config", "size"),
    [(KEEPS, 2), (KEEPS.replace("oldest { }", "direct { }"), 2), (GROWS, 1), (f"{SEEN} {KEEPS}", 2)],
    ids=["oldest", "direct", "grows", "seen"],
)
async def test_interleaved_sequences_keep_their_states_apart(
    tmp_path: Path, gpu: Gpu, config: str, size: int, send: Any
) -> None:
    model = state_models.growing() if config is GROWS else state_models.accumulator()
    if "output" in config.split("max_batch_size")[0]:
        config = f'{config} output {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: 2 }}'
    async with served_on(tmp_path, lambda device: gpu.accelerator, model, config) as served:
        given = [numbers(sequence, 12, size) for sequence in range(20)]
        requests = [steps(place + 1, inputs) for place, inputs in enumerate(given)]
        answers = await asyncio.gather(*[send(served, one) for one in requests])
        for answer, inputs in zip(answers, given, strict=True):
            np.testing.assert_array_equal(answer, sums(inputs))
        assert await served.metric("nv_inference_count") == 20 * 12
        assert await live(served) == 0


@pytest.mark.parametrize("case", ["input alone", "state of the inputs' size", "state that grows by chunks"])
async def test_sequences_of_any_sizes_keep_their_states_apart(tmp_path: Path, gpu: Gpu, case: str) -> None:
    model, config, make, first = CASES[case]
    random = np.random.default_rng(0)
    given = [[make(random) for _ in range(8)] for _ in range(20)]
    async with served_on(tmp_path, lambda device: gpu.accelerator, model, config) as served:
        requests = [steps(place + 1, inputs) for place, inputs in enumerate(given)]
        answers = await asyncio.gather(*[over_a_stream(served, one) for one in requests])
        session = onnxruntime.InferenceSession(str(tmp_path / "models" / "m" / "1" / "model.onnx"))
        for answer, inputs in zip(answers, given, strict=True):
            expected = alone(session, inputs, first)
            for mine, other in zip(answer, expected, strict=True):
                np.testing.assert_array_equal(mine, other)
        assert await served.metric("paceline_padding_elements") > 0


async def test_only_inputs_and_outputs_of_clients_cross_the_bus(tmp_path: Path, gpu: Gpu) -> None:
    async with served_on(tmp_path, lambda device: gpu.accelerator, state_models.accumulator(), KEEPS) as served:
        inputs = numbers(0, 6)
        requests = steps(1, inputs)
        first = result(await served.infer(requests[0]))
        before = gpu.copies()
        answers = await over_calls(served, requests[1:])
        np.testing.assert_array_equal([first, *answers], sums(inputs))
        copies = [now - then for then, now in zip(before, gpu.copies(), strict=True)]
        # One input and one output a step; a state is copied from its block, and to another one.
        assert copies == [5, 5, 10]


async def test_memory_of_states_is_used_again_and_freed_with_the_model(tmp_path: Path, gpu: Gpu) -> None:
    async with served_on(tmp_path, lambda device: gpu.accelerator, state_models.accumulator(), KEEPS) as served:
        await over_calls(served, steps(1, numbers(0, 3)))
        allocated = gpu.driver.stand_in_device()
        for sequence in range(20):
            await over_calls(served, steps(sequence + 1, numbers(sequence, 5)))
            await served.infer(step(1000 + sequence, numbers(0, 1)[0], start=True))
        assert gpu.driver.stand_in_device() == allocated
    del served
    await eventually_async(
        lambda: gc.collect() >= 0 and gpu.driver.stand_in_device() == 1, "only the client's memory is left"
    )


async def test_failed_step_leaves_the_state_as_before(tmp_path: Path, gpu: Gpu) -> None:
    async with served_on(tmp_path, lambda device: gpu.accelerator, state_models.picky(), KEEPS) as served:
        inputs = numbers(0, 4)
        bad = {"INPUT0": np.full((1, 2), 1000, np.float32)}
        answers = []
        for number, one in enumerate(inputs):
            answers.append(result(await served.infer(step(1, one, start=not number))))
            code, text = await failure_of(served.infer(step(1, bad)))
            assert code is grpc.StatusCode.INTERNAL
            assert "the state of its sequence is as it was before" in text
        np.testing.assert_array_equal(answers, sums(inputs))


class Full(HostAccelerator):
    """A device whose memory can be used up."""

    is_full = False

    def device_memory(self, size_bytes: int) -> Any:
        if self.is_full:
            raise DeviceError("the NVIDIA driver failed: cuMemAlloc_v2 returned 2 (CUDA_ERROR_OUT_OF_MEMORY)")
        return super().host_memory(size_bytes)


async def test_step_without_memory_for_its_state_is_refused(tmp_path: Path) -> None:
    full = Full()
    async with served_on(tmp_path, lambda device: full, state_models.accumulator(), KEEPS) as served:
        inputs = numbers(1, 4)
        requests = steps(1, inputs)
        full.is_full = True
        code, text = await failure_of(served.infer(requests[0]))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "CUDA_ERROR_OUT_OF_MEMORY" in text
        full.is_full = False
        answers = await over_calls(served, requests[:3])
        # Nothing is allocated any more: there are blocks of those that are done.
        full.is_full = True
        np.testing.assert_array_equal([*answers, result(await served.infer(requests[3]))], sums(inputs))


async def test_state_beside_tensors_in_clients_memory_stays_on_the_gpu(tmp_path: Path, gpu: Gpu) -> None:
    async with served_on(
        tmp_path, lambda device: gpu.accelerator, state_models.accumulator(), KEEPS, gpu.driver
    ) as served:
        await register_cuda(served, gpu)
        inputs, before = numbers(0, 5), gpu.copies()
        for number, (request, one) in enumerate(zip(steps(1, inputs), inputs, strict=True)):
            gpu.memory.put(one["INPUT0"].tobytes(), 64)
            del request.inputs[:], request.raw_input_contents[:]
            add_shared_input(request, "INPUT0", "FP32", [1, 2], "c", 8, 64)
            request_shared_output(request, "OUTPUT0", "c", 8, 512)
            await served.infer(request)
            expected = sums(inputs)[number].astype(np.float32)
            assert gpu.memory.get(8, 512) == expected.tobytes()
        copies = [now - then for then, now in zip(before, gpu.copies(), strict=True)]
        assert copies == [1, 0, 4 * 5 - 1]  # what the first step begins with comes from the host


@pytest.mark.parametrize("is_filled", [False, True])
async def test_state_that_a_client_gets_in_its_memory_is_kept(tmp_path: Path, gpu: Gpu, is_filled: bool) -> None:
    config = CASES["state that grows"][1] if is_filled else GROWS
    config += ' output { name: "STATE_OUT" data_type: TYPE_FP32 dims: -1 }'
    async with served_on(
        tmp_path, lambda device: gpu.accelerator, state_models.growing(), config, gpu.driver
    ) as served:
        await register_cuda(served, gpu)
        inputs = numbers(0, 4, 1)
        for number, request in enumerate(steps(1, inputs)):
            request_shared_output(request, "STATE_OUT", "c", 256, 512)
            answer = await served.infer(request)
            kept = np.concatenate([one["INPUT0"] for one in inputs[: number + 1]], axis=1)
            assert list(answer.outputs[0].shape) == [1, number + 1]
            assert gpu.memory.get(kept.nbytes, 512) == kept.tobytes()
            gpu.memory.put(bytes(64), 512)


@pytest.mark.parametrize("second", [1, None], ids=["gpu", "host"])
async def test_state_follows_its_sequence_to_another_device(tmp_path: Path, second: int | None) -> None:
    def accelerator(device: object) -> HostAccelerator | None:
        made.append(HostAccelerator())
        made[-1].gpu = len(made) % 2
        return made[-1] if second is not None or len(made) % 2 else None

    made: list[HostAccelerator] = []
    config = f"{KEEPS} instance_group {{ count: 2 kind: KIND_CPU }}"
    async with served_on(tmp_path, accelerator, state_models.accumulator(), config) as served:
        given = [numbers(sequence, 20) for sequence in range(24)]
        requests = [steps(place + 1, inputs) for place, inputs in enumerate(given)]
        answers = await asyncio.gather(*[over_a_stream(served, one) for one in requests])
        for answer, inputs in zip(answers, given, strict=True):
            np.testing.assert_array_equal(answer, sums(inputs))


async def test_lost_gpu_ends_its_sequences_and_says_so(tmp_path: Path, gpu: Gpu) -> None:
    accelerators = iter([gpu.accelerator])

    def accelerator(device: object) -> Any:
        return next(accelerators, None) or stand_in.accelerator(tmp_path, gpu.driver)

    async with served_on(tmp_path, accelerator, state_models.accumulator(), KEEPS) as served:
        inputs = numbers(0, 2)
        for id_ in (1, 2):
            await served.infer(step(id_, inputs[0], start=True))
        gpu.driver.stand_in_fail(b"cuEventSynchronize", 719)
        code, text = await failure_of(served.infer(step(1, inputs[1])))
        assert code is grpc.StatusCode.INTERNAL
        assert "as it was before" not in text
        await eventually_async(lambda: served.waiting("m") == 0, "an instance is back")
        for id_ in (1, 2):
            code, text = await failure_of(served.infer(step(id_, inputs[1])))
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert "the instance of the model that held it was lost" in text
        assert await live(served) == 0
        lost = 'model="m",reason="instance_lost",version="1"'
        assert await served.metric("paceline_ended_sequences", lost) == 2
        np.testing.assert_array_equal(await over_calls(served, steps(3, inputs)), sums(inputs))


@pytest.mark.gpu
@pytest.mark.parametrize("more", ["", GRAPHS], ids=["plain", "graphs"])
@pytest.mark.parametrize("config", [KEEPS, KEEPS.replace("oldest { }", "direct { }")], ids=["oldest", "direct"])
async def test_states_on_a_gpu_are_those_of_the_cpu(tmp_path: Path, config: str, more: str) -> None:
    try:
        count_gpus()
    except LoadError as reason:
        pytest.skip(str(reason))
    path = models.write(state_models.accumulator(), tmp_path / "m" / "1" / "model.onnx")
    (path.parents[1] / "config.pbtxt").write_text(f"{config} instance_group {{ kind: KIND_GPU }} {more}")
    async with serving(tmp_path) as served:
        given = [numbers(sequence, 25) for sequence in range(30)]
        requests = [steps(place + 1, inputs) for place, inputs in enumerate(given)]
        answers = await asyncio.gather(*[over_a_stream(served, one) for one in requests])
        for answer, inputs in zip(answers, given, strict=True):
            np.testing.assert_array_equal(answer, sums(inputs))
