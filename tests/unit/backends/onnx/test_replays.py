"""What replays of graphs are compared with."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from paceline.backends.base import Execution
from paceline.backends.errors import ExecutionError
from paceline.backends.onnx.shared import GraphUse, check_replays
from paceline.backends.spec import ModelSpec, Tensors, TensorSpec
from tests.wire import Array

SPEC = ModelSpec(
    tuple(TensorSpec(datatype.lower(), datatype, (2,)) for datatype in ("FP32", "FP16", "BF16", "INT64")),
    (TensorSpec("x", "FP32", (2,)),),
    batched=True,
)
TYPES = (np.float32, np.float16, np.uint16, np.int64)


class Slot:
    """Computes `computed`, and `replayed` from a graph. `executed` is what it was given, with `use`."""

    def __init__(self, computed: Array, replayed: Array) -> None:
        self._results = {GraphUse.NONE: computed, GraphUse.REPLAY: replayed}
        self.executed: list[tuple[Tensors, int, GraphUse]] = []

    def execute(self, requests: Any, padded_rows: int, use: GraphUse = GraphUse.REPLAY) -> Execution:
        (request,) = requests
        self.executed.append((request, padded_rows, use))
        return Execution([[self._results[use]]], 0, 0, 0)


def changed(spec: ModelSpec, request: Tensors, padded_rows: int) -> Tensors:
    """The request that a graph captured for `request` is checked with."""
    slot = Slot(np.ones(()), np.ones(()))
    check_replays(slot.execute, spec, [request], padded_rows)
    (other, *_), (same, *_), (again, *_) = slot.executed
    assert same is request
    assert again is other
    assert [use for *_, use in slot.executed] == [GraphUse.NONE, GraphUse.NONE, GraphUse.REPLAY]
    assert {rows for _, rows, _ in slot.executed} == {padded_rows}
    return other


@pytest.mark.parametrize(("padded_rows", "rows"), [(0, 2), (3, 3)])
def test_changed_requests_have_other_floats_but_the_same_integers(padded_rows: int, rows: int) -> None:
    request = [np.array([[0, 0], [3, 4]], dtype) for dtype in TYPES]
    floats, halves, shorts, integers = changed(SPEC, request, padded_rows)
    assert [one.shape for one in (floats, halves, shorts, integers)] == [(rows, 2)] * 4
    assert [one.dtype for one in (floats, halves, shorts, integers)] == [*map(np.dtype, TYPES)]
    for array in (floats, halves, (shorts.astype(np.uint32) << 16).view(np.float32)):
        assert len(np.unique(array)) == 2 * rows
        assert 0 <= array.min() <= array.max() < 1
    assert integers.tolist() == [[3, 4]] * rows


def test_changed_request_of_a_model_without_batch_axis_keeps_its_shape() -> None:
    spec = ModelSpec((TensorSpec("a", "FP32", (2, 3)),), SPEC.outputs)
    (array,) = changed(spec, [np.zeros((2, 3), np.float32)], 0)
    assert array.shape == (2, 3)


@pytest.mark.parametrize(
    ("replayed", "is_same"),
    [([[1, 2]], True), ([[1, 2.0001]], True), ([[1, 3]], False), ([[1, np.nan]], False)],
)
def test_replayed_results_may_differ_by_rounding_only(replayed: Array, is_same: bool) -> None:
    slot = Slot(*(np.array(values, np.float32) for values in ([[1, 2]], replayed)))
    request = [np.ones((1, 2), dtype) for dtype in TYPES]
    if is_same:
        check_replays(slot.execute, SPEC, [request], 1)
    else:
        with pytest.raises(ExecutionError, match="output 'x' of a replayed graph is not what the model computes"):
            check_replays(slot.execute, SPEC, [request], 1)


def test_replayed_results_may_be_scalars_or_empty() -> None:
    request = [np.ones((1, 2), dtype) for dtype in TYPES]
    for shape in ((), (0,), (0, 7), (2, 0)):
        slot = Slot(np.ones(shape, np.float32), np.ones(shape, np.float32))
        check_replays(slot.execute, SPEC, [request], 1)
