"""What the requests of a load have, as far as batching goes, and which of it executions are measured with.

Lives here: from shapes to rows, keys and sizes, as the server reads them. Must not: execute, or draw shapes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.backends.spec import Array, ModelSpec, Shape
from paceline.clients.inputs import InputError, TypedInputs
from paceline.server.errors import InvalidRequest
from paceline.server.models.served_model import ServedModel
from paceline.server.requests.inner_request import array_request
from paceline.server.tune.simulation import Contents

__all__ = ["LoadContents", "contents_of"]


@dataclass(frozen=True, slots=True)
class LoadContents:
    """The `contents` of `requests`, in turn. `measured`: shapes of inputs, by the sizes that their rows have, filled
    up: the smallest, the mean one or what is next to it, the largest. `typical_size`: the mean."""

    requests: Sequence[TypedInputs]
    contents: Sequence[Contents]
    measured: Mapping[int, Mapping[str, Shape]]
    typical_size: int


def contents_of(served: ServedModel, requests: Sequence[TypedInputs], order: Sequence[int]) -> LoadContents:
    """Of a load with these `requests`, which come in this `order`. Raises InputError for what the model can't take."""
    spec = served.spec
    arrays = [one.arrays for one in requests]
    found = [_contents(served, inputs) for inputs in arrays]
    if len({one.key for one in found}) > 1:
        # They differ in more than lengths, and a row's elements are what its size is.
        found = [
            replace(one, row_size=_elements(spec, inputs, bool(served.max_batch_rows)))
            for one, inputs in zip(found, arrays, strict=True)
        ]
    padded = [tuple(length.padded(size) for length, size in zip(spec.lengths, one.sizes, strict=True)) for one in found]
    sizes = [one.size(filled) for one, filled in zip(found, padded, strict=True)]
    mean = round(sum(sizes[number] for number in order) / len(order))
    chosen = sorted({min(sizes), min(sizes, key=lambda size: abs(size - mean)), max(sizes)})
    measured = {}
    for size in chosen:
        place = sizes.index(size)
        measured[size] = _filled(spec, arrays[place], padded[place])
    return LoadContents(requests, found, measured, mean)


def _contents(served: ServedModel, inputs: Mapping[str, Array]) -> Contents:
    try:
        options = served.codec.read(array_request(served, inputs, parameters={})).options
    except InvalidRequest as error:
        raise InputError(str(error)) from None
    return Contents(options.rows, options.key, options.sizes)


def _elements(spec: ModelSpec, inputs: Mapping[str, Array], has_rows: bool) -> int:
    """Of a row, in all inputs, apart from lengths."""
    lengths = {place for length in spec.lengths for place in length.inputs}
    shapes = [(index, inputs[one.name].shape) for index, one in enumerate(spec.inputs) if one.name in inputs]
    each: list[int] = [
        math.prod(size for axis, size in enumerate(shape) if axis >= has_rows and (index, axis) not in lengths)
        for index, shape in shapes
    ]
    return max(1, sum(each))


def _filled(spec: ModelSpec, inputs: Mapping[str, Array], sizes: Shape) -> dict[str, Shape]:
    """The shapes of `inputs`, filled up to `sizes`."""
    shapes = {name: [*array.shape] for name, array in inputs.items()}
    for length, size in zip(spec.lengths, sizes, strict=True):
        for index, axis in length.inputs:
            shapes[spec.inputs[index].name][axis] = size
    return {name: tuple(shape) for name, shape in shapes.items()}
