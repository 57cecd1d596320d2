"""Requests of different sizes in one batch: filled up to common sizes, and their results cut back to their own.

Lives here: which axes have which size, what they are filled up with, and the copies, in pure numpy. Must not: a
runtime; decide what the common sizes are (`spec.Length`) or which requests share a batch. The rules: a row is copied
once; results are views; requests that all have the common sizes are executed as if there were no lengths.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from operator import mul
from time import monotonic_ns
from typing import Any, NamedTuple

import numpy as np

from paceline.backends.base import Allocate, DeviceTensor, Execution
from paceline.backends.batching import (
    MAX_HELD_BYTES,
    MIN_RELEASING_ELEMENTS,
    Packed,
    Run,
    check_count,
    join_into,
    rows_of,
    run_batch,
    split,
)
from paceline.backends.errors import ExecutionError, UnfitOutputs
from paceline.backends.spec import Array, ModelSpec, Shape, Tensors, TensorSpec
from paceline.protos.datatypes import by_name

Inputs = Sequence[Array | DeviceTensor]
Axes = tuple[tuple[int, int], ...]
"""Pairs of an axis and the index of the length that it has."""


def filling(tensor: TensorSpec) -> Any:
    """An element of `tensor` that fills it up. Raises ValueError if its datatype can't hold `tensor.fill`."""
    fill, dtype = tensor.fill, by_name(tensor.datatype).dtype
    if tensor.datatype == "BYTES":
        element: Any = b""
        fits = fill == 0
    elif tensor.datatype == "BF16":
        with np.errstate(over="ignore"):
            bits = int(np.asarray(fill, np.float32).view(np.uint32))
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        element = np.uint16(rounded if math.isfinite(fill) else bits >> 16)
        fits = not math.isfinite(fill) or rounded & 0x7F80 != 0x7F80
    elif dtype.kind == "f":
        with np.errstate(over="ignore"):
            element = dtype.type(fill)
        fits = math.isinf(fill) or not np.isinf(element)
    else:
        lowest, highest = (0, 1) if dtype.kind == "b" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
        fits = math.isfinite(fill) and fill == int(fill) and lowest <= fill <= highest
        element = dtype.type(int(fill)) if fits else None
    if not fits:
        raise ValueError(f"expected a fill that {tensor.datatype} can hold, got {fill}")
    return element


