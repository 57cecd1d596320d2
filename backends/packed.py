"""A request's tensors as parts of one bytes object, not yet made into arrays.

Lives here: that value, and how many of them become the arrays of a batch. Must not: know messages. The rule: code that
doesn't know the class sees a sequence of arrays; a batch of many small requests never creates arrays for each.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any, overload

import numpy as np

from paceline.backends.base import Allocate
from paceline.backends.joining import join_bytes_into
from paceline.backends.spec import Array

__all__ = ["Packed", "PackedLayout", "are_alike", "stacked"]

_COPIED_TWICE_BYTES = 4_096
"""Up to this size a slice, which is a copy, costs less than a view."""


class PackedLayout:
    """Layout of a request's tensors: `tensors` are their dtypes, shapes and sizes in bytes, all in C order and little
    endian. Compared by identity."""

    __slots__ = ("rows", "tensors")

    def __init__(self, tensors: Sequence[tuple[np.dtype[Any], tuple[int, ...], int]]) -> None:
        self.tensors = tuple(tensors)
        self.rows = tensors[0][1][0] if tensors and tensors[0][1] else 0
        """Rows of each request, if axis 0 is the batch's."""


class Packed(Sequence[Array]):
    """The tensors that `layout` describes, at `starts` in `data`. As a sequence, read-only views of `data`."""

    __slots__ = ("_arrays", "data", "layout", "starts")

    def __init__(self, data: bytes, layout: PackedLayout, starts: tuple[int, ...]) -> None:
        self.data = data
        self.layout = layout
        self.starts = starts
        self._arrays: tuple[Array, ...] | None = None

    @property
    def arrays(self) -> tuple[Array, ...]:
        if self._arrays is None:
            places = zip(self.layout.tensors, self.starts, strict=True)
            self._arrays = tuple(np.ndarray(shape, dtype, self.data, start) for (dtype, shape, _), start in places)
        return self._arrays

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, index: int) -> Array: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Array]: ...

    def __getitem__(self, index: int | slice) -> Array | Sequence[Array]:
        return self.arrays[index]

    def __iter__(self) -> Iterator[Array]:
        return iter(self.arrays)


def are_alike(requests: Sequence[Sequence[Any]]) -> bool:
    """Whether all of `requests` are `Packed` with the same layout, so that `stacked` can make their batch."""
    # hot path: 50 ns a request
    first = requests[0]
    if type(first) is not Packed:
        return False
    layout = first.layout
    return not [one for one in requests if type(one) is not Packed or one.layout is not layout]


def stacked(requests: Sequence[Packed], padding_rows: int, allocate: Allocate | None = None) -> list[Array]:
    """One C-contiguous array per tensor: the requests' rows along axis 0, in order, followed by `padding_rows` copies
    of the last row. Large tensors, which lie in `allocate` where it has memory for them, are copied once, small ones
    twice."""
    # hot path: 0.2 us a tensor
    layout, columns = requests[0].layout, []
    rows = len(requests) * layout.rows + padding_rows
    for index, (dtype, one_shape, size_bytes) in enumerate(layout.tensors):
        shape = (rows, *one_shape[1:])
        pieces: list[bytes | memoryview]
        if size_bytes > _COPIED_TWICE_BYTES:
            pieces = [memoryview(one.data)[(start := one.starts[index]) : start + size_bytes] for one in requests]
        else:
            pieces = [one.data[(start := one.starts[index]) : start + size_bytes] for one in requests]
        if padding_rows:
            pieces += repeat(pieces[-1][size_bytes - size_bytes // layout.rows :], padding_rows)
        if allocate is not None and (target := allocate(index, shape)) is not None:
            join_bytes_into(target, pieces)
            columns.append(target)
            continue
        # Unlike `bytes`, the result is writable. Releases the GIL once for more than a MiB, else never.
        columns.append(np.ndarray(shape, dtype, bytearray().join(pieces)))
    return columns
