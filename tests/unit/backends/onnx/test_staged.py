"""Batches staged in our own buffers: on the host, whose copies happen as late as allowed, and with a stand-in for the
CUDA driver. What a real GPU does isn't tested here."""

from __future__ import annotations

import gc
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from paceline.backends.base import Device, DeviceKind, ModelSource, Slotted
from paceline.backends.cuda.accelerator import CudaAccelerator, Event
from paceline.backends.errors import DeviceLost, ExecutionError, InstanceError, OutOfMemory
from paceline.backends.onnx.backend import OnnxBackend
from paceline.backends.onnx.instance import OnnxInstance
from paceline.backends.onnx.staged import StagedInstance
from paceline.backends.spec import Array, ModelSpec, TensorSpec
from tests import models, odd_models
from tests.cuda import stand_in
from tests.host_accelerator import HostAccelerator

CPU = Device(DeviceKind.CPU)


def spec_of(given: str, taken: str, size: int, inputs: int = 1, outputs: int = 1) -> ModelSpec:
    return ModelSpec(
        tuple(TensorSpec(f"INPUT{i}", given, (size,)) for i in range(inputs)),
        tuple(TensorSpec(f"OUTPUT{i}", taken, (size,)) for i in range(outputs)),
        batched=True,
    )


SPEC = spec_of("FP32", "FP32", 2)


def opened(folder: Path, model: onnx.ModelProto, spec: ModelSpec, accelerator: CudaAccelerator) -> Any:
    path = models.write(model, folder / "model.onnx")
    backend = OnnxBackend(accelerators=lambda device: accelerator)
    return backend.open(ModelSource("m", path), CPU).instance(spec, CPU)


def identity(folder: Path, accelerator: CudaAccelerator) -> StagedInstance:
    instance = opened(folder, models.identity("FP32", ("batch", 2)), SPEC, accelerator)
    assert isinstance(instance, StagedInstance)
    return instance


def rows(count: int, value: float = 1) -> tuple[Array]:
    return (np.full((count, 2), value, np.float32),)


def test_instance_has_two_slots(tmp_path: Path) -> None:
    instance = identity(tmp_path, HostAccelerator())
    assert isinstance(instance, Slotted)
    assert [slot.device for slot in instance.slots] == [CPU, CPU]


def test_execute_in_steady_state_allocates_nothing(tmp_path: Path) -> None:
    accelerator = HostAccelerator()
    instance = identity(tmp_path, accelerator)
    for slot in instance.slots:
        slot.execute([rows(8)])
    allocations = accelerator.allocations
    for count in range(1, 9):
        for slot in instance.slots:
            assert slot.execute([rows(1, count)] * count).results[-1][0].tolist() == [[count, count]]
    assert accelerator.allocations == allocations


def test_execute_of_batches_that_grow_row_by_row_rarely_allocates(tmp_path: Path) -> None:
    accelerator = HostAccelerator()
    slot = identity(tmp_path, accelerator).slots[0]
    for count in range(1, 2001):
        slot.execute([rows(count)])
    # Four buffers, from 256 bytes to 16000 by doubling.
    assert accelerator.allocations <= 4 * 8


def test_execute_results_that_are_held_stay_unchanged(tmp_path: Path) -> None:
    instance = identity(tmp_path, HostAccelerator())
    held = [slot.execute([rows(1, n), rows(2, -n)]).results for n in range(20) for slot in instance.slots]
    for number, results in enumerate(held):
        n = number // 2
        assert [result[0].tolist() for result in results] == [[[n, n]], [[-n, -n]] * 2]


def test_last_view_of_an_output_frees_its_memory(tmp_path: Path) -> None:
    accelerator = HostAccelerator()
    slot = identity(tmp_path, accelerator).slots[0]
    view = slot.execute([rows(1, 5), rows(3, 6)]).results[1][0].reshape(-1)[2:].view(np.uint32)
    place = view.__array_interface__["data"][0]
    others = [slot.execute([rows(4, 7)]).results[0][0] for _ in range(3)]
    assert view.view(np.float32).tolist() == [6, 6, 6, 6]
    allocations = accelerator.allocations
    del view
    again = slot.execute([rows(4, 8)]).results[0][0]
    assert accelerator.allocations == allocations
    assert again.__array_interface__["data"][0] == place - 16
    assert all(other.tolist() == [[7, 7]] * 4 for other in others)


def test_execute_after_many_results_were_held_keeps_few_of_their_buffers(tmp_path: Path) -> None:
    driver = stand_in.build(tmp_path)
    slot = identity(tmp_path, stand_in.accelerator(tmp_path, driver)).slots[0]
    held = [slot.execute([rows(1)]).results for _ in range(50)]
    assert driver.stand_in_pinned() == 51  # and the input's
    del held
    slot.execute([rows(1)])
    assert driver.stand_in_pinned() < 12