class Filling(NamedTuple):
    """The requests of a batch have `sizes`, one for each length, and are filled up to those in `common`."""

    lengths: Lengths
    sizes: list[Shape]
    common: Shape

    def shape(self, index: int, column: Inputs) -> Shape:
        """What all of `column` (input `index`) are filled up to, without rows. ExecutionError if other axes differ."""
        axes = self.lengths.inputs[index]
        first, *others = [_resized(one.shape, axes, self.common)[1:] for one in column]
        if others.count(first) < len(others):
            shapes = [list(one.shape[1:]) for one in column]
            raise ExecutionError(f"requests of one batch don't fit together: input {index} has the shapes {shapes}")
        return first

    def own_shape(self, index: int, number: int, shape: Shape) -> Shape:
        """`shape`, which output `index` of request `number` has, cut back."""
        return _resized(shape, self.lengths.outputs[index], self.sizes[number])

    def check(self, shapes: Sequence[Shape]) -> None:
        """Raise UnfitOutputs unless outputs of `shapes` have the common sizes where they are cut back."""
        spec = self.lengths.spec
        for tensor, shape, axes in zip(spec.outputs, shapes, self.lengths.outputs, strict=True):
            for axis, number in axes:
                if shape[axis : axis + 1] != (self.common[number],):
                    name, expected = spec.lengths[number].name, self.common[number]
                    raise UnfitOutputs(
                        f"output '{tensor.name}': expected size {expected} in axis {axis}, to which the inputs' length "
                        f"'{name}' was filled up, got shape {list(shape)}"
                    )
        for one in spec.joined:
            shape, least = shapes[one.output], sum(self.common[number] for number in one.parts if number is not None)
            size = shape[one.axis] if one.axis < len(shape) else -1
            if size < least or (size > least and None not in one.parts):
                name, more = spec.outputs[one.output].name, " or more" * (None in one.parts)
                raise UnfitOutputs(
                    f"output '{name}': expected size {least}{more} in axis {one.axis}, to which its parts were "
                    f"filled up, got shape {list(shape)}"
                )

    def cut(self, results: Sequence[Tensors]) -> Sequence[Tensors]:
        """`results`, of which there is one per request, cut back to their own sizes. Views, but for joined axes."""
        if not any(self.lengths.outputs) and not self.lengths.joined:
            return results
        return [
            result
            if size == self.common
            else tuple([self._own(index, number, array) for index, array in enumerate(result)])
            for number, (result, size) in enumerate(zip(results, self.sizes, strict=True))
        ]

    def _own(self, index: int, number: int, array: Array) -> Array:
        """What is request `number`'s own of output `index`."""
        own = array[tuple(map(slice, self.own_shape(index, number, array.shape)))]
        for axis, parts in self.lengths.joined.get(index, ()):
            # What isn't filled up is whatever the others leave.
            rest = own.shape[axis] - sum(self.common[part] for part in parts if part is not None)
            kept, begin = list[Array](), 0
            for part in parts:
                size, whole = (rest, rest) if part is None else (self.sizes[number][part], self.common[part])
                kept.append(own[(*[slice(None)] * axis, slice(begin, begin + size))])
                begin += whole
            own = np.concatenate(kept, axis)
        return own


class Lengths:
    """The length axes of a `spec` all of whose tensors are stacked by rows. `inputs` and `outputs` have them by the
    index of the tensor, `joined` those that are joined of several."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.inputs = [_axes([one.inputs for one in spec.lengths], index) for index in range(len(spec.inputs))]
        self.outputs = [_axes([one.outputs for one in spec.lengths], index) for index in range(len(spec.outputs))]
        self.joined: dict[int, list[tuple[int, tuple[int | None, ...]]]] = {}
        for one in spec.joined:
            self.joined.setdefault(one.output, []).append((one.axis, one.parts))
        self.fills = [filling(tensor) for tensor in spec.inputs]

    def filling(self, requests: Sequence[Inputs]) -> Filling | None:
        """How `requests` get common sizes; None if they have them. Raises ExecutionError if axes of one length have
        different sizes in a request."""
        # hot path: 1 us a request
        sizes = [self.sizes_of(request) for request in requests]
        lengths = self.spec.lengths
        common = tuple([one.padded(max(column)) for one, column in zip(lengths, zip(*sizes, strict=True), strict=True)])
        return None if sizes.count(common) == len(sizes) else Filling(self, sizes, common)

    def sizes_of(self, request: Inputs) -> Shape:
        """The size of `request` in each length. Raises ExecutionError as `filling`."""
        if type(request) is Packed:
            shapes = [shape for _, shape, _ in request.layout.tensors]
        else:
            shapes = [one.shape for one in request]
        sizes = []
        for length in self.spec.lengths:
            found = [shapes[index][axis] for index, axis in length.inputs]
            if found.count(found[0]) < len(found):
                where = [f"{self.spec.inputs[index].name}[{axis}]" for index, axis in length.inputs]
                there = ", ".join(f"{one}: {size}" for one, size in zip(where, found, strict=True))
                raise ExecutionError(f"expected one size in the axes of length '{length.name}', got {there}")
            sizes.append(found[0])
        return tuple(sizes)


class LengthBatches:
    """`BatchRunner` for a `spec` with lengths; `spec` has the model's dims."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._lengths = Lengths(spec)

    def run(
        self, requests: Sequence[Tensors], run: Run, padded_rows: int = 0, allocate: Allocate | None = None
    ) -> Execution:
        """As `run_batch`."""
        spec = self._spec
        check_count(spec, requests)
        began_ns = monotonic_ns()
        filling = self._lengths.filling(requests)
        if filling is None:
            return run_batch(spec, requests, run, padded_rows, allocate)
        rows = rows_of(requests)
        padding = max(0, padded_rows - sum(rows), spec.fixed_rows - sum(rows))
        inputs = []
        for index, column in enumerate(zip(*requests, strict=True)):
            shape = (sum(rows) + padding, *filling.shape(index, column))
            target = allocate(index, shape) if allocate is not None else None
            if target is None:
                target = np.empty(shape, column[0].dtype)
            fill_up(target[: sum(rows)], column, self._lengths.fills[index])
            target[sum(rows) :] = target[sum(rows) - 1 : sum(rows)]
            inputs.append(target)
        filled_ns = monotonic_ns()
        outputs = run(inputs)
        ran_ns = monotonic_ns()
        results = split(outputs, [*rows, padding] if padding else rows, spec)[: len(rows)]
        filling.check([one.shape for one in outputs])
        results = filling.cut(results)
        return Execution(results, filled_ns - began_ns, ran_ns - filled_ns, monotonic_ns() - ran_ns)


