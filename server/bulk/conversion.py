"""From a column's values to the elements of a tensor, row by row, and from a model's outputs to a column's values.

Lives here: what is read of Arrow's types, which values the datatypes of the protocol hold, and why a row's don't fit;
which Arrow type an output is written as, and how outputs of many calls become one array of it. Must not: know which
rows or columns these are, or loop over good rows: what is done for each of them is done by numpy or Arrow.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from paceline.backends.spec import Array
from paceline.clients.casting import cast
from paceline.protos.datatypes import Datatype, by_name
from paceline.protos.tensors import float32_from_bf16
from paceline.server.bulk.rows import within
from paceline.server.bulk.values import BulkError, Places

__all__ = ["Decoded", "Dims", "Faults", "arrow_type", "cut", "decode", "encode", "side_by_side", "takes"]

Dims = tuple[int, ...]
"""The sizes of a row's axes, -1 for any."""

Faults = MutableMapping[int, str]
"""Why rows can't be given to the model, by their place in the chunk. The first reason stays."""

_LARGE = (pa.types.is_large_string, pa.types.is_large_binary)
_TEXT = (pa.types.is_string, pa.types.is_binary, pa.types.is_fixed_size_binary, *_LARGE)
_NUMBERS = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean)
_LISTS = (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list)


class Decoded(NamedTuple):
    """As `Tensor` has them."""

    values: Array | pa.Array
    begins: Places
    shapes: Places


def takes(datatype: str, dims: Dims, column: pa.DataType) -> bool:
    """Whether the values of a column of this type may be rows of an input: lists as deep as it has axes; a single value
    if that is a row; or a list of all elements in C order, if all dims are fixed."""
    depth, leaf = _depth(column)
    if not any(check(leaf) for check in (_TEXT if datatype == "BYTES" else _NUMBERS)):
        return False
    return depth == len(dims) or (depth == 0 and set(dims) <= {1, -1}) or (depth == 1 and dims != () and min(dims) > -1)


def decode(array: pa.Array, datatype: str, dims: Dims, faults: Faults) -> Decoded:
    """The rows of an input from the values of a column, of a type that it `takes`. Those that don't fit are added to
    `faults`, and mean nothing in what is returned. Views `array` if the model has its elements in the same form."""
    rows, (depth, _) = len(array), _depth(array.type)
    expected = f"expected {datatype} of shape {list(dims)}"
    lists = _Lists(array, dims if depth == len(dims) else (-1,) * depth)
    while lists.go_down(faults, expected):
        pass
    if depth == len(dims):
        shapes = np.stack(lists.sizes, axis=1) if depth else np.empty((rows, 0), np.int64)
        for axis, dim in enumerate(dims):
            if dim != -1:
                _add(faults, shapes[:, axis] != dim, lambda row: f"{expected}, got shape {shapes[row].tolist()}")
    else:
        shapes = np.broadcast_to(np.abs(np.array(dims, np.int64)), (rows, len(dims)))
        if depth:
            sizes, elements = lists.sizes[0], int(np.prod(dims))
            _add(faults, sizes != elements, lambda row: f"{expected}, or {elements} elements, got {sizes[row]}")
    return Decoded(_elements(lists, by_name(datatype), faults), lists.bounds[:-1], shapes)


def side_by_side(columns: Sequence[Decoded], dims: Dims) -> Decoded:
    """The rows whose elements are single values of each of these columns, in their order."""
    rows, size = len(columns[0].begins), len(columns)
    if isinstance(columns[0].values, np.ndarray):
        values: Array | pa.Array = np.stack([one.values for one in columns], axis=1).ravel()
    else:
        places = np.arange(rows * size).reshape(size, rows).T.ravel()
        values = pa.concat_arrays([one.values for one in columns]).take(pa.array(places))
    shape = np.array([size] if dims == (-1,) else dims, np.int64)
    return Decoded(values, np.arange(rows) * size, np.broadcast_to(shape, (rows, len(shape))))


