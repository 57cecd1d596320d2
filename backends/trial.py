"""Whether the rows of a model can be stacked, found out by trying.

Lives here: what is tried and what follows from it, in pure numpy. Must not: a runtime, a configuration, a log. A free
first dimension looks like a batch axis but needn't be one: it may be time, be summed over, or depend in size on how
many things were found. Batching such a model would give callers each other's numbers. The rule: only observations
count. A model that accepts no made-up inputs isn't batched; for one with random outputs, its declaration is believed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import NamedTuple

import numpy as np

from backends.base import Array, ModelSpec, Tensors, TensorSpec, Trial
from backends.errors import ExecutionError, InstanceError, ProcessError
from protos.datatypes import by_name

__all__ = ["alike", "try_rows"]

_MAX_ELEMENTS = 1 << 24
"""Limit for the inputs of a trial, and for the results of eight rows: it must not take more memory than the model's own
requests may."""

_LIKENESS = 0.05
"""The fraction of the largest number by which results may differ: kernels round differently for other sizes, and models
that quantize at run time differ by more than floats round. Real dependencies between rows exceed this."""

_NOISE = 4e-5
"""The absolute difference allowed where results cancel out, for inputs up to 4: such a remainder may differ by all of
itself."""

_ROUNDED = 0.005
"""The largest fraction of a number that only rounding changes, unless a model quantizes at run time."""

_NOISIER = 10
"""How many times as much as larger numbers of the same output, if these are only rounded, smaller ones may differ:
errors are proportional to the largest. Larger ones that differ by more excuse only as much as that."""

_MANY = 8
"""How many rows are in a longer stack. It shows what rows do to others that aren't next to them, or that are like them
in one input and not in another."""

_OF_TWO = (0, 0, 1, 0, 1, 1, 0, 1)
"""Which of two rows is at each place of a longer stack, if a model accepts no more of them: for each distance from one
to seven, in either direction, there are two different rows that far apart."""

_WORDS = 63
"""The largest integer for a model with one input, of integers: they may be words, of which 0 and 1 are often none."""

_FAINT, _LOUD = 1e-3, 1e4
"""Factors for the floats of two rows that are to be extremely different."""

Run = Callable[[Sequence[Array]], Tensors]


class _MadeUp(NamedTuple):
    """Inputs to try: integers up to `highest`, floats of both signs (`signed`) or in [0, 1), with `contrast` of
    extremely different size, `rows` at a time, free dimensions of size `free`."""

    highest: int = 1
    signed: bool = False
    rows: int = 1
    free: int = 1
    contrast: bool = False


# First those that are likeliest to show something, then those that are likelier to be accepted. Roots and logarithms
# accept no negative numbers. An index of 1 refers to a second row or word, which may not exist. Windows need several
# steps, and those of audio so many that other models would take long: these are only for models that accept nothing
# shorter.
_LONG, _LONGEST = 32, 4096
_ATTEMPTS = (
    _MadeUp(signed=True),
    _MadeUp(highest=_WORDS),
    _MadeUp(),
    _MadeUp(highest=0),
    _MadeUp(highest=_WORDS, free=_LONG),
    _MadeUp(free=_LONG),
    _MadeUp(highest=0, free=_LONG),
    _MadeUp(highest=0, free=_LONG, rows=8),
    _MadeUp(free=_LONGEST),
    _MadeUp(highest=0, free=_LONGEST),
)


def try_rows(spec: ModelSpec, run: Run) -> Trial:
    """Run rows of a model of `spec` (complete dims, no optional inputs), each alone and several together, in either
    order; one row if its inputs don't all have a free first dimension. `run` returns the outputs for one array per
    input and raises ExecutionError.

    Blocks for twenty-one executions, three of them of eight rows; for about as many again if the only input is of
    integers; for four more if other dimensions are free, too, and for some more if results differ or the model doesn't
    accept the first rows.
    """
    if any(tensor.any_rank for tensor in spec.inputs):
        return Trial(spec)
    try:
        tried = _try_all(spec, run)
        outputs = tuple(map(_doubted, spec.outputs, tried.spec.outputs))
        return replace(tried, spec=replace(tried.spec, outputs=outputs))
    except ProcessError as error:
        return Trial(spec, str(error), deadly=True)


def _try_all(spec: ModelSpec, run: Run) -> Trial:
    """Raises ProcessError."""
    stackable = _can_be_stacked(spec)
    is_free = any(-1 in tensor.dims[stackable:] for tensor in spec.inputs)
    found, failed, longest, varied = None, "they would be too large", 0, False
    taken = _ATTEMPTS[0]
    for made_up in _ATTEMPTS:
        is_last_resort = made_up.free > _LONG
        if made_up.free <= longest or not _fits(spec, made_up):
            continue
        if is_last_resort and (found or not is_free):
            break
        try:
            many = found is None or (made_up.highest == _WORDS and made_up.free == 1)
            found, differ = _try(found.spec if found else spec, run, made_up, many=many)
        except ProcessError:
            raise
        except (InstanceError, MemoryError) as error:
            failed = str(error) or type(error).__name__
            break
        except ExecutionError as error:
            failed = str(error)
            continue
        taken, varied = made_up, varied or differ
        # Other rows may show what rows of both signs don't: in attention, a row attends to itself alone if the one
        # beside it is nearly its opposite. And what short rows do to each other may be too little to see.
        if found.why_not or not stackable or not (made_up.signed or is_free):
            break
        longest = 0 if made_up.signed else made_up.free
    if found is None:
        return _unknown(spec, f"it accepts no made-up inputs ({failed})")
    if not stackable or found.why_not:
        return found
    if any(map(_is_of_floats, spec.inputs)):
        found, differ = _contrasted(found, run, taken)
        varied = varied or differ
    # Text that no vocabulary has gives the same results in most models, which says nothing against them.
    has_shown = varied or found.why_not or any(tensor.datatype == "BYTES" for tensor in spec.inputs)
    return found if has_shown else _unknown(found.spec, "all made-up rows give the same results")


def _fits(spec: ModelSpec, made_up: _MadeUp) -> bool:
    """Whether `made_up` is for models of `spec`, and small enough."""
    if made_up.highest > 1 and not (len(spec.inputs) == 1 and _is_of_integers(spec.inputs[0])):
        return False
    return _elements(spec, made_up) <= _MAX_ELEMENTS


def _contrasted(found: Trial, run: Run, taken: _MadeUp) -> tuple[Trial, bool]:
    """`found`, checked once more with inputs like those `taken` but with extremely different rows; and whether they
    gave different results. Raises ProcessError."""
    try:
        return _try(found.spec, run, taken._replace(signed=False, contrast=True), many=False)
    except ProcessError:
        raise
    except (ExecutionError, MemoryError):  # such large numbers aren't accepted, or memory is too small
        return found, False


def _unknown(spec: ModelSpec, why: str) -> Trial:
    return Trial(spec, f"it isn't known whether its rows depend on each other, as {why}")


def _try(spec: ModelSpec, run: Run, made_up: _MadeUp, *, many: bool) -> tuple[Trial, bool]:
    """What it shows, and whether any rows give different results. `many`: also try more than two rows at a time. Raises
    ExecutionError if the model doesn't accept single rows, and InstanceError."""
    stackable = _can_be_stacked(spec)
    many = many and stackable and made_up.rows == 1 and _MANY // 2 * _elements(spec, made_up) <= _MAX_ELEMENTS
    random = np.random.default_rng(0)
    columns = [_rows(tensor, made_up, stackable, _MANY if many else 2, random) for tensor in spec.inputs]
    rows = list(zip(*columns, strict=True))
    alone = [run(row) for row in rows[: 1 + stackable]]
    if made_up.signed and not all(map(_is_finite, spec.outputs * len(alone), chain(*alone))):
        raise ExecutionError("it computes infinities from negative numbers")
    if not stackable:
        return Trial(_as_seen(spec, alone)), True
    many = many and _MANY * sum(array.size for array in alone[0]) <= _MAX_ELEMENTS
    alone += _more_alone(rows[2:], run) if many else []
    seen, found, results = _as_seen(spec, alone), dict[int, str](), list(alone)
    for order in _orders(len(alone), many):
        try:
            together = run([np.concatenate([rows[number][index] for number in order]) for index in range(len(columns))])
        except InstanceError:
            raise
        except ExecutionError as error:
            few, more = _count(made_up.rows), _count(len(order) * made_up.rows)
            return Trial(seen, f"it runs with {few} and fails with {more}: {error}"), True
        results.append(together)
        seen = _as_seen(spec, results)
        found = _differences(seen, alone, together, order, made_up) | found  # the first of each output
    steady = _steady(alone[0], lambda: run(rows[0])) if found else ()
    return Trial(seen, next((why for index, why in found.items() if index in steady), "")), _vary(spec, alone)


