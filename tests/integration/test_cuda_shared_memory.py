"""CUDA shared memory over the wire, from registration to answers. A stand-in for the CUDA driver simulates the GPU;
ONNX Runtime computes on the CPU, staged as on a GPU. Handles refer to memory of the test's own process."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.backends.onnx.backend import OnnxBackend
from paceline.protos import inference_pb2 as pb
from tests import models
from tests.cuda import stand_in
from tests.integration.probing import probe
from tests.integration.regions import register, settings, unregister
from tests.integration.serving import Served, failure_of, serving
from tests.polling import eventually_async
from tests.shared_objects import SharedObject, add_shared_input, request_shared_output, shared_object
from tests.wire import Array, add_raw

Code = grpc.StatusCode
ROW = 8
SIZE = 4096
CONFIG = """
    max_batch_size: 8 dynamic_batching { %s }
    input { name: "a" data_type: TYPE_FP32 dims: %s } output { name: "x" data_type: TYPE_FP32 dims: %s }
"""
LATER = "preferred_batch_size: 8 max_queue_delay_microseconds: 30000000"
"""All requests of a test share one batch, of eight rows."""


class Gpu:
    """A simulated GPU with its driver, and memory of a client on it."""

    def __init__(self, folder: Path) -> None:
        self.driver = stand_in.build(folder)
        self.memory = stand_in.ClientMemory(self.driver, SIZE)
        self.accelerator = stand_in.accelerator(folder, self.driver)

    def copies(self) -> list[int]:
        """How many copies have been queued so far: from the host, to the host, on the device."""
        return [self.driver.stand_in_copies(kind) for kind in (b"in", b"out", b"within")]


@pytest.fixture
def gpu(tmp_path: Path) -> Gpu:
    return Gpu(tmp_path)


def write(repository: Path, policy: str = "", dims: str = "2") -> None:
    place = repository / "m" / "1" / "model.onnx"
    place.parent.mkdir(parents=True)
    tensors = [models.tensor(name, "FP32", ["batch", 2 if dims == "2" else "n"]) for name in ("a", "x")]
    models.write(models.model([models.helper.make_node("Neg", ["a"], ["x"])], tensors[:1], tensors[1:]), place)
    (repository / "m" / "config.pbtxt").write_text(CONFIG % (policy, dims, dims))


@asynccontextmanager
async def served_by(gpu: Gpu, folder: Path, staged: bool = True, driver: Any = None) -> AsyncIterator[Served]:
    """A server whose region `c` is all of the client's memory. `driver`, if given, is a wrapper of the GPU's driver."""
    backend = OnnxBackend(accelerators=lambda device: gpu.accelerator if staged else None)
    given = settings(folder / "models", frontends=1)
    async with serving(
        folder / "models", settings=given, backends={"onnxruntime": backend}, load=lambda name: driver or gpu.driver
    ) as served:
        await register_cuda(served, gpu)
        yield served


async def register_cuda(served: Served, gpu: Gpu, name: str = "c", **more: Any) -> None:
    request = {"raw_handle": gpu.memory.handle, "byte_size": SIZE, **more}
    await served.stub.CudaSharedMemoryRegister(pb.CudaSharedMemoryRegisterRequest(name=name, **request), timeout=20)


async def unregister_cuda(served: Served, name: str = "") -> None:
    await served.stub.CudaSharedMemoryUnregister(pb.CudaSharedMemoryUnregisterRequest(name=name), timeout=20)


def asking(
    rows: int,
    source: tuple[str, int] | Array,
    target: tuple[str, int] | None = None,
    room: int = 0,
    dims: int = 2,
) -> pb.ModelInferRequest:
    """`rows` rows, from a region and an offset in it or from the message; the answer into a region or the response."""
    request = pb.ModelInferRequest(model_name="m")
    if isinstance(source, tuple):
        add_shared_input(request, "a", "FP32", [rows, dims], source[0], 4 * rows * dims, source[1])
    else:
        add_raw(request, "a", "FP32", [rows, dims], source.tobytes())
    if target is not None:
        request_shared_output(request, "x", target[0], room or 4 * rows * dims, target[1])
    return request


def floats(first: int, rows: int) -> Array:
    return np.arange(first, first + 2 * rows, dtype=np.float32).reshape(rows, 2)


async def test_tensors_in_memory_of_the_models_gpu_never_pass_through_the_host(tmp_path: Path, gpu: Gpu) -> None:
    write(tmp_path / "models")
    async with served_by(gpu, tmp_path) as served:
        gpu.memory.put(floats(1, 2).tobytes(), 64)
        before = gpu.copies()
        for _ in range(3):  # the first one is parsed, the others take the short way
            gpu.memory.put(bytes(2 * ROW), 512)
            response = await served.infer(asking(2, ("c", 64), ("c", 512)))
            assert gpu.memory.get(2 * ROW, 512) == (-floats(1, 2)).tobytes()
            assert list(response.raw_output_contents) == [b""]
            (output,) = response.outputs
            assert (output.name, output.datatype, list(output.shape)) == ("x", "FP32", [2, 2])
            told = {key: getattr(one, one.WhichOneof("parameter_choice")) for key, one in output.parameters.items()}
            assert told == {
                "shared_memory_region": "c", "shared_memory_byte_size": 2 * ROW, "shared_memory_offset": 512
            }  # fmt: skip
        copies = [now - then for then, now in zip(before, gpu.copies(), strict=True)]
        assert copies == [0, 0, 6]


async def test_batch_of_all_kinds_of_memory_and_messages_gives_each_request_its_own(tmp_path: Path, gpu: Gpu) -> None:
    write(tmp_path / "models", LATER)
    with shared_object(SIZE) as memory:
        async with served_by(gpu, tmp_path) as served:
            await register(served, "s", memory.key, SIZE)
            gpu.memory.put(floats(10, 1).tobytes(), 0)
            gpu.memory.put(floats(20, 2).tobytes(), 64)
            memory.put(floats(30, 1), 0)
            memory.put(floats(40, 1), 64)
            calls = [
                served.infer(asking(1, ("c", 0), ("c", 1024))),
                served.infer(asking(2, ("c", 64))),
                served.infer(asking(1, ("s", 0), ("c", 1088))),
                served.infer(asking(1, ("s", 64), ("s", 1024))),
                served.infer(asking(1, floats(50, 1), ("c", 1152))),
                served.infer(asking(2, floats(60, 2))),
            ]
            before = await served.metric("nv_inference_exec_count")
            answers = await asyncio.gather(*calls)
            assert await served.metric("nv_inference_exec_count") == before + 1
        assert gpu.memory.get(ROW, 1024) == (-floats(10, 1)).tobytes()
        assert answers[1].raw_output_contents[0] == (-floats(20, 2)).tobytes()
        assert gpu.memory.get(ROW, 1088) == (-floats(30, 1)).tobytes()
        assert memory.get(ROW, 1024) == (-floats(40, 1)).tobytes()
        assert gpu.memory.get(ROW, 1152) == (-floats(50, 1)).tobytes()
        assert answers[5].raw_output_contents[0] == (-floats(60, 2)).tobytes()


async def test_request_whose_memory_is_gone_fails_alone_in_its_batch(tmp_path: Path, gpu: Gpu) -> None:
    write(tmp_path / "models", LATER)
    memory = SharedObject(SIZE)
    try:
        async with served_by(gpu, tmp_path) as served:
            await register(served, "s", memory.key, SIZE)
            gpu.memory.put(floats(10, 3).tobytes(), 0)
            calls = [
                asyncio.ensure_future(served.infer(asking(3, ("c", 0), ("c", 1024)))),
                asyncio.ensure_future(served.infer(asking(2, ("s", 0), ("c", 2048)))),
            ]
            while served.waiting("m") < 2:
                await asyncio.sleep(0)
            memory.resize(8)
            last = await served.infer(asking(3, floats(50, 3)))
            await calls[0]
            assert (await failure_of(calls[1]))[0] is Code.INVALID_ARGUMENT
        assert gpu.memory.get(3 * ROW, 1024) == (-floats(10, 3)).tobytes()
        assert last.raw_output_contents[0] == (-floats(50, 3)).tobytes()
        assert gpu.memory.get(2 * ROW, 2048) == bytes(2 * ROW)
    finally:
        memory.close()


async def test_request_whose_gpu_memory_cannot_be_copied_fails_alone(tmp_path: Path, gpu: Gpu) -> None:
    write(tmp_path / "models", LATER)
    async with served_by(gpu, tmp_path) as served:
        # The driver no longer knows this memory, but the server does: for outputs, it checks only whether they fit.
        gone = stand_in.ClientMemory(gpu.driver, SIZE)
        await served.stub.CudaSharedMemoryRegister(
            pb.CudaSharedMemoryRegisterRequest(name="gone", raw_handle=gone.handle, byte_size=SIZE), timeout=20
        )
        gone.free()
        calls = [
            asyncio.ensure_future(served.infer(asking(3, floats(1, 3), ("c", 0)))),
            asyncio.ensure_future(served.infer(asking(2, floats(10, 2), ("gone", 0)))),
            asyncio.ensure_future(served.infer(asking(3, floats(20, 3)))),
        ]
        _, failed, answered = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(failed, grpc.aio.AioRpcError)
        assert (failed.code(), "a client's memory on the GPU can't be copied" in (failed.details() or "")) == (
            Code.INTERNAL,
            True,
        )
        assert gpu.memory.get(3 * ROW) == (-floats(1, 3)).tobytes()
        assert isinstance(answered, pb.ModelInferResponse)
        assert answered.raw_output_contents[0] == (-floats(20, 3)).tobytes()


async def test_region_unregistered_while_requests_use_it_stays_open_until_they_are_done(
    tmp_path: Path, gpu: Gpu
) -> None:
    write(tmp_path / "models", LATER)
    async with served_by(gpu, tmp_path) as served:
        gpu.memory.put(floats(1, 4).tobytes(), 0)
        call = asyncio.ensure_future(served.infer(asking(4, ("c", 0), ("c", 1024))))
        while not served.waiting("m"):
            await asyncio.sleep(0)
        await unregister_cuda(served, "c")
        assert gpu.driver.stand_in_opened() == 1
        retained = gpu.driver.stand_in_retained()
        await served.infer(asking(4, floats(9, 4)))
        await call
        assert gpu.memory.get(4 * ROW, 1024) == (-floats(1, 4)).tobytes()
        del call
        # The threads that executed keep references for a moment longer.
        await eventually_async(lambda: gc.collect() >= 0 and gpu.driver.stand_in_opened() == 0, "the region is closed")
        assert gpu.driver.stand_in_retained() == retained  # to release the context could be to destroy it
        assert (await failure_of(served.infer(asking(8, ("c", 0)))))[0] is Code.NOT_FOUND


async def test_output_with_too_little_room_is_refused(tmp_path: Path, gpu: Gpu) -> None:
    write(tmp_path / "models")
    async with served_by(gpu, tmp_path) as served:
        code, text = await failure_of(served.infer(asking(2, floats(1, 2), ("c", 0), room=15)))
        assert code is Code.INVALID_ARGUMENT
        assert "expected 'shared_memory_byte_size' to be at least 16 bytes to hold the result, got 15" in text
        assert (await failure_of(served.infer(asking(2, ("c", SIZE - 8)))))[0] is Code.INVALID_ARGUMENT
        assert gpu.memory.get(16) == bytes(16)


async def test_output_of_unknown_size_that_turns_out_too_large_is_refused(tmp_path: Path, gpu: Gpu) -> None:
    write(tmp_path / "models", dims="-1")
    async with served_by(gpu, tmp_path) as served:
        gpu.memory.put(np.arange(6, dtype=np.float32).tobytes(), 0)
        code, text = await failure_of(served.infer(asking(2, ("c", 0), ("c", 512), room=23, dims=3)))
        assert (code, "to be at least 24 bytes to hold the result, got 23" in text) == (Code.INVALID_ARGUMENT, True)
        assert gpu.memory.get(24, 512) == bytes(24)
        response = await served.infer(asking(2, ("c", 0), ("c", 512), room=100, dims=3))
        assert gpu.memory.get(24, 512) == (-np.arange(6, dtype=np.float32)).tobytes()
        assert response.outputs[0].parameters["shared_memory_byte_size"].int64_param == 24


class Noticed:
    """Wraps `driver`; `threads` are those on which host memory was copied to the GPU."""

    def __init__(self, driver: Any) -> None:
        self._driver = driver
        self.threads: list[int] = []

    def __getattr__(self, name: str) -> Any:
        if name == "cuMemcpyHtoD_v2":
            self.threads.append(threading.get_ident())
        return getattr(self._driver, name)


@pytest.mark.parametrize("staged", [True, False])
async def test_outputs_for_a_gpu_never_make_the_event_loop_wait(staged: bool, tmp_path: Path, gpu: Gpu) -> None:
    write(tmp_path / "models", dims="-1")
    gpu.accelerator.gpu = 1
    noticed = Noticed(gpu.driver)
    async with served_by(gpu, tmp_path, staged, noticed) as served:
        for _ in range(2):  # the first one is parsed, the other takes the short way
            gpu.memory.put(bytes(16), 512)
            response = await served.infer(asking(2, floats(1, 2), ("c", 512)))
            assert gpu.memory.get(16, 512) == (-floats(1, 2)).tobytes()
            assert response.outputs[0].parameters["shared_memory_byte_size"].int64_param == 16
        assert len(noticed.threads) == 2
        assert threading.get_ident() not in noticed.threads
        # An output that is too large isn't written, and the codec reports it.
        code, text = await failure_of(served.infer(asking(2, floats(1, 2), ("c", 512), room=15)))
        assert (code, "to be at least 16 bytes to hold the result, got 15" in text) == (Code.INVALID_ARGUMENT, True)
        assert len(noticed.threads) == 2


@pytest.mark.parametrize("staged", [True, False])
async def test_memory_of_another_gpu_than_the_models_passes_through_the_host(
    staged: bool, tmp_path: Path, gpu: Gpu
) -> None:
    write(tmp_path / "models")
    gpu.accelerator.gpu = 1
    async with served_by(gpu, tmp_path, staged) as served:
        gpu.memory.put(floats(1, 2).tobytes(), 64)
        before = gpu.copies()
        await served.infer(asking(2, ("c", 64), ("c", 512)))
        assert gpu.memory.get(2 * ROW, 512) == (-floats(1, 2)).tobytes()
        copies = [now - then for then, now in zip(before, gpu.copies(), strict=True)]
        assert copies == ([1, 1, 0] if staged else [0, 0, 0])


async def test_overlapping_outputs_are_written_in_the_order_requested(tmp_path: Path, gpu: Gpu) -> None:
    place = tmp_path / "models" / "m" / "1" / "model.onnx"
    place.parent.mkdir(parents=True)
    tensors = {name: models.tensor(name, "FP32", ["batch", 2]) for name in ("a", "x", "y")}
    nodes = [models.helper.make_node(kind, ["a"], [to]) for kind, to in (("Neg", "x"), ("Identity", "y"))]
    models.write(models.model(nodes, [tensors["a"]], [tensors["x"], tensors["y"]]), place)
    (tmp_path / "models" / "m" / "config.pbtxt").write_text("max_batch_size: 8")
    async with served_by(gpu, tmp_path) as served:
        gpu.memory.put(floats(1, 2).tobytes(), 0)
        for order, expected in (("xy", floats(1, 2)), ("yx", -floats(1, 2))):
            request = pb.ModelInferRequest(model_name="m")
            add_shared_input(request, "a", "FP32", [2, 2], "c", 2 * ROW, 0)
            for name in order:
                request_shared_output(request, name, "c", 2 * ROW, 512)
            await served.infer(request)
            assert gpu.memory.get(2 * ROW, 512) == expected.tobytes()


async def test_registration_that_the_driver_refuses_says_why(tmp_path: Path, gpu: Gpu) -> None:
    write(tmp_path / "models")
    async with served_by(gpu, tmp_path) as served:
        assert gpu.driver.stand_in_opened() == 1
        for more, what in (
            ({"raw_handle": b"x" * 64}, "cuIpcOpenMemHandle returned 1"),
            ({"device_id": 1}, "cuDeviceGet returned 101"),
            ({"byte_size": SIZE + 1}, f"expected up to the {SIZE} bytes of its memory, got {SIZE + 1}"),
        ):
            code, text = await failure_of(register_cuda(served, gpu, "other", **more))
            assert (code, what in text) == (Code.INVALID_ARGUMENT, True), text
        await unregister(served)
        assert gpu.driver.stand_in_opened() == 1
        await unregister_cuda(served)
        assert gpu.driver.stand_in_opened() == 0


async def test_gpu_lost_to_shared_memory_ends_liveness_alone(tmp_path: Path, gpu: Gpu) -> None:
    write(tmp_path / "models", LATER)
    async with served_by(gpu, tmp_path, staged=False) as served:
        assert await probe(served, "/livez") == (200, "ok\n")
        gpu.driver.stand_in_fail(b"cuMemcpyDtoH", 719)
        calls = [
            asyncio.ensure_future(served.infer(asking(4, ("c", 0)))),
            asyncio.ensure_future(served.infer(asking(4, floats(1, 4)))),
        ]
        lost, answered = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(lost, grpc.aio.AioRpcError)
        assert (lost.code(), "can't be read: the NVIDIA driver failed" in (lost.details() or "")) == (
            Code.UNAVAILABLE,
            True,
        )
        assert isinstance(answered, pb.ModelInferResponse)
        assert answered.raw_output_contents[0] == (-floats(1, 4)).tobytes()
        reason = "the NVIDIA driver failed: cuMemcpyDtoH returned 719 (CUDA_ERROR_LAUNCH_FAILED)"
        assert await probe(served, "/livez") == (503, f"CUDA shared memory: {reason}\n")
        health: Any = health_pb2_grpc.HealthStub(served.channel)
        request = health_pb2.HealthCheckRequest(service="liveness")
        while (await health.Check(request)).status != health_pb2.HealthCheckResponse.NOT_SERVING:
            await asyncio.sleep(0.01)
        assert await probe(served, "/readyz") == (200, "ok\n")
