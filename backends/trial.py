"""Whether the rows of a model can be stacked, found out by trying.

Lives here: what is tried and what follows from it, in pure numpy. Must not: a runtime, a configuration, a log. A free
first dimension looks like a batch axis and needn't be one: it may be time, or be summed over, or come out as often as
something was found. A model that is batched all the same gives its callers each other's numbers. The rule: only what
was seen counts. A trial that fails, because the model doesn't take made-up inputs or draws lots, says nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import numpy as np

from backends.base import Array, ModelSpec, Tensors, TensorSpec, Trial
from backends.errors import ExecutionError, SessionError
from protos.datatypes import by_name

__all__ = ["try_rows"]

_MOST_ELEMENTS = 1 << 24
"""Of the inputs of a trial: it isn't to take more memory than the model's own requests may."""

_LIKENESS = 0.05
"""How much of the largest number results may differ by: kernels round otherwise for other sizes, and models that
quantize while they run by more than that of floats. What rows have to do with each other shows more than this."""

_NOISE = 1e-5
"""What may be left where results cancel out, of inputs up to 1: that differs by all of itself."""

Run = Callable[[Sequence[Array]], Tensors]


def try_rows(spec: ModelSpec, run: Run) -> Trial:
    """Run two rows of a model of `spec` (dims whole, no optional inputs), each alone and both together, in either
    order; one if its inputs don't all have a free first dimension. `run` gives the outputs for one array per input and
    raises ExecutionError.

    Blocks for four executions, five if they differ, and up to two more if it doesn't take the first rows.
    """
    if _elements(spec) > _MOST_ELEMENTS or any(tensor.any_rank for tensor in spec.inputs):
        return Trial(spec)
    # An index of 1 leads to a second row or word, which there may not be; 0 is the likeliest to be taken.
    for highest in (1, 0):
        with suppress(ExecutionError):
            return _try(spec, run, highest)
    return Trial(spec)


def _try(spec: ModelSpec, run: Run, highest: int) -> Trial:
    """With integers up to `highest`. Raises ExecutionError if a row alone does."""
    stackable = bool(spec.inputs) and all(tensor.dims[:1] == (-1,) for tensor in spec.inputs)
    random = np.random.default_rng(0)
    pairs = [_pair(tensor, highest, random) for tensor in spec.inputs]
    rows = [[pair[number] for pair in pairs] for number in range(1 + stackable)]
    alone = [run(row) for row in rows]
    if not stackable:
        return Trial(_as_seen(spec, alone))
    try:
        # In either order: what rows do to those before them is seen, and what to those behind.
        together = [run([np.concatenate(pair[::step]) for pair in pairs]) for step in (1, -1)]
    except SessionError:
        return Trial(spec)
    except ExecutionError as error:
        return Trial(_as_seen(spec, alone), f"it runs one row and fails for two: {error}")
    seen = _as_seen(spec, [*alone, *together])
    found = _difference(seen, alone, together[0]) or _difference(seen, alone[::-1], together[1])
    return Trial(seen, "" if found and _draws_lots(alone[0], lambda: run(rows[0])) else found)


def _difference(spec: ModelSpec, alone: Sequence[Tensors], both: Tensors) -> str:
    """How the first output that isn't in company what it is alone differs, "" if none does."""
    columns = zip(spec.outputs, zip(*alone, strict=True), both, strict=True)
    return next(filter(None, (_compare(*column) for column in columns)), "")


def _compare(tensor: TensorSpec, alone: Sequence[Array], both: Array) -> str:
    shapes = [one.shape for one in alone]
    if both.shape[:1] != (2,) or any(shape != (1, *both.shape[1:]) for shape in shapes):
        return f"output '{tensor.name}' has shape {list(shapes[0])} for one row and {list(both.shape)} for two"
    if not _alike(tensor, np.concatenate(alone), both):
        return f"output '{tensor.name}' of a row depends on the row beside it"
    return ""


def _alike(tensor: TensorSpec, alone: Array, both: Array) -> bool:
    alone, both = (_numbers(tensor, array) for array in (alone, both))
    if alone.dtype.kind != "f":
        return bool(np.array_equal(alone, both))
    finite = np.isfinite(alone)
    if not np.array_equal(finite, np.isfinite(both)):
        return False
    alone, both = alone[finite], both[finite]
    most = max(np.abs(alone).max(initial=0), np.abs(both).max(initial=0))
    return bool(np.abs(alone - both).max(initial=0) <= _LIKENESS * most + _NOISE)


def _numbers(tensor: TensorSpec, array: Array) -> Array:
    if tensor.datatype == "BF16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64) if array.dtype.kind == "f" else array


def _draws_lots(first: Tensors, again: Callable[[], Tensors]) -> bool:
    """Whether the same row gives something else the second time."""
    try:
        pairs = zip(first, again(), strict=True)
        return not all(np.array_equal(one, two, equal_nan=one.dtype.kind == "f") for one, two in pairs)
    except ExecutionError:
        return True


def _as_seen(spec: ModelSpec, results: Sequence[Tensors]) -> ModelSpec:
    outputs = (_seen(tensor, [result[i].shape for result in results]) for i, tensor in enumerate(spec.outputs))
    return replace(spec, outputs=tuple(outputs))


def _seen(tensor: TensorSpec, shapes: Sequence[tuple[int, ...]]) -> TensorSpec:
    """A model may say wrong sizes of its outputs, or not even their rank: where it did any size goes."""
    ranks = {len(shape) for shape in shapes}
    if len(ranks) != 1:
        return tensor
    said = tensor.dims if ranks == {len(tensor.dims)} else (-1,) * ranks.pop()
    dims = (dim if all(size == dim for size in sizes) else -1 for dim, *sizes in zip(said, *shapes, strict=True))
    return replace(tensor, dims=tuple(dims))


def _elements(spec: ModelSpec) -> int:
    return sum(2 * int(np.prod([abs(dim) for dim in tensor.dims], dtype=object)) for tensor in spec.inputs)


def _pair(tensor: TensorSpec, highest: int, random: np.random.Generator) -> tuple[Array, Array]:
    """Two rows that models are likely to take: free dimensions of 1, floats in [0, 1), integers and digits 0 and
    `highest`, 1 at most, which is in every vocabulary. Nothing is the same in both, on the average neither: of many
    numbers of one kind the mean is always the same, and a model that takes it of all rows would go unnoticed."""
    shape = tuple(1 if dim < 0 else dim for dim in tensor.dims)
    dtype = by_name(tensor.datatype).dtype
    floats = random.random((2, *shape), np.float32)
    floats[1] /= 4
    if tensor.datatype == "BF16":
        rows = (floats.view(np.uint32) >> 16).astype(dtype)
    elif dtype.kind == "f":
        rows = floats.astype(dtype)
    else:
        ones = np.array([floats[0] < 0.75, floats[0] >= 0.75]) & bool(highest)
        rows = np.where(ones, b"1", b"0").astype(dtype) if dtype.hasobject else ones.astype(dtype)
    return rows[0, ...], rows[1, ...]  # arrays even if there is but one element