def _more_alone(rows: Sequence[Sequence[Array]], run: Run) -> list[Tensors]:
    """The results of `rows`, or none if the model doesn't accept one of them. Raises InstanceError."""
    try:
        return [run(row) for row in rows]
    except InstanceError:
        raise
    except ExecutionError:
        return []


def _orders(count: int, many: bool) -> Iterator[Sequence[int]]:
    """Which of `count` rows to stack. In either order, to see what rows do to those before them and to those after
    them; and many that are the same, as there may be room for only a few of one kind."""
    yield from ((0, 1), (1, 0))
    if many:
        stack = range(_MANY) if count == _MANY else _OF_TWO
        yield from (stack, stack[::-1], (0,) * _MANY)


def _vary(spec: ModelSpec, alone: Sequence[Tensors]) -> bool:
    """Whether rows gave different results. If not, nothing has been shown, as those of a stack would be the same, too;
    unless there is nothing that could differ."""
    return all(0 in tensor.dims for tensor in spec.outputs) or any(
        not _equal(one, two) for other in alone[1:] for one, two in zip(alone[0], other, strict=True)
    )


def _equal(one: Array, two: Array) -> bool:
    return np.array_equal(one, two, equal_nan=one.dtype.kind == "f")


def _can_be_stacked(spec: ModelSpec) -> bool:
    return bool(spec.inputs) and all(tensor.dims[:1] == (-1,) for tensor in spec.inputs)


