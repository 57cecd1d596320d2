"""What a trial sees, with functions for models: rows that depend on each other, and those that only seem to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from paceline.backends.errors import ExecutionError
from paceline.backends.row_trial import try_rows
from paceline.backends.spec import Array, ModelSpec, Tensors, TensorSpec
from paceline.backends.trials import Trial

SPEC = ModelSpec((TensorSpec("a", "FP32", (-1, 2)),), (TensorSpec("x", "FP32", (-1, 2)),))


@pytest.mark.parametrize("distance", range(1, 8))
@pytest.mark.parametrize("ahead", [False, True], ids=["behind", "ahead"])
def test_try_rows_reports_rows_that_depend_on_others_further_away(distance: int, ahead: bool) -> None:
    def look(inputs: Tensors) -> Tensors:
        (rows,) = inputs
        step = -1 if ahead else 1
        before = np.zeros_like(rows)
        before[distance:] = rows[::step][:-distance]
        return [np.maximum(rows, before[::step])]

    found = try_rows(SPEC, look)
    assert found.why_not.startswith("output 'x' of a row depends on ")


def _by_all(rows: Array) -> Array:
    scale: np.float32 = np.sqrt(np.mean(rows**2, dtype=np.float32))
    return rows / scale


def _position(rows: Array) -> Array:
    return np.triu(rows)


def _before(rows: Array) -> Array:
    return np.cumsum(rows, axis=0)


@pytest.mark.parametrize("datatype", ["FP32", "BF16", "UINT8", "INT64", "BOOL"])
@pytest.mark.parametrize("size", [1, 3, 10_000])
@pytest.mark.parametrize("mix", [_by_all, _position, _before, np.flipud])
def test_try_rows_reports_rows_that_are_mixed_however_similar_they_are(
    datatype: str, size: int, mix: Callable[[Array], Array]
) -> None:
    """Normalized over the batch, say: for that, rows of many random numbers are all the same."""
    spec = ModelSpec((TensorSpec("a", datatype, (-1, size)),), (TensorSpec("x", "FP32", (-1, size)),))

    def run(inputs: Tensors) -> Tensors:
        rows = (inputs[0].astype(np.uint32) << 16).view(np.float32) if datatype == "BF16" else inputs[0]
        return [mix(rows.astype(np.float32) + (mix is _by_all))]

    assert try_rows(spec, run).why_not == "output 'x' of a row depends on the row beside it"


def test_try_rows_reports_rows_looked_up_in_each_other() -> None:
    spec = ModelSpec((TensorSpec("rows", "FP32", (-1, 2)), TensorSpec("which", "INT64", (-1,))), SPEC.outputs)

    def look_up(inputs: Tensors) -> Tensors:
        rows, which = inputs
        if which.max() >= len(rows):
            raise ExecutionError("index out of bounds")
        return [rows[which]]

    assert try_rows(spec, look_up).why_not == "output 'x' of a row depends on the row beside it"


def test_try_rows_accepts_rows_that_are_rounded_differently_in_a_batch() -> None:
    def run(inputs: Tensors) -> Tensors:
        return [inputs[0] * np.float32(1 + 0.01 * (len(inputs[0]) > 1))]

    assert try_rows(SPEC, run).why_not == ""


def test_try_rows_accepts_results_that_are_only_rounding_errors() -> None:
    def run(inputs: Tensors) -> Tensors:
        return [inputs[0] * np.float32(1e-7 * (-1) ** len(inputs[0]))]

    assert try_rows(SPEC, run).why_not == ""


def test_try_rows_reports_results_that_are_nan_only_in_a_batch() -> None:
    def run(inputs: Tensors) -> Tensors:
        return [inputs[0] if len(inputs[0]) == 1 else inputs[0] * np.nan]

    assert try_rows(SPEC, run).why_not == "output 'x' of a row depends on the row beside it"


@pytest.mark.parametrize("small", [1e-3, 1.0])
@pytest.mark.parametrize("large", [10.0, 1e4])
def test_try_rows_reports_mixed_small_numbers_beside_large_ones(small: float, large: float) -> None:
    """Probabilities beside coordinates in an image, say."""

    def run(inputs: Tensors) -> Tensors:
        mixed = np.exp(inputs[0]) / np.exp(inputs[0]).sum(axis=0)
        return [np.concatenate([small * mixed, np.float32(large) * inputs[0]], axis=1)]

    wider = replace(SPEC, outputs=(TensorSpec("x", "FP32", (-1, 4)),))
    assert try_rows(wider, run).why_not == "output 'x' of a row depends on the row beside it"


def test_try_rows_reports_quantization_by_the_largest_number_of_the_batch() -> None:
    """Their errors beside a row of about their size don't show it, but what is left of them beside a large one does."""
    spec = ModelSpec((TensorSpec("a", "FP32", (-1, 5)),), (TensorSpec("x", "FP32", (-1, 5)),))

    def run(inputs: Tensors) -> Tensors:
        wide = inputs[0] * np.array([[1, 0.3, 0.1, 0.03, 0.01]], np.float32)
        step = np.abs(wide).max() / 127
        return [np.round(wide / step) * step]

    assert try_rows(spec, run).why_not == "output 'x' of a row depends on the row beside it"


