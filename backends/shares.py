"""The outputs of a batch, and each request's share of them.

Lives here: the two as values. Must not: know how batches are made, or what becomes of results. The rule: a share costs
one small object, whatever the outputs; arrays are made from it on demand, and bytes by slicing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np

from paceline.backends.spec import Array, Tensors

__all__ = ["Outputs", "Share"]


class Outputs:
    """A batch's outputs, one array each, all with the batch's rows along axis 0. `notes` are for callers that process
    many shares: what holds for all of them, to be computed once. `size_bytes` is the total; for object arrays it counts
    the references."""

    __slots__ = ("_data", "arrays", "notes", "size_bytes")

    def __init__(self, arrays: Tensors) -> None:
        self.arrays = arrays
        self.size_bytes = sum([one.nbytes for one in arrays])
        self.notes: dict[Any, Any] = {}
        self._data: dict[int, memoryview | None] = {}

    def data(self, place: int) -> memoryview | None:
        """The bytes of output `place`, row after row; None if its elements aren't plain contiguous bytes."""
        if place not in self._data:
            array = np.asarray(self.arrays[place])
            plain = array.flags.c_contiguous and not array.dtype.hasobject
            self._data[place] = array.reshape(-1).view(np.uint8).data if plain else None
        return self._data[place]


class Share(Sequence[Array]):
    """Rows `start` to `stop` of each output: a request's result. As a sequence, views of these rows."""

    __slots__ = ("outputs", "start", "stop")

    def __init__(self, outputs: Outputs, start: int, stop: int) -> None:
        self.outputs = outputs
        self.start = start
        self.stop = stop

    def __len__(self) -> int:
        return len(self.outputs.arrays)

    @overload
    def __getitem__(self, index: int) -> Array: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Array]: ...

    def __getitem__(self, index: int | slice) -> Array | Sequence[Array]:
        if isinstance(index, slice):
            return tuple(self)[index]
        return self.outputs.arrays[index][self.start : self.stop]

    def __iter__(self) -> Iterator[Array]:
        return iter([array[self.start : self.stop] for array in self.outputs.arrays])
