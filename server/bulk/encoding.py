"""From a model's outputs to a column's values.

Lives here: which Arrow type an output is written as, and how outputs of many calls become one array of it. Must not:
know which rows these are; a type depends on data.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pyarrow as pa

from paceline.backends.spec import Array
from paceline.protos.datatypes import by_name
from paceline.protos.tensors import float32_from_bf16
from paceline.server.bulk.rows import within
from paceline.server.bulk.values import BulkError, Places

__all__ = ["arrow_type", "cut", "encode"]

_MOST_OFFSET = 2**31 - 1


def arrow_type(datatype: str, dims: Sequence[int], *, binary: bool = False) -> pa.DataType:
    """What an output of `datatype` and `dims`, batch axis left out, is written as: lists as deep as it has axes, of
    fixed size where dims are fixed. BYTES are text unless `binary`, and BF16, which Arrow doesn't have, is FP32."""
    if datatype == "BYTES":
        kind = pa.binary() if binary else pa.string()
    else:
        kind = pa.float32() if datatype == "BF16" else pa.from_numpy_dtype(by_name(datatype).dtype)
    for dim in reversed(dims):
        kind = pa.list_(kind, dim) if dim > 0 else pa.list_(kind)
    return kind


def cut(output: Array, own: Places) -> Array:
    """The elements, in C order, of `output` [rows, *axes] with its rows cut back to their `own` sizes [rows, axes]."""
    shape = output.shape[1:]
    return output.ravel() if bool((own == shape).all()) else output[within(own, shape)]


def encode(elements: Array, sizes: Places, kind: pa.DataType) -> tuple[pa.Array, list[int]]:
    """Rows of these `sizes` [rows, axes] as an array of `kind`, an `arrow_type`, and the places of those with text that
    isn't UTF-8, which mean nothing in it. `elements` are theirs, in C order."""
    kinds = [kind]
    for _ in range(sizes.shape[1]):
        kinds.append(kinds[-1].value_type)
    array, faulty = _leaves(elements, sizes, kinds.pop())
    for axis, kind in reversed([*enumerate(kinds)]):
        if pa.types.is_fixed_size_list(kind):
            array = pa.FixedSizeListArray.from_arrays(array, type=kind)
            continue
        ends = np.repeat(sizes[:, axis], sizes[:, :axis].prod(axis=1)).cumsum()
        _check_size(int(ends[-1]) if len(ends) else 0)
        offsets = np.concatenate([[0], ends]).astype(np.int32)
        array = pa.ListArray.from_arrays(pa.array(offsets), array, type=kind)
    return array, faulty


def _leaves(elements: Array, sizes: Places, kind: pa.DataType) -> tuple[pa.Array, list[int]]:
    if elements.dtype == object:
        _check_size(sum(map(len, elements)))
        try:
            return pa.array(elements, pa.binary()).cast(kind), []
        except pa.ArrowInvalid:
            faulty = [place for place, element in enumerate(elements) if not _is_utf8(element)]
            elements = elements.copy()
            elements[faulty] = b""
            rows = np.searchsorted(sizes.prod(axis=1).cumsum(), faulty, "right")
            return pa.array(elements, pa.binary()).cast(kind), np.unique(rows).tolist()
    if kind == pa.float32() and elements.dtype == by_name("BF16").dtype:
        elements = float32_from_bf16(elements)
    return pa.array(elements, kind), []


def _is_utf8(element: bytes) -> bool:
    try:
        element.decode()
    except UnicodeDecodeError:
        return False
    return True


def _check_size(size: int) -> None:
    """Raises BulkError if a list or text of Arrow's can't be so large, over all rows of a chunk."""
    if size > _MOST_OFFSET:
        raise BulkError(
            f"outputs of a chunk: expected at most {_MOST_OFFSET} elements or bytes in a column, got {size}: "
            f"chunks have fewer rows with less --memory"
        )
