"""Edge cases of stacking and splitting; `tests/property/test_batching.py` compares them with plain numpy."""

from __future__ import annotations

import re
from time import monotonic_ns

import numpy as np
import pytest

from paceline.backends.batching import rows_of, run_batch, split, stack
from paceline.backends.errors import ExecutionError
from paceline.backends.spec import ModelSpec, Tensors, TensorSpec


def _spec(*outputs: TensorSpec, batched: bool = True) -> ModelSpec:
    return ModelSpec(inputs=(TensorSpec("INPUT0", "FP32", (2,)),), outputs=outputs, batched=batched)


def _floats(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


PAIR = TensorSpec("OUTPUT0", "FP32", (2,))


def test_stack_one_request_returns_its_own_arrays() -> None:
    array = _floats(3, 2)

    assert stack([(array,)])[0] is array


def test_stack_one_request_of_rank_0_keeps_the_rank() -> None:
    array = np.array(7, np.int64)

    assert stack([(array,)])[0] is array


def test_stack_one_strided_request_returns_a_contiguous_copy() -> None:
    array = _floats(3, 4)[:, ::2]

    (stacked,) = stack([(array,)])

    assert stacked.flags.c_contiguous
    np.testing.assert_array_equal(stacked, array)


def test_stack_fortran_ordered_requests_returns_c_order() -> None:
    first, second = np.asfortranarray(_floats(2, 3)), np.asfortranarray(_floats(4, 3))

    (stacked,) = stack([(first,), (second,)])

    assert stacked.flags.c_contiguous
    np.testing.assert_array_equal(stacked, np.concatenate([first, second]))


def test_stack_several_inputs_joins_each_separately() -> None:
    requests = [(_floats(1, 2), np.array([[b"a"]], object)), (_floats(2, 2) + 10, np.array([[b"b"], [b"c"]], object))]

    numbers, texts = stack(requests)

    assert numbers.tolist() == [[0, 1], [10, 11], [12, 13]]
    assert texts.tolist() == [[b"a"], [b"b"], [b"c"]]


def test_stack_differing_trailing_dimensions_is_an_execution_error() -> None:
    with pytest.raises(ExecutionError, match="don't fit together"):
        stack([(_floats(1, 2),), (_floats(1, 3),)])


def test_stack_differing_numbers_of_inputs_is_an_execution_error() -> None:
    with pytest.raises(ExecutionError, match="don't fit together"):
        stack([(_floats(1, 2),), (_floats(1, 2), _floats(1, 2))])


def test_rows_of_requests_counts_their_first_dimension() -> None:
    assert rows_of([(_floats(3, 2),), (_floats(1, 2), _floats(1, 9))]) == [3, 1]


@pytest.mark.parametrize("rows", [[1, 3, 2], [6]])
def test_split_returns_views_in_order(rows: list[int]) -> None:
    output = _floats(6, 2)

    results = split([output], rows, _spec(PAIR))

    assert [len(result[0]) for result in results] == rows
    assert [row for result in results for row in result[0].tolist()] == output.tolist()
    assert all(np.shares_memory(result[0], output) for result in results)


def test_split_no_outputs_returns_an_empty_result_per_request() -> None:
    assert split([], [1, 2], _spec()) == [(), ()]


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        pytest.param([], "expected 1 outputs, got 0", id="too-few"),
        pytest.param([_floats(3, 2), _floats(3, 2)], "expected 1 outputs, got 2", id="too-many"),
        pytest.param(
            [_floats(1, 2)],
            "output 'OUTPUT0': expected shape [3, 2], got [1, 2]; "
            "the first dimension of every output must be the 3 rows of the batch",
            id="rows-missing",
        ),
        pytest.param(
            [_floats(2)],
            "output 'OUTPUT0': expected shape [3, 2], got [2]; "
            "the first dimension of every output must be the 3 rows of the batch",
            id="no-batch-axis",
        ),
        pytest.param([_floats(3, 5)], "output 'OUTPUT0': expected shape [3, 2], got [3, 5]", id="fixed-dimension"),
        pytest.param([np.ones((3, 2))], "output 'OUTPUT0': expected FP32, got numpy's float64", id="datatype"),
    ],
)
def test_split_mismatch_names_output_expected_and_got(outputs: Tensors, message: str) -> None:
    with pytest.raises(ExecutionError, match=f"^{re.escape(message)}$"):
        split(outputs, [1, 2], _spec(PAIR))


def test_split_mismatch_of_the_second_output_names_the_second() -> None:
    spec = _spec(PAIR, TensorSpec("OUTPUT1", "FP32", (2,)))

    with pytest.raises(ExecutionError, match="output 'OUTPUT1'"):
        split([_floats(3, 2), _floats(2, 2)], [1, 2], spec)


def test_split_free_dimensions_accept_any_size() -> None:
    spec = _spec(TensorSpec("OUTPUT0", "FP32", (-1, 2)))

    assert split([_floats(3, 7, 2)], [1, 2], spec)[1][0].shape == (2, 7, 2)


def test_split_free_dimensions_still_fix_the_rank() -> None:
    with pytest.raises(ExecutionError, match=re.escape("expected shape [3, -1], got [3, 7, 2]")):
        split([_floats(3, 7, 2)], [1, 2], _spec(TensorSpec("OUTPUT0", "FP32", (-1,))))


def test_split_passes_on_other_dims_than_assumed_ones_if_the_rows_are_right() -> None:
    spec = _spec(TensorSpec("OUTPUT0", "FP32", (5,), assumed=True))

    assert [share[0].shape for share in split([_floats(3, 7, 2)], [1, 2], spec)] == [(1, 7, 2), (2, 7, 2)]
    with pytest.raises(ExecutionError, match=re.escape("got [2, 5]; the first dimension of every output must be")):
        split([_floats(2, 5)], [1, 2], spec)