def _differences(
    spec: ModelSpec, alone: Sequence[Tensors], both: Tensors, order: Sequence[int], made_up: _MadeUp
) -> dict[int, str]:
    """How outputs of `both` (or more) rows together differ from those `alone`, for the outputs that do, by index."""
    columns = enumerate(zip(spec.outputs, zip(*(alone[number] for number in order), strict=True), both, strict=True))
    # With contrast only small rows are judged: they may vanish beside large ones, but their effect on large ones is too
    # small to tell.
    judged = np.repeat([number == 0 or not made_up.contrast for number in order], made_up.rows)
    found = {index: _compare(*column, judged) for index, column in columns}
    return {index: why for index, why in found.items() if why}


def _compare(tensor: TensorSpec, alone: Sequence[Array], both: Array, judged: Array) -> str:
    shapes, rows = [one.shape for one in alone], len(judged) // len(alone)
    if both.shape[:1] != judged.shape or any(shape != (rows, *both.shape[1:]) for shape in shapes):
        few, many = _count(rows), _count(len(judged))
        return f"output '{tensor.name}' has shape {list(shapes[0])} for {few} and {list(both.shape)} for {many}"
    if not alike(tensor, np.concatenate(alone)[judged], both[judged]):
        return f"output '{tensor.name}' of a row depends on {'the row' if len(alone) == 2 else 'rows'} beside it"
    return ""


def _count(rows: int) -> str:
    return {1: "one row", 2: "two"}.get(rows, f"{rows} rows")


def alike(tensor: TensorSpec, alone: Array, both: Array) -> bool:
    """Whether two results of `tensor`, of one axis or more, are the same but for rounding."""
    alone, both = (_numbers(tensor, array) for array in (alone, both))
    if alone.dtype.kind != "f":
        return bool(np.array_equal(alone, both))
    finite = np.isfinite(alone)
    if not np.array_equal(finite, np.isfinite(both)):
        return False
    if not alone.size:
        return True
    alone, both = (np.where(finite, array, 0).reshape(len(array), -1) for array in (alone, both))
    # By columns, since a column of large numbers would hide what happens in others; the largest first.
    sizes = np.maximum(np.abs(alone), np.abs(both)).max(axis=0, initial=0)
    order = np.argsort(-sizes, kind="stable")
    sizes, apart = sizes[order], np.abs(alone - both).max(axis=0, initial=0)[order]
    likely = apart <= _LIKENESS * sizes + _NOISE
    excused = apart * np.where(apart <= _ROUNDED * sizes, _NOISIER, 1)
    return bool(np.all(likely | (apart <= np.maximum.accumulate(np.where(likely, excused, 0)))))


def _is_finite(tensor: TensorSpec, array: Array) -> bool:
    array = _numbers(tensor, array)
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


