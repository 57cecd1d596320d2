"""Staging on a GPU, compared with the answers of the CPU."""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import helper

from paceline.backends.base import DeviceTensor, ModelSource, Targets
from paceline.backends.cuda.accelerator import CudaAccelerator, DeviceMemory
from paceline.backends.cuda.driver import load_driver
from paceline.backends.errors import DeviceError, ExecutionError, InstanceLost, OutOfMemory
from paceline.backends.onnx.backend import OnnxBackend
from paceline.backends.onnx.instance import OnnxInstance
from paceline.backends.onnx.options import parse_options
from paceline.backends.onnx.staged import StagedInstance
from paceline.backends.spec import Array, ModelSpec, TensorSpec
from paceline.backends.staging import array_in
from tests import models
from tests.unit.backends.onnx.gpu_pair import (
    CPU,
    EXACT,
    GPU,
    GRAPHS,
    IMAGES,
    MLP,
    Pair,
    convolved,
    floats,
    on_thread_of,
)

pytestmark = pytest.mark.gpu


FRUGAL = (("cuda", {"use_tf32": "0", "arena_extend_strategy": "kSameAsRequested"}),)
_HOST = 1  # CU_MEMORYTYPE_HOST
_MEMORY_TYPE = 2  # CU_POINTER_ATTRIBUTE_MEMORY_TYPE


def fill(accelerator: CudaAccelerator) -> list[DeviceMemory]:
    """Memory allocated until the device has less than 4 MiB left. In pieces: a GPU doesn't have as much in one as it
    reports as free."""
    accelerator.enter()
    taken: list[DeviceMemory] = []
    size_bytes = 2**30
    while size_bytes >= 2**22:
        try:
            taken.append(accelerator.device_memory(size_bytes))
        except DeviceError:
            size_bytes //= 2
    return taken


def test_batches_equal_those_of_the_cpu_in_both_slots_at_the_same_time(
    tmp_path: Path, accelerator: CudaAccelerator
) -> None:
    pair = Pair(tmp_path, models.mlp((64, 256, 16)), MLP, accelerator)

    def run(number: int) -> None:
        rng = np.random.default_rng(number)
        for _ in range(100):
            requests = [floats(rng, int(rng.integers(1, 5)), 64) for _ in range(int(rng.integers(1, 9)))]
            pair.check(pair.gpu.slots[number], requests, int(rng.choice([0, 16, 32])))

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(run, [0, 1]))


def test_tensors_are_on_the_device_and_results_in_page_locked_memory(
    tmp_path: Path, accelerator: CudaAccelerator
) -> None:
    pair = Pair(tmp_path, models.mlp((64, 256, 16)), MLP, accelerator)
    shared = pair.gpu._shared
    assert [tensor.on_device for tensor in (*shared.inputs, *shared.outputs)] == [True, True]
    result = pair.gpu.execute([floats(np.random.default_rng(1), 4, 64)]).results[0]
    assert not isinstance(result, Exception)
    kind = ctypes.c_uint()
    address = ctypes.c_uint64(result[0].ctypes.data)
    accelerator.enter()
    assert ctypes.CDLL("libcuda.so.1").cuPointerGetAttribute(ctypes.byref(kind), _MEMORY_TYPE, address) == 0
    assert kind.value == _HOST


class Counting(CudaAccelerator):
    """Counts how often memory is allocated, on either side."""

    allocations = 0

    def host_memory(self, size_bytes: int) -> Any:
        self.allocations += 1
        return super().host_memory(size_bytes)

    def device_memory(self, size_bytes: int) -> Any:
        self.allocations += 1
        return super().device_memory(size_bytes)