@pytest.mark.parametrize("datatype", ["FP16", "FP32", "BF16", "FP64"])
@pytest.mark.parametrize("window", [1, 400])
def test_try_rows_reports_clipping_relative_to_the_loudest_row(datatype: str, window: int) -> None:
    """As spectrograms of sounds are, at 80 dB below it."""

    def run(inputs: Tensors) -> Tensors:
        (rows,) = inputs
        if rows.shape[1] < window:
            raise ExecutionError("shorter than a window")
        if datatype == "BF16":
            rows = (rows.astype(np.uint32) << 16).view(np.float32)
        levels = 20 * np.log10(np.maximum(np.abs(rows.astype(np.float32)), 1e-10))
        return [np.maximum(levels, levels.max() - 80)]

    spec = ModelSpec((TensorSpec("a", datatype, (-1, -1)),), (TensorSpec("x", "FP32", (-1, -1)),))
    assert try_rows(spec, run).why_not == "output 'x' of a row depends on the row beside it"


def test_try_rows_judges_by_small_numbers_if_large_ones_are_refused() -> None:
    def run(inputs: Tensors) -> Tensors:
        if np.abs(inputs[0]).max() > 100:
            raise ExecutionError("out of range")
        return inputs

    assert try_rows(SPEC, run) == Trial(SPEC)


def test_try_rows_reports_rows_that_are_mixed_by_sign_or_size() -> None:
    def by_sign(inputs: Tensors) -> Tensors:
        return [inputs[0] if inputs[0].sum() > 0 else 2 * inputs[0]]

    def by_size(inputs: Tensors) -> Tensors:
        return [inputs[0] * (1 + (np.abs(inputs[0]).max() > 1))]

    for run in (by_sign, by_size):
        assert try_rows(SPEC, run).why_not == "output 'x' of a row depends on the row beside it"


@pytest.mark.parametrize("columns", [4, 16, 64])
@pytest.mark.parametrize("projected", [False, True])
def test_try_rows_reports_rows_that_attend_to_each_other(columns: int, projected: bool) -> None:
    spec = ModelSpec((TensorSpec("a", "FP32", (-1, columns)),), (TensorSpec("x", "FP32", (-1, columns)),))
    random = np.random.default_rng(0)
    for _ in range(10):
        weights = [random.standard_normal((columns, columns)) if projected else np.eye(columns) for _ in range(3)]
        query, key, value = (one / np.sqrt(columns) if projected else one for one in weights)

        def attend(inputs: Sequence[Array], query: Array = query, key: Array = key, value: Array = value) -> Tensors:
            rows = inputs[0].astype(np.float64)
            scores = rows @ query @ (rows @ key).T / np.sqrt(columns)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            weights /= weights.sum(axis=1, keepdims=True)
            return [(rows + weights @ (rows @ value)).astype(np.float32)]

        assert try_rows(spec, attend).why_not.startswith("output 'x' of a row depends on ")


def test_try_rows_reports_rows_that_are_mixed_if_they_have_the_same_number() -> None:
    """Nodes of a graph, say."""
    spec = ModelSpec((TensorSpec("rows", "FP32", (-1, 2)), TensorSpec("group", "INT64", (-1,))), SPEC.outputs)

    def mean(inputs: Tensors) -> Tensors:
        rows, group = inputs
        return [np.stack([rows[group == one].mean(axis=0) for one in group])]

    assert try_rows(spec, mean).why_not == "output 'x' of a row depends on rows beside it"


def test_try_rows_reports_rows_of_which_only_a_few_of_one_kind_have_room() -> None:
    def route(inputs: Tensors) -> Tensors:
        (rows,) = inputs
        kinds = (rows @ np.eye(2, 4, dtype=np.float32)).argmax(axis=1)
        before = np.array([np.count_nonzero(kinds[:number] == kind) for number, kind in enumerate(kinds)])
        return [rows * (before < 6)[:, None]]

    assert try_rows(SPEC, route).why_not == "output 'x' of a row depends on rows beside it"


