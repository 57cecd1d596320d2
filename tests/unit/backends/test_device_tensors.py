"""A slot with tensors that are in the device's memory already: results equal those of host tensors, and what can stay
on the device does. The device is the host, which copies as late as allowed, or a stand-in for the CUDA driver."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from paceline.backends.base import Device, DeviceKind, DeviceTensor, ModelSource, Slot, Targets
from paceline.backends.errors import DeviceLost, ExecutionError, OutOfMemory
from paceline.backends.onnx.backend import OnnxBackend
from paceline.backends.spec import Array, ModelSpec, TensorSpec
from tests import models
from tests.cuda import stand_in
from tests.host_accelerator import HostAccelerator

CPU = Device(DeviceKind.CPU)
ROW = 8
PAIR = ModelSpec(
    (TensorSpec("INPUT0", "FP32", (2,)), TensorSpec("INPUT1", "FP32", (2,))),
    (TensorSpec("OUTPUT0", "FP32", (2,)), TensorSpec("OUTPUT1", "FP32", (2,))),
    batched=True,
)
OPEN = ModelSpec((TensorSpec("INPUT0", "FP32", (-1,)),), (TensorSpec("OUTPUT0", "FP32", (-1,)),), batched=True)


def pair_model() -> onnx.ModelProto:
    """OUTPUT0 is INPUT0 minus INPUT1, OUTPUT1 is INPUT0 plus the sum of INPUT1 over the batch's rows: padding shows."""
    made = [models.tensor(f"{kind}{i}", "FP32", ["batch", 2]) for kind in ("INPUT", "OUTPUT") for i in (0, 1)]
    nodes = [
        onnx.helper.make_node("Sub", ["INPUT0", "INPUT1"], ["OUTPUT0"]),
        onnx.helper.make_node("ReduceSum", ["INPUT1", "AXES"], ["SUM"], keepdims=1),
        onnx.helper.make_node("Add", ["INPUT0", "SUM"], ["OUTPUT1"]),
    ]
    return models.model(nodes, made[:2], made[2:], [onnx.numpy_helper.from_array(np.array([0], np.int64), "AXES")])


def slots(folder: Path, model: onnx.ModelProto, spec: ModelSpec, accelerator: Any) -> Sequence[Slot]:
    path = models.write(model, folder / "model.onnx")
    backend = OnnxBackend(accelerators=lambda device: accelerator)
    instance: Any = backend.open(ModelSource("m", path), CPU).instance(spec, CPU)
    return instance.slots  # type: ignore[no-any-return]


class Gpu:
    """The GPU of a stand-in for the driver, and a client's memory on it."""

    def __init__(self, folder: Path) -> None:
        self.driver = stand_in.build(folder)
        self.accelerator = stand_in.accelerator(folder, self.driver)
        self.memory = stand_in.ClientMemory(self.driver, 4096)

    def on_device(self, array: Array, offset: int) -> DeviceTensor:
        self.memory.put(array.tobytes(), offset)
        return DeviceTensor(self.memory, self.memory.address + offset, array.dtype, array.shape)

    def target(self, size: int, offset: int) -> DeviceTensor:
        return DeviceTensor(self.memory, self.memory.address + offset, np.dtype(np.uint8), (size,))

    def copies(self) -> list[int]:
        return [self.driver.stand_in_copies(kind) for kind in (b"in", b"out", b"within")]


@pytest.fixture
def device(tmp_path: Path) -> Gpu:
    return Gpu(tmp_path)


def on_device(array: Array) -> DeviceTensor:
    """`array` as a tensor in the memory of a device that is the host."""
    return DeviceTensor(array, array.ctypes.data, array.dtype, array.shape)


def value(output: Any) -> list[Any]:
    """The elements of an output, be it an array or on a device that is the host."""
    if isinstance(output, DeviceTensor):
        data = (np.ctypeslib.ctypes.c_uint8 * output.nbytes).from_address(output.address)
        output = np.ndarray(output.shape, output.dtype, bytes(data))
    return output.tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("seed", range(40))
