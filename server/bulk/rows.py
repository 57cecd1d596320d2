"""A chunk's rows as a model takes them.

Lives here: which rows are good, how large they are, and how some of them become the inputs of one call. Must not: know
columns (`conversion.py`), or choose which rows share a call (`batches.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from paceline.backends.lengths import Lengths
from paceline.backends.spec import Array
from paceline.server.bulk.values import BadRow, Places

__all__ = ["Rows", "Sizes", "Tensor"]

Sizes = tuple[int, ...]
"""One for each length of the model, in their order."""

_MANY_ELEMENTS = 4096
"""From so many elements of a row on, to copy row by row is faster than to copy by the places of elements."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """An input of all rows of a chunk. The elements of row i, in C order, are the `prod(shapes[i])` of `values` from
    `begins[i]` on. `values` of BYTES are an Arrow array of binary. `shapes` is [rows, axes]. `lengths`: which of the
    axes have which of the model's lengths. `fill` is what they are filled up with."""

    values: Array | pa.Array
    begins: Places
    shapes: Places
    lengths: Sequence[tuple[int, int]] = ()
    fill: object = 0

    def take(self, places: Places, common: Sizes) -> Array:
        """The rows at `places`, filled up to the `common` sizes; a view if they lie one after the other."""
        # hot path: 20 us a call if they do
        begins, own = self.begins[places], self.shapes[places]
        resized = own[0].tolist()
        for axis, number in self.lengths:
            resized[axis] = common[number]
        shape = tuple(resized)
        size, is_alike = math.prod(shape), bool((own == shape).all())
        if is_alike and bool((begins == begins[0] + np.arange(len(begins)) * size).all()):
            return self._at(slice(int(begins[0]), int(begins[0]) + len(begins) * size)).reshape(len(begins), *shape)
        if isinstance(self.values, np.ndarray) and size >= _MANY_ELEMENTS:
            target = np.full((len(begins), *shape), self.fill, self.values.dtype)
            for row, begin, mine in zip(target, begins.tolist(), own.tolist(), strict=True):
                row[tuple(map(slice, mine))] = self.values[begin : begin + math.prod(mine)].reshape(mine)
            return target
        if is_alike:
            return self._at((begins[:, None] + np.arange(size)).ravel()).reshape(len(begins), *shape)
        # Where in the target the rows' own elements are, is in the order in which they lie in `values`.
        sizes = own.prod(axis=1)
        ends = sizes.cumsum()
        elements = self._at(np.repeat(begins - (ends - sizes), sizes) + np.arange(ends[-1]))
        target = np.full((len(begins), *shape), self.fill, elements.dtype)
        target[within(own, shape)] = elements
        return target

    def _at(self, chosen: slice | Places) -> Array:
        """The chosen elements."""
        if isinstance(self.values, np.ndarray):
            return self.values[chosen]
        if isinstance(chosen, slice):
            part = self.values.slice(chosen.start, chosen.stop - chosen.start)
        else:
            part = self.values.take(pa.array(chosen))
        objects: Array = part.to_numpy(zero_copy_only=False)
        return objects


def within(sizes: Places, shape: tuple[int, ...]) -> Array:
    """Which elements of an array [rows, *shape] belong to its rows, if these are of `sizes` [rows, axes] and lie at the
    beginning of all axes."""
    inside = np.ones((len(sizes), *[1] * len(shape)), np.bool_)
    for axis, size in enumerate(shape):
        own = np.arange(size) < sizes[:, axis, None]
        inside = inside & own.reshape(len(sizes), *[size if each == axis else 1 for each in range(len(shape))])
    return inside


@dataclass(frozen=True, slots=True)
class Rows:
    """`good` are the places in the chunk of rows that the model can be given, ascending; all others are in `bad`.
    Unless `batched`, the model has no batch axis, and a call is of one row. `lengths` are what `take` may fill up, of
    which all rows of the chunk have the `sizes` [rows, lengths]."""

    inputs: Mapping[str, Tensor]
    good: Places
    bad: Sequence[BadRow]
    batched: bool
    lengths: Lengths | None
    sizes: Places

    @property
    def padded_sizes(self) -> Places:
        """The `sizes` of all rows, filled up as those of a call of its own."""
        padded = self.sizes.copy()
        for number, length in enumerate(self.lengths.spec.lengths if self.lengths is not None else ()):
            own, places = np.unique(self.sizes[:, number], return_inverse=True)
            padded[:, number] = np.array([length.padded(size) for size in own.tolist()], np.int64)[places]
        return padded

    @property
    def other_sizes(self) -> Places:
        """The sizes of all rows in the axes [rows, axes] that aren't filled up, of all inputs."""
        tensors = self.inputs.values()
        others = [np.delete(one.shapes, [axis for axis, _ in one.lengths], axis=1) for one in tensors]
        return np.concatenate([np.empty((len(self.sizes), 0), np.int64), *others], axis=1)

    def elements(self, places: Places) -> int:
        """How many elements the inputs of the rows at `places` have, without what they are filled up with."""
        return sum(int(tensor.shapes[places].prod(axis=1).sum()) for tensor in self.inputs.values())

    def common_sizes(self, places: Places) -> Sizes:
        """The sizes that the rows at `places` are filled up to if they share a call; () for a model without lengths."""
        lengths = self.lengths.spec.lengths if self.lengths is not None else ()
        longest = self.sizes[places].max(axis=0).tolist()
        return tuple([one.padded(size) for one, size in zip(lengths, longest, strict=True)])

    def take(self, places: Places, sizes: Sizes) -> dict[str, Array]:
        """The inputs of one call, by name: the rows at `places`, in that order, filled up to `sizes`, which
        `common_sizes` of these or more places returned. With rows in front if the model has a batch axis. May be views
        of the chunk, which are read-only. `places` are of `good`, and have one shape, but for what is filled up."""
        # hot path: 2 us a row, also of one float, with `Columns`, see bench/bulk_columns.py
        taken = {name: tensor.take(places, sizes) for name, tensor in self.inputs.items()}
        return taken if self.batched else {name: array.reshape(array.shape[1:]) for name, array in taken.items()}