@pytest.mark.parametrize("seed", range(8))
def test_try_rows_reports_words_that_are_mixed_although_only_labels_show_it(seed: int) -> None:
    spec = ModelSpec((TensorSpec("words", "INT64", (-1,)),), (TensorSpec("labels", "INT64", (-1,)),))
    random = np.random.default_rng(seed)
    vectors = random.standard_normal((64, 8))
    vectors[:2] = 0
    labels = random.standard_normal((8, 5))

    def tag(inputs: Tensors) -> Tensors:
        states = np.cumsum(vectors[inputs[0]], axis=0)
        return [(states @ labels).argmax(axis=1)]

    assert try_rows(spec, tag).why_not.startswith("output 'labels' of a row depends on ")


def test_try_rows_accepts_independent_words_of_small_and_of_large_vocabularies() -> None:
    spec = ModelSpec((TensorSpec("words", "INT64", (-1, -1)),), (TensorSpec("sum", "FP32", (-1,)),))
    for size in (2, 40, 1000):

        def embed(inputs: Tensors, size: int = size) -> Tensors:
            if inputs[0].max() >= size:
                raise ExecutionError("no such word")
            return [np.sqrt(inputs[0] + 1).sum(axis=1).astype(np.float32)]

        assert try_rows(spec, embed).why_not == ""


def test_try_rows_reports_mixed_columns_beside_larger_ones() -> None:
    def run(inputs: Tensors) -> Tensors:
        (rows,) = inputs
        columns = np.array([1.0, 0.3] if len(rows) == 1 else [1.03, 0.15], np.float32)
        return [columns + 1e-3 * np.tanh(rows)]

    assert try_rows(SPEC, run).why_not == "output 'x' of a row depends on the row beside it"


def test_try_rows_takes_the_same_results_for_all_rows_as_showing_nothing() -> None:
    spec = replace(SPEC, outputs=(TensorSpec("label", "INT64", (-1,)),))

    def classify(inputs: Tensors) -> Tensors:
        return [np.full(len(inputs[0]), 3)]

    assert try_rows(spec, classify).why_not == (
        "it isn't known whether its rows depend on each other, as all made-up rows give the same results"
    )


def test_try_rows_takes_results_without_elements_as_showing_nothing() -> None:
    spec = ModelSpec((TensorSpec("image", "UINT8", (-1, 8)),), (TensorSpec("boxes", "FP32", (-1, -1, 4)),))

    def detect(inputs: Tensors) -> Tensors:
        (images,) = inputs
        found = (images > 200).sum(axis=1).max()
        return [np.full((len(images), found, 4), images.max(), np.float32)]

    assert "as all made-up rows give the same results" in try_rows(spec, detect).why_not


def test_try_rows_judges_each_output_by_all_stacks_beside_a_random_one() -> None:
    lots = np.random.default_rng(0)
    spec = replace(SPEC, outputs=(TensorSpec("random", "FP32", (-1, 2)), *SPEC.outputs))

    def run(inputs: Tensors) -> Tensors:
        rows = inputs[0].copy()
        if len(rows) > 4:
            rows[4:] = 0
        return [lots.random(rows.shape, np.float32), rows]

    assert try_rows(spec, run).why_not == "output 'x' of a row depends on rows beside it"


@pytest.mark.parametrize("free", [1, 20])
def test_try_rows_reports_dependent_rows_of_models_that_require_several_at_a_time(free: int) -> None:
    def run(inputs: Tensors) -> Tensors:
        if len(inputs[0]) < 5 or inputs[0].shape[1] < free:
            raise ExecutionError("the window is longer than the input")
        return [inputs[0] - np.roll(inputs[0], 4, axis=0)]

    spec = ModelSpec((TensorSpec("a", "FP32", (-1, -1)),), (TensorSpec("x", "FP32", (-1, -1)),))
    assert try_rows(spec, run).why_not == "output 'x' of a row depends on the row beside it"


def test_try_rows_reports_mixing_that_only_longer_rows_show() -> None:
    def run(inputs: Tensors) -> Tensors:
        rows = inputs[0].copy()
        rows[:, 1:] += inputs[0][:, 1:].sum(axis=0)
        return [rows]

    spec = ModelSpec((TensorSpec("a", "FP32", (-1, -1)),), (TensorSpec("x", "FP32", (-1, -1)),))
    assert try_rows(spec, run).why_not == "output 'x' of a row depends on the row beside it"


def test_try_rows_ignores_random_outputs_and_judges_the_others() -> None:
    lots = np.random.default_rng(0)
    spec = replace(SPEC, outputs=(*SPEC.outputs, TensorSpec("y", "FP32", (-1, 2))))

    def run(inputs: Tensors) -> Tensors:
        return [lots.random(inputs[0].shape, np.float32), inputs[0] - inputs[0].mean(axis=0)]

    assert try_rows(SPEC, lambda inputs: run(inputs)[:1]).why_not == ""
    assert try_rows(spec, run).why_not == "output 'y' of a row depends on the row beside it"
