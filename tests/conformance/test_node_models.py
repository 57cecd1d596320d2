"""The one-operator models that ONNX ships with, their first dimensions made free: those that a trial finds stackable
have to be stackable. Among them is every kind of dependence between rows that an operator can have."""

from __future__ import annotations

import importlib
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort  # type: ignore[import-untyped,unused-ignore]
import pytest
from onnx.backend.test.case import node

from paceline.backends.base import Device, ModelSource
from paceline.backends.errors import ExecutionError
from paceline.backends.onnx.backend import OnnxBackend
from paceline.backends.spec import Array, Tensors
from tests.lengths import LONG
from tests.unit.backends.onnx_models import batched

MISTAKEN = {
    # Which rows come out at all depends on their contents. It is reported when it happens.
    "test_strnormalizer_export_monday_casesensintive_nochangecase",
}
"""Those that a trial wrongly finds stackable, none of which is the first of its operator."""

Rows = Mapping[str, Array]

_OF_EACH = 2 if LONG else 1
"""Models per operator. All of them take two minutes."""

_KINDS = (
    "add batch_normalization compress cumsum flatten gather lstm matmul "
    "nonzero reversesequence scatternd softmax topk where"
)
"""In the suite: an operator, by its module, for each way in which rows can depend on each other, or not."""


@pytest.mark.timeout(600)
def test_models_of_one_operator_that_a_trial_finds_stackable_are_stackable(tmp_path: Path) -> None:
    wrong, stacked = set(), 0
    for name, model, rows in _models():
        if (found := _stacked_and_alone(model, rows, tmp_path)) is not None:
            stacked += 1
            if not found:
                wrong.add(name)
    assert wrong == (MISTAKEN if LONG else set())
    assert stacked > (150 if LONG else 4)


def _models() -> Iterator[tuple[str, onnx.ModelProto, Rows]]:
    """With the rows that they come with."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # their test data includes infinities
        if LONG:
            node.collect_testcases(None)
        for kind in _KINDS.split():
            importlib.import_module(f"{node.__name__}.{kind}")
    seen: Counter[str] = Counter()
    for case in node._NodeTestCases:
        names = [one.name for one in case.model.graph.input]
        given = case.data_sets[0][0] if case.data_sets else ()
        operator, counts = case.model.graph.node[0].op_type, {*map(_rows_of, given)}
        if seen[operator] < _OF_EACH and len(given) == len(names) and len(counts - {None}) == len(counts) == 1:
            seen[operator] += 1
            model = onnx.ModelProto()
            model.CopyFrom(case.model)
            if _is_freed(model):
                yield case.name, model, dict(zip(names, map(_for_onnxruntime, given), strict=True))


def _rows_of(value: object) -> object:
    """None for values without rows."""
    return value.shape[0] if isinstance(value, np.ndarray) and value.ndim else None


def _is_freed(model: onnx.ModelProto) -> bool:
    """Make the first dimension of inputs and all dimensions of outputs free; False if one isn't a tensor."""
    for tensor in (*model.graph.input, *model.graph.output):
        if not tensor.type.HasField("tensor_type"):
            return False
        dims = tensor.type.tensor_type.shape.dim
        for number, dim in enumerate(dims[:1] if tensor in model.graph.input else dims):
            dim.Clear()
            dim.dim_param = f"d{number}"
    return True


def _for_onnxruntime(array: Array) -> Array:
    return array.astype(object) if array.dtype.kind in "US" else array


def _stacked_and_alone(model: onnx.ModelProto, rows: Rows, folder: Path) -> bool | None:
    """Whether the results of `rows` and of other rows are the same stacked as alone; None if the model isn't stackable,
    doesn't run, or isn't repeatable."""
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    options = ort.SessionOptions()
    options.log_severity_level = 4
    other = {name: np.ascontiguousarray(array[::-1]) for name, array in rows.items()}
    try:
        session = ort.InferenceSession(path, options)
        alone, again = ([session.run(None, one) for one in (rows, other)] for _ in range(2))
    except Exception:  # noqa: BLE001 - ONNX Runtime's exceptions share no base class below this one
        return None
    if not all(map(_are_alike, alone, again)):
        return None
    opened = OnnxBackend().open(ModelSource("m", path), Device())
    try:
        tried = opened.try_rows()
        if tried.why_not or any(tensor.dims[:1] != (-1,) for tensor in tried.spec.inputs):
            return None
        instance = opened.instance(batched(tried.spec), Device())
        given = [tuple(map(_encoded, one.values())) for one in (rows, other)]
        return all(map(_are_alike, alone, instance.execute(given).results))
    except ExecutionError:
        return False
    finally:
        opened.close()


def _encoded(array: Array) -> Array:
    return np.vectorize(str.encode, [object])(array) if array.dtype.hasobject and array.size else array


def _are_alike(one: Tensors, other: Tensors) -> bool:
    return all(
        a.shape == b.shape
        and (np.allclose(a, b, rtol=1e-2, atol=1e-4, equal_nan=True) if a.dtype.kind == "f" else _texts(a) == _texts(b))
        for a, b in zip(one, other, strict=True)
    )


def _texts(array: Array) -> list[str]:
    return [one.decode() if isinstance(one, bytes) else str(one) for one in array.ravel().tolist()]