def test_execute_padding_repeats_the_last_row_and_is_cut_off(tmp_path: Path) -> None:
    # The mean over the batch shows what the model saw.
    model = models.model(
        [onnx.helper.make_node("ReduceMean", ["INPUT0", "AXES"], ["MEAN"], keepdims=1),
         onnx.helper.make_node("Sub", ["INPUT0", "MEAN"], ["OUTPUT0"])],
        [models.tensor("INPUT0", "FP32", ["batch", 2])],
        [models.tensor("OUTPUT0", "FP32", ["batch", 2])],
        [onnx.numpy_helper.from_array(np.array([0], np.int64), "AXES")],
    )  # fmt: skip
    slot = opened(tmp_path, model, SPEC, HostAccelerator()).slots[0]
    results = slot.execute([rows(1, 0), rows(1, 4)], 4).results
    assert [result[0].tolist() for result in results] == [[[-3, -3]], [[1, 1]]]


def test_execute_with_changing_sizes_and_free_dims_is_always_correct(tmp_path: Path) -> None:
    instance = opened(tmp_path, models.identity("FP32", ("batch", "n")), spec_of("FP32", "FP32", -1), HostAccelerator())
    assert isinstance(instance, StagedInstance)
    rng = np.random.default_rng(1)
    for _ in range(100):
        x = rng.standard_normal((int(rng.integers(1, 5)), int(rng.integers(0, 7)))).astype(np.float32)
        slot = instance.slots[int(rng.integers(2))]
        one, two = slot.execute([(x,), (-x,)]).results
        np.testing.assert_array_equal(one[0], x)
        np.testing.assert_array_equal(two[0], -x)


def test_execute_requests_that_do_not_fit_together_fail_and_the_slot_keeps_working(tmp_path: Path) -> None:
    slot = identity(tmp_path, HostAccelerator()).slots[0]
    with pytest.raises(ExecutionError, match="requests of one batch don't fit together"):
        slot.execute([rows(1), (np.zeros((1, 3), np.float32),)])
    with pytest.raises(ExecutionError, match="requests of one batch don't fit together"):
        slot.execute([rows(1), (np.zeros((1, 2), np.float64),)])
    assert slot.execute([rows(2, 3)]).results[0][0].tolist() == [[3, 3]] * 2


def test_execute_without_requests_is_a_value_error(tmp_path: Path) -> None:
    slot = identity(tmp_path, HostAccelerator()).slots[0]
    with pytest.raises(ValueError, match="expected one or more requests, got 0"):
        slot.execute([])


def test_execute_of_rows_that_were_written_to_the_slots_buffer_is_correct(tmp_path: Path) -> None:
    slot = identity(tmp_path, HostAccelerator()).slots[0]
    for count in (2, 300, 1):
        room = slot.buffer(0, (count, 2))
        room[...] = count
        again = slot.buffer(0, (count, 2))
        assert again.ctypes.data == room.ctypes.data
        assert slot.execute([(room,)]).results[0][0].tolist() == [[count, count]] * count
        # Padded, of another size, or not alone: it is treated as any other array.
        assert slot.execute([(room.copy(),)], count + 3).results[0][0].tolist() == [[count, count]] * count


def test_buffer_that_cannot_be_allocated_raises_out_of_memory(tmp_path: Path) -> None:
    driver = stand_in.build(tmp_path)
    slot = identity(tmp_path, stand_in.accelerator(tmp_path, driver)).slots[0]
    driver.stand_in_fail(b"cuMemHostAlloc", 2)
    with pytest.raises(OutOfMemory):
        slot.buffer(0, (4, 2))
    slot.buffer(0, (4, 2))[...] = 3
    assert slot.execute([(slot.buffer(0, (4, 2)),)]).results[0][0].tolist() == [[3, 3]] * 4


def test_execute_scalars_without_batch_axis(tmp_path: Path) -> None:
    spec = ModelSpec((TensorSpec("INPUT0", "FP32", ()),), (TensorSpec("OUTPUT0", "FP32", ()),))
    instance = opened(tmp_path, models.identity("FP32", ()), spec, HostAccelerator())
    assert isinstance(instance, StagedInstance)
    assert instance.execute([(np.array(3, np.float32),)]).results[0][0].tolist() == 3