def test_steady_state_allocates_nothing(tmp_path: Path, accelerator: CudaAccelerator) -> None:
    counting = Counting(load_driver(), GPU.index)
    pair = Pair(tmp_path, models.mlp((64, 256, 16)), MLP, counting)
    rng = np.random.default_rng(1)
    for slot in pair.gpu.slots:
        for size in range(32, 0, -1):  # each may have its own kernels, which are loaded on their first use
            slot.execute([floats(rng, 1, 64)], size)
    allocations, free = counting.allocations, accelerator.free_bytes()
    for _ in range(200):
        for slot in pair.gpu.slots:
            slot.execute([floats(rng, int(rng.integers(1, 33)), 64)])
    assert counting.allocations == allocations
    assert accelerator.free_bytes() == free


FREE_IMAGES = ModelSpec(
    (TensorSpec("INPUT0", "FP32", (3, -1, -1)),), (TensorSpec("OUTPUT0", "FP32", (1, -1, -1)),), batched=True
)


@pytest.mark.parametrize("rows", [1, 3])
def test_images_that_are_too_small_are_refused_each_time(
    rows: int, tmp_path: Path, accelerator: CudaAccelerator
) -> None:
    """ONNX Runtime refuses them the first time, and then convolves the memory behind them (`onnx.plans`)."""
    pair = Pair(tmp_path, convolved(4, "h", "w"), FREE_IMAGES, accelerator)
    rng, slot = np.random.default_rng(1), pair.gpu.slots[0]
    for _ in range(4):
        pair.check(slot, [floats(rng, rows, 3, 16, 16)])
        for _ in range(3):
            with pytest.raises(ExecutionError, match=r"running Conv node.*Invalid input shape"):
                slot.execute([floats(rng, rows, 3, 2, 2)])
        pair.check(slot, [floats(rng, rows, 3, 16, 16)])
        pair.check(slot, [floats(rng, rows, 3, 9, 7), floats(rng, 1, 3, 9, 7)])


def test_unbatched_instance_is_lost_if_it_would_convolve_memory_behind_an_image(
    tmp_path: Path, accelerator: CudaAccelerator
) -> None:
    one = [(TensorSpec(name, "FP32", (1, planes, -1, -1)),) for name, planes in (("INPUT0", 3), ("OUTPUT0", 1))]
    spec = ModelSpec(one[0], one[1])
    pair = Pair(tmp_path, convolved(4, "h", "w"), spec, accelerator)
    source = ModelSource("m", tmp_path / "model.onnx", accelerators=EXACT)
    backend = OnnxBackend(accelerators=lambda device: accelerator if device == GPU else None)
    plain = OnnxInstance(backend.open(source, GPU)._session(GPU), spec, GPU, parse_options(source))
    rng = np.random.default_rng(1)
    image, small = floats(rng, 1, 3, 16, 16), floats(rng, 1, 3, 2, 2)
    for instance in (pair.gpu, plain):
        instance.execute([image])
        with pytest.raises(ExecutionError, match="Invalid input shape"):
            instance.execute([small])
        with pytest.raises(InstanceLost):
            instance.execute([small])
        instance.execute([image])


def test_trial_tries_larger_images_after_too_small_ones(tmp_path: Path, accelerator: CudaAccelerator) -> None:
    path = models.write(convolved(4, "h", "w"), tmp_path / "model.onnx")
    backend = OnnxBackend(accelerators=lambda device: accelerator if device == GPU else None)
    trials = [backend.open(ModelSource("m", path), device).try_rows() for device in (CPU, GPU)]
    assert [trial.why_not for trial in trials] == ["", ""]
    assert trials[0] == trials[1]


def test_batch_that_ran_out_of_memory_is_computed_correctly_once_memory_suffices(
    tmp_path: Path, accelerator: CudaAccelerator
) -> None:
    pair = Pair(tmp_path, convolved(64, 16, 16), IMAGES, accelerator, FRUGAL)
    rng, slot = np.random.default_rng(1), pair.gpu.slots[0]
    pair.check(slot, [floats(rng, 4, 3, 16, 16)])
    large = [floats(rng, 200, 3, 16, 16)]
    slot._stage(pair.gpu._shared.opened, large, 200, 0, None)  # so that only ONNX Runtime lacks memory
    taken = fill(accelerator)
    with pytest.raises(OutOfMemory, match="running Conv node"):
        slot.execute(large)
    del taken
    for _ in range(2):
        pair.check(slot, large)
    pair.check(slot, [floats(rng, 4, 3, 16, 16)])