def test_split_unbatched_checks_all_dims() -> None:
    spec = _spec(TensorSpec("OUTPUT0", "FP32", (3, 2)), batched=False)

    assert len(split([_floats(3, 2)], [1], spec)) == 1
    with pytest.raises(ExecutionError, match=re.escape("output 'OUTPUT0': expected shape [3, 2], got [2, 2]") + "$"):
        split([_floats(2, 2)], [1], spec)


def test_run_batch_several_requests_runs_once_over_all_rows() -> None:
    seen: list[tuple[int, ...]] = []

    def run(inputs: Tensors) -> Tensors:
        seen.append(inputs[0].shape)
        return [inputs[0] * 2]

    execution = run_batch(_spec(PAIR), [(_floats(1, 2),), (_floats(2, 2),)], run)

    assert seen == [(3, 2)]
    assert [result[0].tolist() for result in execution.results] == [[[0, 2]], [[0, 2], [4, 6]]]


def test_run_batch_times_are_at_least_the_models_and_at_most_the_callers() -> None:
    inside_ns: list[int] = []

    def run(inputs: Tensors) -> Tensors:
        inside_ns.append(monotonic_ns())
        outputs = [np.sqrt(inputs[0])]
        inside_ns.append(monotonic_ns())
        return outputs

    began_ns = monotonic_ns()
    execution = run_batch(_spec(PAIR), [(_floats(1, 2),)], run)
    ended_ns = monotonic_ns()

    assert execution.infer_ns >= inside_ns[1] - inside_ns[0]
    assert min(execution.input_ns, execution.output_ns) >= 0
    assert execution.input_ns + execution.infer_ns + execution.output_ns <= ended_ns - began_ns


def test_run_batch_passes_on_what_run_raises() -> None:
    def run(inputs: Tensors) -> Tensors:
        raise ExecutionError("the model's own words")

    with pytest.raises(ExecutionError, match="the model's own words"):
        run_batch(_spec(PAIR), [(_floats(1, 2),)], run)


def test_run_batch_without_requests_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="expected one or more requests, got 0"):
        run_batch(_spec(PAIR), [], lambda inputs: inputs)


def test_run_batch_unbatched_spec_accepts_only_one_request() -> None:
    spec = _spec(TensorSpec("OUTPUT0", "FP32", (2,)), batched=False)

    assert len(run_batch(spec, [(_floats(2),)], lambda inputs: inputs).results) == 1
    with pytest.raises(ValueError, match="expected one request, got 2"):
        run_batch(spec, [(_floats(2),), (_floats(2),)], lambda inputs: inputs)


@pytest.mark.parametrize("rows", [[1], [2, 1]])
def test_run_batch_padded_returns_only_the_requests_rows(rows: list[int]) -> None:
    requests = [(np.arange(2 * count, dtype=np.float32).reshape(count, 2),) for count in rows]
    seen: list[np.ndarray] = []

    def run(inputs: list[np.ndarray]) -> list[np.ndarray]:
        seen.append(inputs[0])
        return [inputs[0] + 1]

    spec = ModelSpec((TensorSpec("x", "FP32", (2,)),), (TensorSpec("y", "FP32", (2,)),), batched=True)
    execution = run_batch(spec, requests, run, padded_rows=8)
    assert seen[0].shape == (8, 2)
    assert (seen[0][sum(rows) :] == requests[-1][0][-1]).all()
    for (given,), (answer,) in zip(requests, execution.results, strict=True):
        np.testing.assert_array_equal(answer, given + 1)


@pytest.mark.parametrize("elements", [2, 499, 500, 5_000])
@pytest.mark.parametrize("dtype", ["<f4", "<f2", "<u2", "|b1", "<i8"])
def test_stack_of_any_size_is_an_aligned_writable_copy(elements: int, dtype: str) -> None:
    raw = np.random.default_rng(0).integers(0, 2, (5, elements)).astype(dtype)
    unaligned = [np.ndarray((1, elements), dtype, b"x" + row.tobytes(), 1) for row in raw]

    (stacked,) = stack([(row,) for row in unaligned])

    assert stacked.shape == (5, elements)
    assert stacked.tobytes() == raw.tobytes()
    assert stacked.flags.writeable
    assert stacked.flags.c_contiguous
    assert stacked.ctypes.data % 16 == 0
    assert not any(np.shares_memory(stacked, row) for row in unaligned)


def test_stack_of_large_rows_pads_with_the_last_one() -> None:
    (stacked,) = stack([(_floats(1, 1_000),), (_floats(2, 1_000) + 7,)], padding_rows=3)

    assert stacked.shape == (6, 1_000)
    np.testing.assert_array_equal(stacked[3:], np.broadcast_to(_floats(2, 1_000)[1:] + 7, (3, 1_000)))


@pytest.mark.parametrize(
    "other", [np.zeros((1, 25, 40), np.float32), np.zeros((1, 999), np.float32), np.zeros((1, 1_000, 1), np.float32)]
)
def test_stack_of_large_rows_that_differ_in_dims_is_an_execution_error(other: np.ndarray) -> None:
    with pytest.raises(ExecutionError, match="don't fit together"):
        stack([(np.zeros((1, 1_000), np.float32),), (other,)])


def test_stack_of_large_rows_in_any_layout_gives_c_order() -> None:
    straight, across = _floats(2, 30, 40), np.asfortranarray(_floats(3, 30, 40) + 1)

    for pair in ((straight, across), (across, straight), (straight[:, ::-1], straight)):
        (stacked,) = stack([(one,) for one in pair])
        assert stacked.flags.c_contiguous
        np.testing.assert_array_equal(stacked, np.concatenate(pair))