@pytest.mark.parametrize("shapes", [[(2, 3), (3,), (), (0, 2)], [(2, 3), (1,), (2, 1, 2)]], ids=["whole", "rows"])
def test_execute_tensors_of_any_rank(tmp_path: Path, shapes: list[tuple[int, ...]]) -> None:
    batched = () not in shapes
    spec = ModelSpec(
        (TensorSpec("INPUT0", "FP32", (), any_rank=True),),
        (TensorSpec("OUTPUT0", "FP32", (), any_rank=True),),
        batched=batched,
    )
    instance = opened(tmp_path, odd_models.shapeless(), spec, HostAccelerator())
    assert isinstance(instance, StagedInstance)
    for shape in shapes * 2:
        one = np.full(shape, 3, np.float32)
        results = instance.execute([(one,)] * (3 if batched else 1)).results
        for (array,) in results:
            np.testing.assert_array_equal(array, -one)


@pytest.mark.parametrize(
    ("model", "spec", "reason"),
    [
        (models.identity("BYTES", ("batch", 2)), spec_of("BYTES", "BYTES", 2), "'INPUT0' is text"),
        (
            models.identity("FP32", ("n",)),
            ModelSpec(
                (TensorSpec("INPUT0", "FP32", (-1,), ragged=True),),
                (TensorSpec("OUTPUT0", "FP32", ()),),
                batched=True,
            ),
            "it has tensors that aren't stacked by rows",
        ),
    ],
)
def test_instance_that_cannot_be_staged_is_a_plain_one(
    model: onnx.ModelProto, spec: ModelSpec, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "paceline.backends.onnx"):
        instance = opened(tmp_path, model, spec, HostAccelerator())
    assert isinstance(instance, OnnxInstance)
    assert [record.getMessage() for record in caplog.records] == [
        f"model 'm': ONNX Runtime copies its tensors itself, as {reason}"
    ]


def test_closed_instance_refuses_batches_and_has_freed_all_memory(tmp_path: Path) -> None:
    driver = stand_in.build(tmp_path)
    instance = identity(tmp_path, stand_in.accelerator(tmp_path, driver))
    instance.execute([rows(2)])
    assert (driver.stand_in_streams(), driver.stand_in_events()) == (3, 6)
    instance.close()
    with pytest.raises(ExecutionError, match="the instance is closed"):
        instance.execute([rows(2)])
    del instance
    gc.collect()
    left = [driver.stand_in_streams, driver.stand_in_events, driver.stand_in_pinned, driver.stand_in_device]
    assert [count() for count in left] == [0, 0, 0, 0]
    assert driver.stand_in_retained() == 0


@pytest.mark.parametrize(
    "call",
    [
        "cuCtxSetCurrent", "cuMemHostAlloc", "cuMemAlloc", "cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", "cuEventRecord",
        "cuEventSynchronize", "cuStreamWaitEvent",
    ],
)  # fmt: skip
def test_execute_driver_out_of_memory_is_reported_and_the_slot_keeps_working(call: str, tmp_path: Path) -> None:
    driver = stand_in.build(tmp_path)
    slot = identity(tmp_path, stand_in.accelerator(tmp_path, driver)).slots[0]
    slot.execute([rows(1)])
    driver.stand_in_fail(call.encode(), 2)
    refusal = rf"the NVIDIA driver failed: {call}\w* returned 2 \(CUDA_ERROR_OUT_OF_MEMORY\)"
    with pytest.raises(OutOfMemory, match=refusal):
        slot.execute([rows(200)])  # for which all buffers have to grow
    for count in (1, 300):
        assert slot.execute([rows(count, 9)]).results[0][0].tolist() == [[9, 9]] * count


@pytest.mark.parametrize(
    ("code", "kind"), [(700, DeviceLost), (719, DeviceLost), (999, DeviceLost), (1, InstanceError)]
)
def test_execute_driver_failure_distinguishes_a_lost_device_from_others(
    code: int, kind: type[InstanceError], tmp_path: Path
) -> None:
    driver = stand_in.build(tmp_path)
    slot = identity(tmp_path, stand_in.accelerator(tmp_path, driver)).slots[0]
    driver.stand_in_fail(b"cuEventSynchronize", code)
    with pytest.raises(InstanceError, match=f"cuEventSynchronize returned {code}") as caught:
        slot.execute([rows(1)])
    assert type(caught.value) is kind


class Failing:
    """`session`, whose runs fail with `text`."""

    def __init__(self, session: Any, text: str) -> None:
        self._session, self._text = session, text

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run_with_iobinding(self, binding: Any, options: Any) -> None:
        raise RuntimeError(self._text)