def test_outputs_of_unknown_size_equal_those_of_the_cpu(tmp_path: Path, accelerator: CudaAccelerator) -> None:
    spec = ModelSpec((TensorSpec("INPUT0", "FP32", (-1,)),), (TensorSpec("OUTPUT0", "FP32", (-1,)),), batched=True)
    node = helper.make_node("Neg", ["INPUT0"], ["OUTPUT0"])
    tensors = [models.tensor(name, "FP32", ["batch", "n"]) for name in ("INPUT0", "OUTPUT0")]
    pair = Pair(tmp_path, models.model([node], tensors[:1], tensors[1:]), spec, accelerator)
    rng = np.random.default_rng(1)
    for _ in range(50):
        dims = int(rng.integers(0, 3000))
        for slot in pair.gpu.slots:
            pair.check(slot, [floats(rng, 2, dims), floats(rng, 1, dims)])


def test_tensors_in_host_memory_equal_those_of_the_cpu(tmp_path: Path, accelerator: CudaAccelerator) -> None:
    # The shape is read by the CPU, and the shape of the result is computed there.
    model = models.model(
        [
            helper.make_node("Reshape", ["INPUT0", "INPUT1"], ["OUTPUT0"]),
            helper.make_node("Shape", ["OUTPUT0"], ["OUTPUT1"]),
        ],
        [models.tensor("INPUT0", "FP32", ["a", "b"]), models.tensor("INPUT1", "INT64", [2])],
        [models.tensor("OUTPUT0", "FP32", ["c", "d"]), models.tensor("OUTPUT1", "INT64", [2])],
    )
    spec = ModelSpec(
        (TensorSpec("INPUT0", "FP32", (-1, -1)), TensorSpec("INPUT1", "INT64", (2,))),
        (TensorSpec("OUTPUT0", "FP32", (-1, -1)), TensorSpec("OUTPUT1", "INT64", (2,))),
    )
    pair = Pair(tmp_path, model, spec, accelerator)
    rng = np.random.default_rng(1)
    for shape in ((2, 6), (6, 2), (1, 12), (3, 4)) * 5:
        pair.check(pair.gpu.slots[0], [(*floats(rng, 4, 3), np.array(shape, np.int64))])


class Client:
    """A client's memory on the GPU; at most 4096 bytes are put or got at a time."""

    def __init__(self, accelerator: CudaAccelerator) -> None:
        accelerator.enter()
        self._accelerator, self._stream = accelerator, accelerator.stream()
        self._memory, self._host = accelerator.device_memory(2**20), accelerator.host_memory(4096)

    def put(self, array: Array, offset: int) -> DeviceTensor:
        ctypes.memmove(self._host.address, array.ctypes.data, array.nbytes)
        self._accelerator.enter()
        self._stream.copy_in(self._memory.address + offset, self._host.address, array.nbytes)
        self._stream.synchronize()
        return DeviceTensor(self._memory, self._memory.address + offset, array.dtype, array.shape)

    def room(self, size: int, offset: int) -> DeviceTensor:
        return DeviceTensor(self._memory, self._memory.address + offset, np.dtype(np.uint8), (size,))

    def get(self, tensor: DeviceTensor) -> Array:
        self._accelerator.enter()
        self._stream.copy_out(self._host.address, tensor.address, tensor.nbytes)
        self._stream.synchronize()
        return array_in(self._host, tensor.dtype, tensor.shape).copy()


