"""The classification extension: only the largest few elements of an output, with index and label.

Lives here: reading what a request wants, choosing and labelling elements; pure numpy. Must not: whole messages, models,
or files other than label files. Source of the form `value:index[:label]`: Triton's "classification" extension.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from paceline.backends.spec import Array
from paceline.protos.inference_pb2 import InferParameter
from paceline.protos.model_config_pb2 import ModelConfig
from paceline.server.errors import InvalidRequest
from paceline.server.files import read_inside

Labels = Mapping[str, Sequence[bytes]]
"""For each output that has them, the name of each class, "" for none."""

_DATATYPES = ("UINT8", "UINT16", "UINT32", "UINT64", "INT8", "INT16", "INT32", "INT64", "FP32", "FP64")
_MAX_ELEMENTS = 1_000_000
"""Triton's bound as well; here elements are chosen on the event loop."""


def class_count(parameters: Mapping[str, InferParameter], datatype: str) -> int:
    """How many classes a request wants of an output of `datatype`. Raises InvalidRequest."""
    kind = parameters["classification"].WhichOneof("parameter_choice")
    if kind != "int64_param":
        raise InvalidRequest(f"parameter 'classification': expected int64_param, got {kind or 'none'}")
    count: int = parameters["classification"].int64_param
    if count <= 0:
        raise InvalidRequest(f"parameter 'classification': expected a number of classes > 0, got {count}")
    if "shared_memory_region" in parameters:
        raise InvalidRequest("expected one of 'shared_memory_region' and 'classification', got both")
    check_datatype(datatype)
    return count


def check_datatype(datatype: str) -> None:
    """Raise InvalidRequest unless classes can be made of an output of `datatype`."""
    if datatype not in _DATATYPES:
        raise InvalidRequest(f"parameter 'classification': expected one of {', '.join(_DATATYPES)}, got {datatype}")


def classes_of(array: Array, count: int, labels: Sequence[bytes], *, by_rows: bool) -> Array:
    """The `count` largest elements of each row of `array` (of all of it, unless `by_rows`) as BYTES, largest first.

    Shape [rows, classes] or [classes]; classes is `count`, or the number of elements if these are fewer. Equal elements
    are ordered by index; NaN counts as -inf. Raises InvalidRequest for more elements than the event loop should spend
    its time on.
    """
    if array.size > _MAX_ELEMENTS:
        raise InvalidRequest(
            f"parameter 'classification': expected an output of up to {_MAX_ELEMENTS} elements, got {array.size}"
        )
    rows = array.shape[0] if by_rows else 1
    values = array.reshape(rows, array.size // rows if rows else 0)
    indices = _largest(values, min(count, values.shape[1]))
    chosen = np.take_along_axis(values, indices, axis=1)
    texts = [_text(*one, labels) for one in zip(chosen.ravel().tolist(), indices.ravel().tolist(), strict=True)]
    return np.array(texts, object).reshape(indices.shape if by_rows else indices.shape[1:])


def read_labels(config: ModelConfig, folder: Path) -> dict[str, tuple[bytes, ...]]:
    """The labels of each output that has a `label_filename`, a file in the model's `folder` with one name per line, the
    first being that of class 0. Raises ConfigError."""
    return {
        one.name: tuple(
            read_inside(f"output '{one.name}': label_filename", folder, one.label_filename)
            .removeprefix(codecs.BOM_UTF8)
            .splitlines()
        )
        for one in config.output
        if one.label_filename
    }


def _largest(values: Array, count: int) -> Array:
    """Indices of the `count` largest in each row, descending, equal ones ascending by index."""
    if values.dtype.kind == "f":
        values = np.where(np.isnan(values), values.dtype.type(-np.inf), values)
    rows, size = values.shape
    if not count:
        return np.empty((rows, 0), np.intp)
    least = np.partition(values, size - count, axis=1)[:, size - count, None]
    above, equal = values > least, values == least
    room = count - above.sum(axis=1, keepdims=True)
    found = np.nonzero(above | (equal & (equal.cumsum(axis=1) <= room)))[1].reshape(rows, count)
    # Reversed twice: a stable sort is ascending, and equal elements are to stay in order.
    backwards = np.take_along_axis(values, found, axis=1)[:, ::-1]
    order = count - 1 - np.argsort(backwards, axis=1, kind="stable")[:, ::-1]
    return np.take_along_axis(found, order, axis=1)


def _text(value: float, index: int, labels: Sequence[bytes]) -> bytes:
    number = b"%f" % value if isinstance(value, float) else b"%d" % value
    label = labels[index] if index < len(labels) else b""
    return b"%b:%d:%b" % (number, index, label) if label else b"%b:%d" % (number, index)
