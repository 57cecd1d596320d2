"""In which sizes requests of one batch may differ, as they are filled up to common ones.

Lives here: reading and checking these sizes of a request. Must not: fill up anything, or know batches, or the states of
sequences: the sizes of lengths that only those have are added with them.
"""

from __future__ import annotations

from collections.abc import Sequence

from paceline.backends.spec import ModelSpec, Shape
from paceline.server.errors import InvalidRequest


class Sizes:
    """The sizes of requests to `model` in the lengths of `spec`."""

    def __init__(self, model: str, spec: ModelSpec) -> None:
        self._model = model
        self._spec = spec
        self._places = [[place for place in length.inputs if place[0] < len(spec.inputs)] for length in spec.lengths]
        self._axes = {place for places in self._places for place in places}

    def of(self, shapes: Sequence[Shape]) -> tuple[Shape, Sequence[Shape]]:
        """The size in each length (1 in those of states) of a request whose inputs have `shapes`, and `shapes` with -1
        in place of these.
        Raises InvalidRequest for a size of 0, as a batch of nothing costs nothing, and for axes of one length that have
        different sizes."""
        if not self._places:
            return (), shapes
        sizes = tuple([self._size(places, shapes) if places else 1 for places in self._places])
        rest = [
            tuple([-1 if (index, axis) in self._axes else size for axis, size in enumerate(shape)])
            for index, shape in enumerate(shapes)
        ]
        return sizes, rest

    def _size(self, places: Sequence[tuple[int, int]], shapes: Sequence[Shape]) -> int:
        first_index, first_axis = places[0]
        size = shapes[first_index][first_axis]
        first_name = self._spec.inputs[first_index].name
        for index, axis in places:
            if shapes[index][axis] != size or not size:
                name, shape = self._spec.inputs[index].name, list(shapes[index])
                expected = f"{size} in axis {axis}, as in axis {first_axis} of input '{first_name}'"
                raise InvalidRequest(
                    f"model '{self._model}': input '{name}': expected "
                    f"{expected if size else f'a size above 0 in axis {axis}'}, got {shape[axis]} in shape {shape}"
                )
        return size