@pytest.mark.parametrize(("code", "kind"), [(719, DeviceLost), (900, InstanceError)])
def test_driver_tells_a_loss_that_a_library_noticed_first(code: int, kind: type[InstanceError], tmp_path: Path) -> None:
    driver = stand_in.build(tmp_path)
    slot = identity(tmp_path, stand_in.accelerator(tmp_path, driver)).slots[0]
    opened = slot._shared.opened
    opened.session = Failing(opened.session, "CUBLAS failure 13: CUBLAS_STATUS_EXECUTION_FAILED ; GPU=0 ; expr=f();")
    driver.stand_in_fail(b"cuStreamSynchronize", code)
    with pytest.raises(InstanceError) as caught:
        slot.execute([rows(1)])
    assert type(caught.value) is kind
    assert "CUBLAS failure 13" in str(caught.value if kind is InstanceError else caught.value.__cause__)


@pytest.mark.parametrize(
    ("text", "free_mib", "kind"),
    [
        ("CUBLAS failure 1: CUBLAS_STATUS_NOT_INITIALIZED ; GPU=0 ; expr=f();", 200, OutOfMemory),
        ("CUDNN failure 5000: CUDNN_STATUS_EXECUTION_FAILED ; GPU=0 ; expr=f();", 200, OutOfMemory),
        ("Failed to initialize CUDNN Frontend: CUDNN_FE failure 11: CUDNN_BACKEND_API_FAILED", 200, OutOfMemory),
        ("Failed to initialize CUDNN Frontend: CUDNN_FE failure 11: CUDNN_BACKEND_API_FAILED", 300, InstanceError),
        ("CUBLAS failure 7: CUBLAS_STATUS_INVALID_VALUE ; GPU=0 ; expr=f();", 200, InstanceError),
    ],
)
def test_library_failure_with_little_memory_is_a_shortage(
    text: str, free_mib: int, kind: type[InstanceError], tmp_path: Path
) -> None:
    accelerator = stand_in.accelerator(tmp_path)
    slot = identity(tmp_path, accelerator).slots[0]
    opened = slot._shared.opened
    opened.session = Failing(opened.session, text)
    slot._shared.accelerator.enter()
    taken = accelerator.device_memory(accelerator.free_bytes() - free_mib * 2**20)
    with pytest.raises(InstanceError) as caught:
        slot.execute([rows(1)])
    assert type(caught.value) is kind
    assert text in str(caught.value)
    del taken


class _LockstepAccelerator(HostAccelerator):
    """A slot that has queued its copies waits until the other slot has, too: both always work at the same time, or the
    test fails. `threads` are those that wait."""

    def __init__(self) -> None:
        super().__init__()
        self.barrier = threading.Barrier(2, timeout=30)
        self.threads: set[threading.Thread] = set()
        self._streams = 0

    def stream(self) -> Any:
        self._streams += 1
        stream = super().stream()
        # The second of the three is for computing, and only one slot at a time may queue there.
        return _LockstepStream(stream, self) if self._streams % 3 != 2 else stream


class _LockstepStream:
    handle = 0

    def __init__(self, stream: Any, accelerator: _LockstepAccelerator) -> None:
        self.copy_in, self.copy_out = stream.copy_in, stream.copy_out
        self.wait, self.synchronize = stream.wait, stream.synchronize
        self._stream, self._accelerator = stream, accelerator

    def record(self, event: Event) -> None:
        self._stream.record(event)
        if threading.current_thread() in self._accelerator.threads:
            self._accelerator.barrier.wait()


def test_execute_of_both_slots_at_the_same_time_keeps_batches_separate(tmp_path: Path) -> None:
    accelerator = _LockstepAccelerator()
    instance = identity(tmp_path, accelerator)
    answers: dict[int, list[Sequence[Any]]] = {0: [], 1: []}

    def run(number: int) -> None:
        for value in range(100 * number, 100 * number + 20):
            answers[number].append(instance.slots[number].execute([rows(1, value), rows(2, -value)]).results)

    accelerator.threads = {threading.Thread(target=run, args=(number,)) for number in (0, 1)}
    for thread in accelerator.threads:
        thread.start()
    for thread in accelerator.threads:
        thread.join(60)
    for number, batches in answers.items():
        expected = [[[[v, v]], [[-v, -v]] * 2] for v in range(100 * number, 100 * number + 20)]
        assert [[result[0].tolist() for result in results] for results in batches] == expected


def test_execute_padded_because_of_an_outdated_plan_keeps_rows_written_to_the_slots_buffer(
    tmp_path: Path,
) -> None:
    slot = identity(tmp_path, stand_in.accelerator(tmp_path, stand_in.build(tmp_path))).slots[0]
    slot.execute([rows(32)])
    failed = ExecutionError("onnx runtime error 6: running Conv node. Name:'c' Status Message: why")
    slot._shared.opened.plans.failed(failed, 32)
    room = slot.buffer(0, (32, 2))
    room[:] = given = np.arange(64, dtype=np.float32).reshape(32, 2)
    np.testing.assert_array_equal(slot.execute([(room,)]).results[0][0], given)