def fill_up(target: Array, arrays: Sequence[Array], fill: Any) -> None:
    """Write `arrays` one after the other along axis 0 of `target`, each at the beginning of its other axes, and `fill`
    into what they leave free there.

    `target` is C-contiguous, with as many rows, and along its other axes at least their size. ExecutionError if not.
    """
    # hot path: 1 us an array
    row = 0
    if any(one.shape[1:] != target.shape[1:] for one in arrays):
        target[...] = fill
    for array in arrays:
        part = target[row : row + len(array)]
        row += len(array)
        if array.shape == part.shape and not array.dtype.hasobject:
            join_into(part, [array])
        elif not _write_holding_on(part, array):
            try:
                np.copyto(part[tuple(map(slice, array.shape))], array, casting="no")
            except (ValueError, TypeError, IndexError) as error:
                raise ExecutionError(f"requests of one batch don't fit together: {error}") from error


def _write_holding_on(target: Array, array: Array) -> bool:
    """Write without releasing the GIL, as `join_into` does. False where that isn't needed or possible."""
    if array.size < MIN_RELEASING_ELEMENTS or array.nbytes > MAX_HELD_BYTES or array.dtype != target.dtype:
        return False
    if array.dtype.hasobject or not array.flags.c_contiguous or array.ndim != target.ndim:
        return False
    buffer, data, item = target.data.cast("B"), array.data.cast("B"), array.itemsize
    size, starts = runs(array.shape, target.shape)
    for source, there in starts:
        buffer[there * item : (there + size) * item] = data[source * item : (source + size) * item]
    return True


def runs(shape: Shape, into: Shape) -> tuple[int, list[tuple[int, int]]]:
    """How a C-contiguous array of `shape` lies at the beginning of all axes of one of the shape `into`, in elements:
    the size of the parts that are contiguous in both, and where each of them begins in either."""
    axis = max((axis for axis, sizes in enumerate(zip(shape, into, strict=True)) if sizes[0] != sizes[1]), default=0)
    size = math.prod(shape[axis:])
    strides = [math.prod(into[place + 1 :]) for place in range(axis)]
    begins = (sum(map(mul, place, strides)) for place in product(*map(range, shape[:axis])))
    return size, [(number * size, begin) for number, begin in enumerate(begins)]


def _axes(lengths: Sequence[Axes], tensor: int) -> Axes:
    return tuple((axis, number) for number, places in enumerate(lengths) for index, axis in places if index == tensor)


def _resized(shape: Shape, axes: Axes, sizes: Shape) -> Shape:
    if not axes:
        return shape
    resized = list(shape)
    for axis, number in axes:
        resized[axis] = sizes[number]
    return tuple(resized)