class _Lists:
    """How deep a column has been looked into. The values of row i at this depth are `array[bounds[i]:bounds[i + 1]]`;
    `sizes` has the rows' sizes in each axis above. For rows at fault they mean nothing."""

    def __init__(self, array: pa.Array, dims: Dims) -> None:
        self.array = array
        self.bounds: Places = np.arange(len(array) + 1)
        self.sizes: list[Places] = []
        self._dims = dims

    def go_down(self, faults: Faults, expected: str) -> bool:
        """Look into the lists at this depth; false if there are none."""
        array, bounds, axis = self.array, self.bounds, len(self.sizes)
        if array.null_count:
            what = "a null in it" if axis else "null"
            _add(faults, self._rows_of(array.is_null()), lambda _: f"{expected}, got {what}")
        is_fixed = pa.types.is_fixed_size_list(array.type)
        if is_fixed:
            ends = (np.arange(len(array) + 1) + array.offset) * array.type.list_size
        elif any(check(array.type) for check in _LISTS):
            ends = array.offsets.to_numpy().astype(np.int64, copy=False)
        else:
            return False
        # A row's size in this axis is that of its first list, if it has any.
        sizes, counts = np.diff(ends), np.diff(bounds)
        own = np.append(sizes, 0)[bounds[:-1]]
        own[counts == 0] = max(0, self._dims[axis])
        if axis and not is_fixed:
            differs = self._rows_of(pa.array(sizes != np.repeat(own, counts)))
            _add(faults, differs, lambda _: f"{expected}, got lists of different sizes in axis {axis}")
        self.sizes.append(own)
        self.bounds = ends[bounds] - ends[0]
        self.array = array.values.slice(ends[0], ends[-1] - ends[0])
        return True

    def _rows_of(self, chosen: pa.BooleanArray) -> Array:
        """Of each row, whether any of its values is chosen."""
        found = np.zeros(len(self.bounds) - 1, np.bool_)
        places = np.flatnonzero(chosen.to_numpy(zero_copy_only=False))
        found[np.searchsorted(self.bounds, places, "right") - 1] = True
        return found


def _elements(lists: _Lists, datatype: Datatype, faults: Faults) -> Array | pa.Array:
    """All elements in the form that the model has them in; of BYTES, Arrow's."""
    array = lists.array
    if datatype.name == "BYTES":
        return array.cast(pa.large_binary() if any(check(array.type) for check in _LARGE) else pa.binary())
    if array.null_count:
        array = array.fill_null(pa.scalar(0).cast(array.type))
    if pa.types.is_boolean(array.type):
        values: Array = array.cast(pa.uint8()).to_numpy().view(np.bool_)
    else:
        values = array.to_numpy()
    try:
        return _cast(values, datatype)
    except ValueError:
        target = np.zeros(len(values), datatype.dtype)
        _cast_rows(values, target, lists.bounds, datatype, 0, faults)
        return target


def _cast(values: Array, datatype: Datatype) -> Array:
    """As `cast`; raises ValueError for whole numbers, too, of which a column of floats may not have kept all digits."""
    if datatype.name == "BF16":
        # A column's numbers are numbers, while `cast` takes uint16 for bits.
        return cast(values.astype(np.float32) if values.dtype == np.uint16 else values, datatype)
    if values.dtype.kind == "f" and datatype.dtype.kind in "iu":
        inexact = np.abs(values) >= 2.0 ** (np.finfo(values.dtype).nmant + 1)
        if inexact.any():
            raise ValueError(f"the column has {values.dtype}, which can't tell {values[inexact][0]:.0f} from others")
    return cast(values, datatype)


def _cast_rows(values: Array, target: Array, bounds: Places, datatype: Datatype, first: int, faults: Faults) -> None:
    """Write `values` of the rows between `bounds`, of which the first one's place is `first`, into `target`."""
    part = slice(bounds[0], bounds[-1])
    try:
        target[part] = _cast(values[part], datatype)
    except ValueError as error:
        if len(bounds) == 2:
            faults.setdefault(first, f"expected values that are {datatype.name} without loss: {error}")
            return
        # Halved until the rows at fault are alone: what it costs depends on how many of them there are.
        middle = len(bounds) // 2
        _cast_rows(values, target, bounds[: middle + 1], datatype, first, faults)
        _cast_rows(values, target, bounds[middle:], datatype, first + middle, faults)


def _depth(column: pa.DataType) -> tuple[int, pa.DataType]:
    """How many lists deep the values of a column are, and of which type what is in them."""
    depth = 0
    while any(check(column) for check in _LISTS):
        depth, column = depth + 1, column.value_type
    return depth, column


def _add(faults: Faults, chosen: Array, reason: Callable[[int], str]) -> None:
    for place in np.flatnonzero(chosen).tolist():
        faults.setdefault(place, reason(place))


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
