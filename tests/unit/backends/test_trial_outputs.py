"""What a trial finds out about the shapes of a model's outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from paceline.backends.errors import ExecutionError
from paceline.backends.row_trial import try_rows
from paceline.backends.spec import Array, ModelSpec, Tensors, TensorSpec

SPEC = ModelSpec((TensorSpec("a", "FP32", (-1, 2)),), (TensorSpec("x", "FP32", (-1, 2)),))


def test_try_rows_reports_an_output_with_another_number_of_rows() -> None:
    def find(inputs: Tensors) -> Tensors:
        return [np.repeat(inputs[0], 3, axis=0)]

    assert try_rows(SPEC, find).why_not == "output 'x' has shape [3, 2] for one row and [6, 2] for two"


def test_try_rows_finds_outputs_whose_rank_depends_on_rows() -> None:
    tried = try_rows(SPEC, lambda inputs: [inputs[0].squeeze()])
    assert [tensor.any_rank for tensor in tried.spec.outputs] == [True]
    assert tried.why_not == "output 'x' has shape [2] for one row and [2, 2] for two"


def test_try_rows_takes_a_rank_that_is_not_declared_for_one_of_several() -> None:
    spec = ModelSpec((TensorSpec("a", "FP32", (-1, -1)),), (TensorSpec("x", "FP32", (-1, -1, -1)),))

    def run(inputs: Tensors) -> Tensors:
        if inputs[0].shape[1] != 1:
            raise ExecutionError("another rank")
        return [inputs[0].reshape(-1, 1, 1, 1)]

    assert try_rows(spec, run).spec.outputs == (TensorSpec("x", "FP32", (-1, -1, -1, -1), assumed=True),)


def test_try_rows_leaves_dims_of_outputs_that_it_has_not_seen_assumed() -> None:
    def refuse(inputs: Sequence[Array]) -> Tensors:
        raise ExecutionError("no")

    spec = replace(SPEC, outputs=(TensorSpec("x", "FP32", (-1, 4), assumed=True),))
    assert try_rows(spec, refuse).spec == spec


def test_try_rows_finds_the_rank_of_an_output_if_it_is_unknown() -> None:
    tried = try_rows(replace(SPEC, outputs=(TensorSpec("x", "FP32", ()),)), list)
    assert [tensor.dims for tensor in tried.spec.outputs] == [(-1, -1)]
    assert tried.why_not == ""