@pytest.mark.parametrize("accelerators", [EXACT, GRAPHS], ids=["plain", "graphs"])
def test_tensors_of_clients_on_the_device_are_read_and_written_there(
    accelerators: Any, tmp_path: Path, accelerator: CudaAccelerator
) -> None:
    pair, client = Pair(tmp_path, models.mlp((64, 256, 16)), MLP, accelerator, accelerators), Client(accelerator)
    rng, slot = np.random.default_rng(1), pair.gpu.slots[0]
    if accelerators is GRAPHS:
        slot.prepare([floats(rng, 1, 64)], 16)

    def check() -> None:
        arrays = [floats(rng, int(rng.integers(1, 4)), 64) for _ in range(int(rng.integers(1, 6)))]
        requests = [
            [client.put(one, 4096 * number)] if rng.integers(2) else [one] for number, (one,) in enumerate(arrays)
        ]
        targets: list[Targets] = [
            {0: client.room(one.shape[0] * 64, 4096 * (100 + number))} if rng.integers(2) else {}
            for number, (one,) in enumerate(arrays)
        ]
        results = slot.execute(requests, 16, targets).results
        reference = pair.cpu.execute(arrays, 16).results
        for one, other, wanted in zip(results, reference, targets, strict=True):
            assert not isinstance(one, Exception)
            assert not isinstance(other, Exception)
            output: Any = one[0]
            assert isinstance(output, DeviceTensor) is bool(wanted)
            got = client.get(output) if isinstance(output, DeviceTensor) else output
            np.testing.assert_allclose(got, other[0], rtol=1e-4, atol=1e-4)

    on_thread_of(slot, lambda: [check() for _ in range(50)])


@pytest.mark.parametrize("accelerators", [EXACT, GRAPHS], ids=["plain", "graphs"])
def test_computation_is_queued_and_not_waited_for(
    accelerators: Any, tmp_path: Path, accelerator: CudaAccelerator
) -> None:
    driver = ctypes.CDLL("libcuda.so.1")
    if not hasattr(driver, "stand_in_pending") or os.environ.get("STAND_IN_SEED"):
        pytest.skip("only a stand-in that is always late tells whether anybody waits")
    pair = Pair(tmp_path, models.mlp((64, 256, 16)), MLP, accelerator, accelerators)
    slot = pair.gpu.slots[0]
    requests = [floats(np.random.default_rng(1), 4, 64)]
    slot.prepare(requests, 4)

    def compute() -> tuple[int, int]:
        bound = slot._stage(pair.gpu._shared.opened, requests, 4, 0, None)
        staged = driver.stand_in_pending()
        slot._compute(pair.gpu._shared.opened, bound, False)
        computing = driver.stand_in_pending()
        slot._settle(ExecutionError())  # before the memory of the queued work is freed at the end of this test
        return staged, computing

    staged, computing = on_thread_of(slot, compute)
    assert 0 < staged < computing


def test_two_instances_on_one_gpu_compute_at_the_same_time(tmp_path: Path, accelerator: CudaAccelerator) -> None:
    pair = Pair(tmp_path, models.mlp((64, 256, 16)), MLP, accelerator)
    second = pair.opened.instance(MLP, GPU)
    assert isinstance(second, StagedInstance)
    slots = [*pair.gpu.slots, *second.slots]

    def run(number: int) -> None:
        rng = np.random.default_rng(number)
        for _ in range(50):
            pair.check(slots[number], [floats(rng, int(rng.integers(1, 33)), 64)])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(run, range(4)))
    second.close()
    pair.check(pair.gpu.slots[0], [floats(np.random.default_rng(1), 4, 64)])


def test_closing_frees_the_devices_memory(tmp_path: Path, accelerator: CudaAccelerator) -> None:
    def once() -> None:
        pair = Pair(tmp_path, models.mlp((64, 2048, 2048, 16)), MLP, accelerator)
        pair.gpu.execute([floats(np.random.default_rng(1), 32, 64)])
        pair.gpu.close()
        pair.opened.close()

    once()
    free = accelerator.free_bytes()
    for _ in range(5):
        once()
    assert accelerator.free_bytes() >= free - 2**24