def _is_of_floats(tensor: TensorSpec) -> bool:
    return tensor.datatype == "BF16" or by_name(tensor.datatype).dtype.kind == "f"


def _is_of_integers(tensor: TensorSpec) -> bool:
    return tensor.datatype != "BF16" and by_name(tensor.datatype).dtype.kind in "iu"


def _numbers(tensor: TensorSpec, array: Array) -> Array:
    if tensor.datatype == "BF16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64) if array.dtype.kind == "f" else array


def _steady(first: Tensors, again: Callable[[], Tensors]) -> frozenset[int]:
    """The outputs that are equal when the same row is run again; others are random, or count executions. If the second
    run fails, nothing suggests that, and all are returned. Raises ProcessError."""
    try:
        pairs = enumerate(zip(first, again(), strict=True))
    except ProcessError:
        raise
    except ExecutionError:
        return frozenset(range(len(first)))
    return frozenset(index for index, (one, two) in pairs if _equal(one, two))


def _as_seen(spec: ModelSpec, results: Sequence[Tensors]) -> ModelSpec:
    outputs = (_seen(tensor, [result[i].shape for result in results]) for i, tensor in enumerate(spec.outputs))
    return replace(spec, outputs=tuple(outputs))


def _seen(tensor: TensorSpec, shapes: Sequence[tuple[int, ...]]) -> TensorSpec:
    """`tensor` with its dims as seen: a model may declare wrong sizes of its outputs, or not even their rank. Those
    become free."""
    tensor = replace(tensor, assumed=False)
    ranks = {len(shape) for shape in shapes}
    if len(ranks) != 1:
        return replace(tensor, dims=(), any_rank=True)
    declared = tensor.dims if ranks == {len(tensor.dims)} else (-1,) * ranks.pop()
    dims = (dim if all(size == dim for size in sizes) else -1 for dim, *sizes in zip(declared, *shapes, strict=True))
    return replace(tensor, dims=tuple(dims))


def _doubted(declared: TensorSpec, seen: TensorSpec) -> TensorSpec:
    """Where a model declares a wrong rank, the one that was seen needn't be the only one."""
    return replace(seen, assumed=True) if len(seen.dims) != len(declared.dims) and not seen.any_rank else seen


def _elements(spec: ModelSpec, made_up: _MadeUp) -> int:
    dims = (tensor.dims[_can_be_stacked(spec) :] for tensor in spec.inputs)
    sizes = (math.prod(dim if dim >= 0 else made_up.free for dim in one) for one in dims)
    return 2 * made_up.rows * sum(sizes)


def _rows(
    tensor: TensorSpec, made_up: _MadeUp, stackable: bool, count: int, random: np.random.Generator
) -> list[Array]:
    """`count` sets of rows. In the first two, every element differs, unless it is an integer and `highest` is 0. So
    does the average, with `signed` even in sign: the mean of many numbers of one kind is always the same, and a model
    that takes it over all rows would go unnoticed. Further sets are like these two in turn. Integers in text are
    digits, which are in every vocabulary."""
    shape = tuple(made_up.free if dim < 0 else dim for dim in tensor.dims)
    if stackable:
        shape = (made_up.rows, *shape[1:])
    dtype = by_name(tensor.datatype).dtype
    # Flat: arrays that have the maximum number of axes can't be stacked.
    random_floats = random.random((count, math.prod(shape)), np.float32)
    if tensor.datatype == "BF16":
        rows = (_floats(random_floats, made_up).view(np.uint32) >> 16).astype(dtype)
    elif dtype.kind == "f":
        rows = _floats(random_floats, made_up).astype(dtype)
    else:
        integers = _integers(random_floats, made_up.highest)
        rows = np.where(integers, b"1", b"0").astype(dtype) if dtype.hasobject else integers.astype(dtype)
    return [row.reshape(shape) for row in rows]


def _floats(floats: Array, made_up: _MadeUp) -> Array:
    floats[1::2] = 6 * floats[1::2] - 4 if made_up.signed else floats[1::2] / 4
    if made_up.contrast:
        floats *= np.array([[_FAINT], [_LOUD]], np.float32)
    return floats


def _integers(floats: Array, highest: int) -> Array:
    """Integers up to `highest`, which is even or one less than a power of two; more of the lower ones."""
    floats[1] = floats[0]
    integers = np.floor(floats**2 * (highest + 1)) if highest > 1 else (floats < 0.75) * highest
    integers[1::2] = highest - integers[1::2]
    return integers
