"""The values of each kind of batch input, worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.backends.ragged import batch_input
from paceline.backends.spec import BatchInputKind

INT32, FP32 = np.dtype("<i4"), np.dtype("<f4")

# Two requests: two rows of 3 x 1 elements, one row of 2 x 2.
SOURCES = [np.zeros((2, 3, 1)), np.zeros((1, 2, 2))]

EXPECTED = {
    BatchInputKind.ELEMENT_COUNT: [6, 4],
    BatchInputKind.ACCUMULATED_ELEMENT_COUNT: [6, 10],
    BatchInputKind.ACCUMULATED_ELEMENT_COUNT_WITH_ZERO: [0, 6, 10],
    BatchInputKind.MAX_ELEMENT_COUNT_AS_SHAPE: [0] * 6,
    BatchInputKind.ITEM_SHAPE: [[3, 1], [3, 1], [2, 2]],
    BatchInputKind.ITEM_SHAPE_FLATTEN: [3, 1, 3, 1, 2, 2],
}
EXPECTED_OF_ONE = {
    BatchInputKind.ELEMENT_COUNT: [4],
    BatchInputKind.ACCUMULATED_ELEMENT_COUNT: [4],
    BatchInputKind.ACCUMULATED_ELEMENT_COUNT_WITH_ZERO: [0, 4],
    BatchInputKind.MAX_ELEMENT_COUNT_AS_SHAPE: [0] * 4,
    BatchInputKind.ITEM_SHAPE: [[2, 2]],
    BatchInputKind.ITEM_SHAPE_FLATTEN: [2, 2],
}


@pytest.mark.parametrize("dtype", [INT32, FP32], ids=["INT32", "FP32"])
@pytest.mark.parametrize("kind", BatchInputKind)
def test_batch_input_of_two_requests_equals_the_worked_example(kind: BatchInputKind, dtype: np.dtype) -> None:
    made = batch_input(kind, SOURCES, dtype)

    assert made.dtype == dtype
    assert made.tolist() == EXPECTED[kind]


@pytest.mark.parametrize("kind", BatchInputKind)
def test_batch_input_of_one_request_equals_the_worked_example(kind: BatchInputKind) -> None:
    assert batch_input(kind, SOURCES[1:], INT32).tolist() == EXPECTED_OF_ONE[kind]


def test_batch_input_of_empty_requests_counts_nothing() -> None:
    sources = [np.zeros((1, 0)), np.zeros((2, 0))]

    assert batch_input(BatchInputKind.ELEMENT_COUNT, sources, INT32).tolist() == [0, 0]
    assert batch_input(BatchInputKind.MAX_ELEMENT_COUNT_AS_SHAPE, sources, INT32).shape == (0,)
    assert batch_input(BatchInputKind.ITEM_SHAPE, sources, INT32).tolist() == [[0], [0], [0]]


def test_batch_input_item_shape_of_requests_without_dims_has_no_columns() -> None:
    assert batch_input(BatchInputKind.ITEM_SHAPE, [np.zeros(2), np.zeros(1)], INT32).shape == (3, 0)