def test_execute_results_do_not_depend_on_where_inputs_and_outputs_are(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    slot = slots(tmp_path, pair_model(), PAIR, HostAccelerator())[int(rng.integers(2))]
    for _ in range(10):
        counts = [int(rng.integers(1, 4)) for _ in range(int(rng.integers(1, 5)))]
        padded = int(rng.choice([0, sum(counts), 16, 17]))
        arrays = [[rng.standard_normal((rows, 2)).astype(np.float32) for _ in (0, 1)] for rows in counts]
        requests = [[on_device(one) if rng.integers(2) else one for one in request] for request in arrays]
        places = [np.full((rows + 1, 2), 7, np.float32) for rows in counts for _ in (0, 1)]
        targets: list[Targets] = [
            {index: on_device(places[2 * number + index]) for index in (0, 1) if rng.integers(2)}
            for number in range(len(counts))
        ]
        if not any(targets) and rng.integers(2):
            targets = []
        expected = slot.execute(arrays, padded).results
        got = slot.execute(requests, padded, targets).results
        for number, (one, other) in enumerate(zip(expected, got, strict=True)):
            assert not isinstance(one, Exception)
            assert not isinstance(other, Exception)
            assert [value(output) for output in other] == [output.tolist() for output in one]
            wanted = targets[number] if targets else {}
            assert [isinstance(output, DeviceTensor) for output in other] == [index in wanted for index in (0, 1)]
            for index in (0, 1):
                place = places[2 * number + index]
                assert place[-1].tolist() == [7, 7]  # what is beyond the output stays unchanged
                assert place[:-1].tolist() == (one[index].tolist() if index in wanted else [[7, 7]] * counts[number])


def test_execute_on_the_device_copies_nothing_to_the_host(tmp_path: Path, device: Gpu) -> None:
    slot = slots(tmp_path, models.identity("FP32", ("batch", 2)), one_of(2), device.accelerator)[0]
    x = np.arange(6, dtype=np.float32).reshape(3, 2)
    requests = [[device.on_device(x[:2], 64)], [device.on_device(x[2:], 128)]]
    targets = [{0: device.target(2 * ROW, 512)}, {0: device.target(ROW, 1024)}]
    results = slot.execute(requests, 8, targets).results
    assert [[one.shape for one in result] for result in results if not isinstance(result, Exception)] == [
        [(2, 2)], [(1, 2)]
    ]  # fmt: skip
    # Two requests, five rows of padding in three copies, two results.
    assert device.copies() == [0, 0, 2 + 3 + 2]
    assert device.memory.get(2 * ROW, 512) == x[:2].tobytes()
    assert device.memory.get(2 * ROW, 1024) == x[2:].tobytes() + bytes(ROW)


def one_of(*dims: int) -> ModelSpec:
    return ModelSpec((TensorSpec("INPUT0", "FP32", dims),), (TensorSpec("OUTPUT0", "FP32", dims),), batched=True)


def test_execute_output_that_overwrites_an_input_is_correct(tmp_path: Path, device: Gpu) -> None:
    slot = slots(tmp_path, negative(), one_of(2), device.accelerator)[0]
    x = np.arange(1, 7, dtype=np.float32).reshape(3, 2)
    tensor = device.on_device(x, 0)
    for sign in (-1, 1, -1):
        slot.execute([[tensor]], 4, [{0: device.target(3 * ROW, 0)}])
        assert device.memory.get(3 * ROW) == (sign * x).tobytes()


def negative() -> onnx.ModelProto:
    node = onnx.helper.make_node("Neg", ["INPUT0"], ["OUTPUT0"])
    tensors = [models.tensor(name, "FP32", ["batch", 2]) for name in ("INPUT0", "OUTPUT0")]
    return models.model([node], tensors[:1], tensors[1:])


def test_outputs_of_unknown_size_stay_on_the_device(tmp_path: Path, device: Gpu) -> None:
    slot = slots(tmp_path, models.identity("FP32", ("batch", "n")), OPEN, device.accelerator)[0]
    x = np.arange(10, dtype=np.float32).reshape(2, 5)
    for size, fits in ((20, True), (19, False), (40, True)):
        targets = [{0: device.target(size, 512)}, {0: device.target(20, 1024)}]
        device.memory.put(bytes(2048), 512)
        one, two = slot.execute([[device.on_device(x[:1], 0)], [x[1:]]], 4, targets).results
        assert isinstance(one, list)
        assert isinstance(two, list)
        assert isinstance(one[0], DeviceTensor) is fits
        assert (one[0].shape, isinstance(two[0], DeviceTensor)) == ((1, 5), True)
        assert device.memory.get(24, 512) == (x[:1].tobytes() if fits else bytes(20)) + bytes(4)
        assert device.memory.get(20, 1024) == x[1:].tobytes()
        if not fits:
            assert one[0].tolist() == x[:1].tolist()


def test_execute_writes_none_of_a_requests_outputs_if_one_of_them_has_no_room(tmp_path: Path, device: Gpu) -> None:
    slot = slots(tmp_path, pair_model(), PAIR, device.accelerator)[0]
    x = np.ones((2, 2), np.float32)
    (result,) = slot.execute([[x, x]], 0, [{0: device.target(2 * ROW, 0), 1: device.target(2 * ROW - 1, 64)}]).results
    assert isinstance(result, list)
    assert [one.tolist() for one in result] == [[[0, 0]] * 2, [[3, 3]] * 2]
    assert device.memory.get(128) == bytes(128)


def test_execute_of_tensors_that_the_model_keeps_in_host_memory_is_correct(tmp_path: Path) -> None:
    # The device's memory has another name, so none of the model's tensors are in it.
    slot, other = slots(tmp_path, pair_model(), PAIR, HostAccelerator("Device"))
    x, y = (np.arange(6, dtype=np.float32).reshape(3, 2) + n for n in (0, 7))
    expected = other.execute([[x[:1], y[:1]], [x[1:], y[1:]]], 5).results
    for requests in (
        [[on_device(x[:1]), y[:1]], [on_device(x[1:]), on_device(y[1:])]],
        [[x[:1], on_device(y[:1])], [on_device(x[1:]), y[1:]]],
    ):
        got = slot.execute(requests, 5, [{0: on_device(np.zeros((1, 2), np.float32))}, {}]).results
        assert [[value(output) for output in one] for one in got if not isinstance(one, Exception)] == [
            [output.tolist() for output in one] for one in expected if not isinstance(one, Exception)
        ]


def test_execute_without_batch_axis(tmp_path: Path, device: Gpu) -> None:
    for dims in ((), (3,), (2, 2)):
        spec = ModelSpec((TensorSpec("INPUT0", "FP32", dims),), (TensorSpec("OUTPUT0", "FP32", dims),))
        slot = slots(tmp_path, models.identity("FP32", dims), spec, device.accelerator)[0]
        x = np.arange(5, 5 + np.prod(dims, dtype=int), dtype=np.float32).reshape(dims)
        (result,) = slot.execute([[device.on_device(x, 0)]], 0, [{0: device.target(64, 256)}]).results
        assert not isinstance(result, Exception)
        assert result[0].shape == dims
        assert device.memory.get(x.nbytes, 256) == x.tobytes()


def test_execute_tensors_without_elements(tmp_path: Path, device: Gpu) -> None:
    slot = slots(tmp_path, models.identity("FP32", ("batch", "n")), OPEN, device.accelerator)[0]
    x = np.zeros((2, 0), np.float32)
    (result,) = slot.execute([[device.on_device(x, 0)]], 4, [{0: device.target(64, 256)}]).results
    assert not isinstance(result, Exception)
    assert result[0].shape == (2, 0)


def test_execute_mismatched_requests_on_the_device_fail_and_the_slot_keeps_working(tmp_path: Path, device: Gpu) -> None:
    slot = slots(tmp_path, negative(), one_of(2), device.accelerator)[0]
    for odd in (np.zeros((1, 3), np.float32), np.zeros((1, 2), np.float64)):
        with pytest.raises(ExecutionError, match="requests of one batch don't fit together"):
            slot.execute([[device.on_device(np.zeros((1, 2), np.float32), 0)], [device.on_device(odd, 64)]])
    (result,) = slot.execute([[device.on_device(np.ones((1, 2), np.float32), 0)]]).results
    assert not isinstance(result, Exception)
    assert result[0].tolist() == [[-1, -1]]


@pytest.mark.parametrize(("code", "kind"), [(1, ExecutionError), (2, OutOfMemory), (700, DeviceLost)])
def test_execute_failed_copy_of_a_clients_memory_raises_the_error_for_its_code(
    code: int, kind: type[ExecutionError], tmp_path: Path, device: Gpu
) -> None:
    slot = slots(tmp_path, negative(), one_of(2), device.accelerator)[0]
    x = np.ones((1, 2), np.float32)
    for requests, targets in (([[device.on_device(x, 0)]], []), ([[x]], [{0: device.target(ROW, 0)}])):
        device.driver.stand_in_fail(b"cuMemcpyDtoDAsync", code)
        with pytest.raises(ExecutionError, match=f"cuMemcpyDtoDAsync_v2 returned {code}") as caught:
            slot.execute(requests, 0, targets)
        assert type(caught.value) is kind
        (result,) = slot.execute(requests, 0, targets).results
        assert not isinstance(result, Exception)
        assert result[0].shape == (1, 2)
