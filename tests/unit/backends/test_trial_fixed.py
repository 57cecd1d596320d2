"""Trials of models that always take the same number of rows: whether these can be rows of different requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest

from paceline.backends.base import Device, ModelSource
from paceline.backends.errors import ExecutionError, OutOfMemory
from paceline.backends.made_up import MAX_BYTES
from paceline.backends.onnx.backend import OnnxBackend
from paceline.backends.row_trial import try_rows
from paceline.backends.spec import Array, ModelSpec, Tensors, TensorSpec
from paceline.backends.trials import Trial
from tests import models


def spec(rows: int, size: int = 3, outputs: Sequence[tuple[int, ...]] = ()) -> ModelSpec:
    dims = outputs or [(rows, size)]
    return ModelSpec(
        (TensorSpec("a", "FP32", (rows, size)),),
        tuple(TensorSpec(f"x{index}", "FP32", one) for index, one in enumerate(dims)),
    )


def trial(folder: Path, model: onnx.ModelProto, own_process: str = "false") -> Trial:
    path = models.write(model, folder / "model.onnx")
    opened = OnnxBackend().open(ModelSource("m", path, parameters={"paceline.own_process": own_process}), Device())
    try:
        return opened.try_rows()
    finally:
        opened.close()


@pytest.mark.parametrize("own_process", ["false", "true"])
def test_fixed_rows_that_are_independent_are_confirmed(tmp_path: Path, own_process: str) -> None:
    tried = trial(tmp_path, models.fixed_batch(16, 3), own_process)
    assert (tried.why_not, tried.fixed_rows) == ("", 16)
    assert tried.spec.inputs[0].dims == tried.spec.outputs[0].dims == (16, 3)


@pytest.mark.parametrize("datatype", ["BYTES", "BF16", "INT64", "BOOL"])
def test_fixed_rows_of_any_datatype_are_confirmed(tmp_path: Path, datatype: str) -> None:
    assert trial(tmp_path, models.identity(datatype, (4, 3))).fixed_rows == 4


@pytest.mark.parametrize("kind", ["softmax", "cumulate"])
@pytest.mark.parametrize("rows", [2, 3, 16])
def test_fixed_rows_that_an_onnx_model_mixes_are_reported(tmp_path: Path, kind: str, rows: int) -> None:
    tried = trial(tmp_path, models.over_rows(kind, rows))
    row = "the row" if rows == 2 else "rows"
    assert (tried.why_not, tried.fixed_rows) == (f"output 'OUTPUT0' of a row depends on {row} beside it", 0)


@pytest.mark.parametrize("rows", [2, 3, 7, 9, 16, 33])
@pytest.mark.parametrize("step", [1, -1], ids=["behind", "ahead"])
def test_fixed_rows_that_others_at_any_distance_change_are_reported(rows: int, step: int) -> None:
    def look(distance: int, inputs: Sequence[Array]) -> Tensors:
        given = inputs[0][::step]
        before = np.zeros_like(given)
        before[distance:] = given[:-distance]
        return [np.maximum(given, before)[::step]]

    assert not any(try_rows(spec(rows), partial(look, distance)).fixed_rows for distance in range(1, rows))


@pytest.mark.parametrize(
    "mix",
    [
        lambda rows: rows - rows.mean(axis=0),
        lambda rows: rows / np.sqrt(np.mean(rows**2)),
        lambda rows: rows * (rows.max() > 1.5),
        lambda rows: np.sort(rows, axis=0),
        lambda rows: np.roll(rows, 5, axis=0),
        lambda rows: rows[::-1],
        lambda rows: np.repeat(rows[:1], len(rows), axis=0),
    ],
    ids=["mean", "norm", "largest", "sort", "roll", "flip", "first"],
)
def test_fixed_rows_that_are_mixed_in_other_ways_are_reported(mix: Callable[[Array], Array]) -> None:
    assert not try_rows(spec(16), lambda inputs: [mix(inputs[0])]).fixed_rows


@pytest.mark.parametrize("place", [0, 7, 15])
def test_fixed_rows_that_depend_on_their_place_are_reported(place: int) -> None:
    """As with a bias for each row, a table of positions, or room for only so many."""

    def run(inputs: Sequence[Array]) -> Tensors:
        out = inputs[0].copy()
        out[place] += 1
        return [out]

    assert not try_rows(spec(16), run).fixed_rows


def test_fixed_rows_are_seen_in_every_output_or_not_at_all() -> None:
    def run(inputs: Sequence[Array]) -> Tensors:
        return [inputs[0], inputs[0].sum(keepdims=True)[0]]

    assert try_rows(spec(4, outputs=[(4, 3), (1,)]), run) == Trial(spec(4, outputs=[(4, 3), (1,)]))


def test_fixed_rows_of_an_output_with_another_number_are_reported() -> None:
    """As of a detector, whose output has as many rows as it found."""
    found = try_rows(spec(4, outputs=[(-1, 3)]), lambda inputs: [inputs[0][inputs[0][:, 0] > 0]])
    assert "output 'x0' has shape" in found.why_not
    assert not found.fixed_rows


def test_fixed_rows_of_outputs_declared_otherwise_are_confirmed() -> None:
    found = try_rows(spec(4, outputs=[(1, 3), (-1, 3)]), lambda inputs: [inputs[0]] * 2)
    assert (found.fixed_rows, [one.dims for one in found.spec.outputs]) == (4, [(-1, 3)] * 2)


def test_fixed_rows_that_all_give_the_same_are_not_believed() -> None:
    found = try_rows(spec(4), lambda inputs: [np.ones_like(inputs[0])])
    assert (found.fixed_rows, found.why_not) == (
        0,
        "it isn't known whether its rows depend on each other, as all made-up rows give the same results",
    )


def test_fixed_rows_are_run_by_that_number_only() -> None:
    sizes = set[int]()

    def run(inputs: Sequence[Array]) -> Tensors:
        sizes.add(len(inputs[0]))
        return list(inputs)

    words = ModelSpec((TensorSpec("a", "INT64", (5, -1)),), (TensorSpec("x", "INT64", (5, -1)),))
    assert try_rows(words, run).fixed_rows == 5
    assert sizes == {5}


def test_fixed_rows_that_are_too_large_are_not_tried() -> None:
    size = MAX_BYTES // 4 // 16 * 3 // 4  # with their results, more than there may be
    found = try_rows(spec(16, size), list)
    assert (found.fixed_rows, found.why_not) == (
        0,
        "it isn't known whether its rows depend on each other, as its trial was given up: 16 rows with their results "
        "take 96 MiB, and may take 64 MiB",
    )


def test_fixed_rows_suffice_in_pairs_if_memory_ends() -> None:
    runs = 0

    def run(inputs: Sequence[Array]) -> Tensors:
        nonlocal runs
        if len(np.unique(inputs[0], axis=0)) == 8:
            runs += 1
            raise OutOfMemory("no memory")
        return list(inputs)

    assert try_rows(spec(16), run).fixed_rows == 16
    assert runs


def test_fixed_rows_of_a_model_that_refuses_made_up_inputs_stay_fixed() -> None:
    def run(inputs: Sequence[Array]) -> Tensors:
        raise ExecutionError("no")

    found = try_rows(spec(16), run)
    assert (found.spec, found.fixed_rows) == (spec(16), 0)
    assert "it accepts no made-up inputs (no)" in found.why_not
