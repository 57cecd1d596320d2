"""Requests of different sizes in one batch: what is refused, what isn't copied, and the ways to a device and to a
process. `tests/property/test_filling.py` compares the rest with plain numpy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.backends.base import Device, DeviceTensor, ModelSource
from paceline.backends.errors import ExecutionError, UnfitOutputs
from paceline.backends.lengths import filling
from paceline.backends.onnx.backend import OnnxBackend
from paceline.backends.ragged import batch_runner
from paceline.backends.spec import Array, Length, ModelSpec, Tensors, TensorSpec
from tests import models
from tests.cuda import stand_in
from tests.host_accelerator import HostAccelerator
from tests.unit.backends.onnx_models import CPU

IDS, MASK = TensorSpec("ids", "FP32", (-1,), fill=7), TensorSpec("mask", "INT64", (-1,))
WORDS = Length("words", ((0, 1), (1, 1)), ((0, 1),))
SPEC = ModelSpec((IDS, MASK), (replace(IDS, name="x"),), batched=True, lengths=(WORDS,))


def request(*sizes: int, rows: int = 1) -> Tensors:
    """One input for each size."""
    return [
        np.arange(1, rows * size + 1, dtype=dtype).reshape(rows, size)
        for size, dtype in zip(sizes, (np.float32, np.int64), strict=False)
    ]


def run(requests: Sequence[Tensors], outputs: Any = lambda inputs: inputs[:1], spec: ModelSpec = SPEC) -> list[Any]:
    return list(batch_runner(spec)(requests, outputs).results)


def test_requests_of_common_sizes_are_not_copied() -> None:
    seen: list[Array] = []
    (result,) = run([request(5, 5)], lambda inputs: seen.append(inputs[0]) or inputs[:1])

    assert np.shares_memory(result[0], seen[0])


def test_one_request_is_filled_up_to_its_step() -> None:
    seen: list[Array] = []
    spec = replace(SPEC, lengths=(replace(WORDS, sizes=(8,)),))
    (result,) = run([request(5, 5)], lambda inputs: seen.append(inputs[0]) or inputs[:1], spec)

    assert seen[0].tolist() == [[1, 2, 3, 4, 5, 7, 7, 7]]
    assert result[0].tolist() == [[1, 2, 3, 4, 5]]


def test_results_are_views_of_one_output() -> None:
    output = np.zeros((3, 9), np.float32)
    results = run([request(4, 4), request(9, 9, rows=2)], lambda inputs: [output])

    assert [result[0].shape for result in results] == [(1, 4), (2, 9)]
    assert all(np.shares_memory(result[0], output) for result in results)


def test_request_of_two_sizes_for_one_length_is_refused() -> None:
    with pytest.raises(
        ExecutionError, match=re.escape("one size in the axes of length 'words', got ids[1]: 5, mask[1]: 6")
    ):
        run([request(5, 6)])


def test_requests_that_differ_in_other_axes_are_refused() -> None:
    spec = replace(SPEC, lengths=(replace(WORDS, inputs=((0, 1),)),))
    with pytest.raises(ExecutionError, match=r"don't fit together: input 1 has the shapes \[\[5\], \[6\]\]"):
        run([request(5, 5), request(6, 6)], spec=spec)


@pytest.mark.parametrize("shape", [(2, 5), (2, 7)])
def test_output_of_another_than_the_common_size_is_told(shape: tuple[int, ...]) -> None:
    message = (
        f"output 'x': expected size 6 in axis 1, to which the inputs' length 'words' was filled up, got {list(shape)}"
    )
    with pytest.raises(UnfitOutputs, match=re.escape(message.replace("got [", "got shape ["))):
        run([request(5, 5), request(6, 6)], lambda inputs: [np.zeros(shape, np.float32)])


def test_large_rows_are_filled_up_as_small_ones() -> None:
    seen: list[Array] = []
    spec = ModelSpec((TensorSpec("x", "FP32", (-1, 300), fill=2),), (), True, lengths=(Length("frames", ((0, 1),)),))
    rows = [np.random.default_rng(size).random((2, size, 300), np.float32) for size in (3, 4)]
    run([[one] for one in rows], lambda inputs: seen.append(inputs[0]) or [], spec)

    expected = np.full((4, 4, 300), 2, np.float32)
    expected[:2, :3], expected[2:] = rows
    np.testing.assert_array_equal(seen[0], expected)


@pytest.mark.parametrize(
    ("datatype", "fill", "element"),
    [
        ("INT8", -128, -128),
        ("FP16", 0.5, 0.5),
        ("FP32", float("-inf"), float("-inf")),
        ("BF16", 1.0, 0x3F80),
        ("BF16", -3.39e38, 0xFF80 - 1),
        ("BOOL", 1, True),
        ("BYTES", 0, b""),
    ],
)
def test_fill_is_an_element_of_the_datatype(datatype: str, fill: float, element: object) -> None:
    assert filling(TensorSpec("x", datatype, (), fill=fill)) == element


@pytest.mark.parametrize(
    ("datatype", "fill"),
    [("UINT8", -1), ("INT8", 0.5), ("INT64", float("nan")), ("FP16", 1e6), ("BF16", 3.4e39), ("BOOL", 2), ("BYTES", 1)],
)
def test_fill_that_a_datatype_cannot_hold_is_refused(datatype: str, fill: float) -> None:
    with pytest.raises(ValueError, match=f"^expected a fill that {datatype} can hold, got {re.escape(str(fill))}$"):
        filling(TensorSpec("x", datatype, (), fill=fill))


NEXT = ModelSpec(
    (TensorSpec("INPUT0", "FP32", (-1,), fill=7),),
    (TensorSpec("OUTPUT0", "FP32", (-1,)),),
    batched=True,
    lengths=(Length("words", ((0, 1),), ((0, 1),)),),
)


@pytest.mark.parametrize("memory", ["Cpu", "elsewhere"])
@pytest.mark.parametrize("on_device", [(), (0,), (0, 1, 2)])
def test_slot_fills_up_what_lies_on_the_device(memory: str, on_device: tuple[int, ...], tmp_path: Path) -> None:
    arrays = [np.random.default_rng(n).random(shape, np.float32) for n, shape in enumerate([(1, 3), (2, 5), (1, 2)])]
    path = models.write(models.identity("FP32", ("batch", "words")), tmp_path / "model.onnx")
    accelerator: Any = HostAccelerator(memory)
    instance: Any = (
        OnnxBackend(accelerators=lambda _: accelerator).open(ModelSource("m", path), CPU).instance(NEXT, CPU)
    )
    requests = [
        [DeviceTensor(one, one.ctypes.data, one.dtype, one.shape) if number in on_device else one]
        for number, one in enumerate(arrays)
    ]
    for slot in instance.slots:
        results = slot.execute(requests, 5).results

        assert [result[0].tolist() for result in results] == [one.tolist() for one in arrays]


def test_slot_leaves_cut_outputs_where_requests_want_them(tmp_path: Path) -> None:
    driver = stand_in.build(tmp_path)
    path = models.write(models.identity("FP32", ("batch", "words")), tmp_path / "model.onnx")
    accelerator: Any = stand_in.accelerator(tmp_path, driver)
    instance: Any = (
        OnnxBackend(accelerators=lambda _: accelerator).open(ModelSource("m", path), CPU).instance(NEXT, CPU)
    )
    memory, array = stand_in.ClientMemory(driver, 4096), np.arange(6, dtype=np.float32).reshape(2, 3)
    target = {0: DeviceTensor(memory, memory.address, np.dtype(np.uint8), (24,))}

    left, other = instance.slots[0].execute([[array], [np.ones((1, 5), np.float32)]], targets=[target, {}]).results

    assert left[0].shape == (2, 3)
    assert memory.get(24) == array.tobytes()
    assert other[0].tolist() == [[1] * 5]


def test_model_in_its_own_process_fills_up_requests(tmp_path: Path) -> None:
    path = models.write(models.identity("FP32", ("batch", "words")), tmp_path / "model.onnx")
    source = ModelSource("m", path, parameters={"paceline.own_process": "true"})
    model = OnnxBackend().open(source, Device())
    instance = model.instance(NEXT, Device())
    try:
        arrays = [np.ones((1, 3), np.float32), np.ones((2, 900), np.float32)]
        results = instance.execute([[one] for one in arrays], 4).results
    finally:
        instance.close()
        model.close()

    assert [np.asarray(result[0]).tolist() for result in results if not isinstance(result, Exception)] == [
        one.tolist() for one in arrays
    ]
