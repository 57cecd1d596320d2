"""What replays of graphs are compared with."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.backends.errors import ExecutionError
from paceline.backends.onnx.shared import changed, check_replayed
from paceline.backends.spec import ModelSpec, TensorSpec
from tests.wire import Array

SPEC = ModelSpec(
    tuple(TensorSpec(datatype.lower(), datatype, (2,)) for datatype in ("FP32", "FP16", "BF16", "INT64")),
    (TensorSpec("x", "FP32", (2,)),),
    batched=True,
)


def test_changed_requests_have_other_floats_but_the_same_integers() -> None:
    types = (np.float32, np.float16, np.uint16, np.int64)
    request = [np.array([[0, 0], [3, 4]], dtype) for dtype in types]
    floats, halves, shorts, integers = changed(SPEC, [request], 3)
    assert [one.shape for one in (floats, halves, shorts, integers)] == [(3, 2)] * 4
    assert [one.dtype for one in (floats, halves, shorts, integers)] == [*map(np.dtype, types)]
    for array in (floats, halves, (shorts.astype(np.uint32) << 16).view(np.float32)):
        assert len(np.unique(array)) == 6
        assert 0 <= array.min() <= array.max() < 1
    assert integers.tolist() == [[3, 4]] * 3


def test_changed_request_of_a_model_without_batch_axis_keeps_its_shape() -> None:
    spec = ModelSpec((TensorSpec("a", "FP32", (2, 3)),), SPEC.outputs)
    (array,) = changed(spec, [[np.zeros((2, 3), np.float32)]], 0)
    assert array.shape == (2, 3)


@pytest.mark.parametrize(
    ("replayed", "is_same"),
    [([[1, 2]], True), ([[1, 2.0001]], True), ([[1, 3]], False), ([[1, np.nan]], False)],
)
def test_replayed_results_may_differ_by_rounding_only(replayed: Array, is_same: bool) -> None:
    one, two = ([np.array(values, np.float32)] for values in (replayed, [[1, 2]]))
    if is_same:
        check_replayed(SPEC, one, two)
    else:
        with pytest.raises(ExecutionError, match="output 'x' of a replayed graph is not what the model computes"):
            check_replayed(SPEC, one, two)


def test_replayed_results_may_be_scalars_or_empty() -> None:
    for shape in ((), (0,), (0, 7), (2, 0)):
        check_replayed(SPEC, [np.ones(shape, np.float32)], [np.ones(shape, np.float32)])
