"""Edge cases of batches that aren't all stacked and split by rows; `tests/property/test_ragged.py` has the breadth."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial
from time import monotonic_ns
from typing import Any

import numpy as np
import pytest

from paceline.backends.batching import run_batch
from paceline.backends.errors import ExecutionError
from paceline.backends.ragged import batch_input_tensors, batch_runner, row_counter
from paceline.backends.spec import MISSING, BatchInput, BatchInputKind, BatchOutput, ModelSpec, Tensors, TensorSpec

RAGGED = TensorSpec("r", "FP32", (-1,), ragged=True)
ROWS = TensorSpec("a", "FP32", (2,))
SHAPE = TensorSpec("s", "INT64", (2,), shape_tensor=True)
OPTIONAL = TensorSpec("o", "FP32", (2,), optional=True)


def floats(*shape: int, first: float = 0) -> np.ndarray:
    return np.arange(first, first + np.prod(shape), dtype=np.float32).reshape(shape)


class Seen:
    """A model that records its inputs and returns `outputs` of them."""

    def __init__(self, outputs: Any = list) -> None:
        self.inputs: list[np.ndarray] = []
        self._outputs = outputs

    def __call__(self, inputs: list[np.ndarray]) -> Tensors:
        self.inputs = list(inputs)
        made: Tensors = self._outputs(inputs)
        return made


def execute(spec: ModelSpec, requests: Sequence[Tensors], run: Any, padded_rows: int = 0) -> list[list[Any]]:
    results = batch_runner(spec)(requests, run, padded_rows).results
    return [[array if array is MISSING else array.tolist() for array in result] for result in results]


def failure(spec: ModelSpec, requests: Sequence[Tensors], run: Any) -> str:
    with pytest.raises(ExecutionError) as caught:
        batch_runner(spec)(requests, run, 0)
    return str(caught.value)


def test_batch_runner_of_a_plain_spec_is_the_plain_path() -> None:
    spec = ModelSpec((ROWS,), (ROWS,), batched=True)

    runner = batch_runner(spec)

    assert isinstance(runner, partial)
    assert (runner.func, runner.args) == (run_batch, (spec,))


def test_batch_runner_of_a_reshaped_spec_is_the_plain_path_with_the_models_dims() -> None:
    reshaped = TensorSpec("x", "FP32", (4,), reshape=(2, 2))
    runner = batch_runner(ModelSpec((ROWS,), (reshaped,), batched=True))

    (result,) = runner([(floats(3, 2),)], lambda inputs: [floats(3, 2, 2)], 0).results

    assert isinstance(runner, partial)
    assert result[0].shape == (3, 2, 2)


def test_ragged_input_is_the_elements_of_all_requests_one_after_another() -> None:
    seen = Seen(lambda inputs: [inputs[1]])
    spec = ModelSpec((RAGGED, ROWS), (TensorSpec("x", "FP32", (2,)),), batched=True)
    requests = [(floats(2, 3), floats(2, 2)), (floats(1, 1, first=6), floats(1, 2, first=4))]

    results = execute(spec, requests, seen)

    assert [array.tolist() for array in seen.inputs] == [floats(7).tolist(), floats(3, 2).tolist()]
    assert results == [[floats(2, 2).tolist()], [floats(1, 2, first=4).tolist()]]


@pytest.mark.parametrize("order", ["C", "F"])
def test_ragged_input_of_one_request_is_a_vector_in_row_major_order(order: Any) -> None:
    seen = Seen(lambda inputs: [floats(2, 2)])
    spec = ModelSpec((RAGGED,), (TensorSpec("x", "FP32", (2,)),), batched=True)

    execute(spec, [(np.asarray(floats(2, 3), order=order),)], seen)

    assert seen.inputs[0].tolist() == floats(6).tolist()
    assert seen.inputs[0].flags.c_contiguous


def test_ragged_texts_are_joined_like_numbers() -> None:
    texts = [(np.array([[b"a", b"b"]], object),), (np.array([[b"c\x00"]], object),)]
    seen = Seen(lambda inputs: [floats(2, 2)])
    spec = ModelSpec((TensorSpec("r", "BYTES", (-1,), ragged=True),), (TensorSpec("x", "FP32", (2,)),), batched=True)

    execute(spec, texts, seen)

    assert seen.inputs[0].tolist() == [b"a", b"b", b"c\x00"]


def test_batch_inputs_follow_the_inputs_once_per_target() -> None:
    made = (
        BatchInput(BatchInputKind.ELEMENT_COUNT, ("n", "m"), "INT32", "r"),
        BatchInput(BatchInputKind.ACCUMULATED_ELEMENT_COUNT, ("sum",), "FP32", "r"),
    )
    spec = ModelSpec((RAGGED,), (TensorSpec("x", "FP32", ()),), batched=True, batch_inputs=made)
    seen = Seen(lambda inputs: [inputs[3]])

    results = execute(spec, [(floats(1, 2),), (floats(1, 3),)], seen)

    assert [array.tolist() for array in seen.inputs[1:]] == [[2, 3], [2, 3], [2.0, 5.0]]
    assert [(one.name, one.datatype) for one in batch_input_tensors(spec)] == [
        ("n", "INT32"),
        ("m", "INT32"),
        ("sum", "FP32"),
    ]
    assert results == [[[2.0]], [[5.0]]]


SCATTER = ModelSpec(
    (RAGGED,), (TensorSpec("x", "FP32", (-1,)),), batched=True, batch_outputs=(BatchOutput(("x",), "r"),)
)


def test_scattered_output_has_the_shape_of_the_source_and_is_a_view() -> None:
    seen = Seen()
    requests = [(floats(2, 3),), (floats(1, 1, first=6),), (floats(1, 0),)]

    results = batch_runner(SCATTER)(requests, seen, 0).results

    assert [result[0].tolist() for result in results] == [request[0].tolist() for request in requests]
    assert all(np.shares_memory(result[0], seen.inputs[0]) for result in results[:2])


def test_scattered_output_takes_free_dims_from_the_source_and_others_from_its_spec() -> None:
    outputs = (TensorSpec("x", "FP32", (-1, 2)),)
    spec = ModelSpec((RAGGED,), outputs, batched=True, batch_outputs=(BatchOutput(("x",), "r"),))

    results = batch_runner(spec)(
        [(floats(1, 3),), (floats(2, 1),)], lambda inputs: [np.repeat(inputs[0], 2)], 0
    ).results

    assert [result[0].shape for result in results] == [(1, 3, 2), (2, 1, 2)]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (floats(4), "output 'x': expected 5 elements to scatter by the shapes of the requests' inputs, got 4"),
        (np.zeros(5), "output 'x': expected FP32, got numpy's float64"),
    ],
)
def test_scattered_output_that_does_not_fit_is_an_error_naming_it(output: np.ndarray, message: str) -> None:
    assert failure(SCATTER, [(floats(1, 2),), (floats(1, 3),)], lambda inputs: [output]) == message


def test_output_without_the_batchs_rows_beside_a_ragged_input_is_an_error() -> None:
    spec = ModelSpec((RAGGED,), (TensorSpec("x", "FP32", ()),), batched=True)

    assert "the first dimension of every output must be the 2 rows of the batch" in failure(
        spec, [(floats(1, 2),), (floats(1, 3),)], list
    )


def test_wrong_number_of_outputs_is_an_error() -> None:
    assert failure(SCATTER, [(floats(1, 2),)], lambda inputs: []) == "expected 1 outputs, got 0"


def test_shape_tensor_goes_to_the_model_once_and_comes_back_to_each_request() -> None:
    spec = ModelSpec((SHAPE, ROWS), (TensorSpec("x", "FP32", (2,)), SHAPE), batched=True)
    shape = np.array([3, 4])
    seen = Seen(lambda inputs: [inputs[1], inputs[0]])

    results = execute(spec, [(shape, floats(2, 2)), (shape.copy(), floats(1, 2))], seen)

    assert seen.inputs[0].tolist() == [3, 4]
    assert results == [[floats(2, 2).tolist(), [3, 4]], [floats(1, 2).tolist(), [3, 4]]]


def test_shape_tensor_returned_with_another_datatype_is_an_error() -> None:
    spec = ModelSpec((SHAPE, ROWS), (SHAPE,), batched=True)
    run = Seen(lambda inputs: [inputs[0].astype(np.float32)])

    assert failure(spec, [(np.array([3, 4]), floats(2, 2))], run).startswith("output 's': expected INT64, got ")


def test_times_of_a_batch_are_no_longer_than_it_took() -> None:
    spec = ModelSpec((RAGGED, ROWS), (ROWS,), batched=True)
    began_ns = monotonic_ns()

    done = batch_runner(spec)([(floats(1, 3), floats(1, 2))], Seen(lambda inputs: [inputs[1]]), 0)

    assert min(done.input_ns, done.infer_ns, done.output_ns) >= 0
    assert done.input_ns + done.infer_ns + done.output_ns <= monotonic_ns() - began_ns


def test_padding_fills_up_rows_and_leaves_shape_and_missing_tensors_unchanged() -> None:
    spec = ModelSpec((SHAPE, ROWS, OPTIONAL), (TensorSpec("x", "FP32", (2,)),), batched=True)
    seen = Seen(lambda inputs: [inputs[1]])

    results = execute(spec, [(np.array([1, 2]), floats(1, 2), MISSING)], seen, padded_rows=4)

    assert [array.shape for array in seen.inputs[:2]] == [(2,), (4, 2)]
    assert seen.inputs[2] is MISSING
    assert results == [[floats(1, 2).tolist()]]


def test_padding_a_batch_without_rows_does_nothing() -> None:
    seen = Seen()

    execute(SCATTER, [(floats(1, 2),)], seen, padded_rows=8)

    assert seen.inputs[0].shape == (2,)


def test_padding_beside_a_ragged_input_leaves_other_inputs_unchanged_too() -> None:
    spec = ModelSpec((RAGGED, ROWS), (ROWS,), batched=True)
    seen = Seen(lambda inputs: [inputs[1]])

    results = execute(spec, [(floats(1, 3), floats(1, 2))], seen, padded_rows=8)

    assert [array.shape for array in seen.inputs] == [(3,), (1, 2)]
    assert results == [[floats(1, 2).tolist()]]


def test_missing_inputs_stay_missing_and_given_ones_are_stacked() -> None:
    spec = ModelSpec((OPTIONAL, ROWS), (TensorSpec("x", "FP32", (2,)),), batched=True)
    seen = Seen(lambda inputs: [inputs[1]])

    execute(spec, [(MISSING, floats(1, 2)), (MISSING, floats(2, 2))], seen)
    assert seen.inputs[0] is MISSING
    execute(spec, [(floats(1, 2), floats(1, 2)), (floats(1, 2, first=2), floats(1, 2))], seen)
    assert seen.inputs[0].tolist() == floats(2, 2).tolist()


def test_input_missing_in_only_some_requests_of_a_batch_is_an_error() -> None:
    spec = ModelSpec((OPTIONAL, ROWS), (TensorSpec("x", "FP32", (2,)),), batched=True)

    message = failure(spec, [(MISSING, floats(1, 2)), (floats(1, 2), floats(1, 2))], list)

    assert message == "requests of one batch don't fit together: input 'o' is missing in 1 of 2"


def test_missing_output_is_missing_in_each_result_if_it_is_optional() -> None:
    spec = ModelSpec((OPTIONAL, ROWS), (TensorSpec("x", "FP32", (2,), optional=True), ROWS), batched=True)

    results = execute(spec, [(MISSING, floats(1, 2)), (MISSING, floats(1, 2))], list)

    assert [result[0] is MISSING for result in results] == [True, True]
    assert "output 'a'" in failure(
        ModelSpec((OPTIONAL,), (ROWS,), batched=True), [(floats(1, 2),)], lambda inputs: [MISSING]
    )


def test_optional_input_without_batch_axis_is_served_one_request_at_a_time() -> None:
    spec = ModelSpec((OPTIONAL,), (TensorSpec("x", "FP32", (3,)),))

    assert execute(spec, [(MISSING,)], lambda inputs: [floats(3)]) == [[[0, 1, 2]]]
    with pytest.raises(ValueError, match=re.escape("expected one request, got 2")):
        batch_runner(spec)([(MISSING,)] * 2, list, 0)


def test_batch_without_requests_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="expected one or more requests, got 0"):
        batch_runner(SCATTER)([], list, 0)


def test_rows_are_counted_in_the_first_given_input_with_a_batch_axis() -> None:
    spec = ModelSpec((SHAPE, OPTIONAL, ROWS), (ROWS,), batched=True)
    shape = np.array([1, 2])

    assert row_counter(spec)([(shape, MISSING, floats(3, 2)), (shape, floats(2, 2), MISSING)]) == [3, 2]
    assert row_counter(ModelSpec((ROWS,), (ROWS,)))([(floats(3, 2),)]) == [1]
    assert row_counter(ModelSpec((RAGGED,), (ROWS,), batched=True))([(floats(3, 2),)]) == [3]
