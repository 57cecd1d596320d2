"""Whether two results are the same but for what kernels and quantization round.

Lives here: what counts as rounding, in pure numpy. Must not: execute, or know why results are compared.
"""

from __future__ import annotations

import numpy as np

from backends.spec import Array, TensorSpec

__all__ = ["alike", "equal", "is_finite"]

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


def alike(tensor: TensorSpec, one: Array, two: Array) -> bool:
    """Whether two results of `tensor`, of one axis or more, are the same but for rounding."""
    one, two = (_numbers(tensor, array) for array in (one, two))
    if one.dtype.kind != "f":
        return bool(np.array_equal(one, two))
    finite = np.isfinite(one)
    if not np.array_equal(finite, np.isfinite(two)):
        return False
    if not one.size:
        return True
    one, two = (np.where(finite, array, 0).reshape(len(array), -1) for array in (one, two))
    # By columns, since a column of large numbers would hide what happens in others; the largest first.
    sizes = np.maximum(np.abs(one), np.abs(two)).max(axis=0, initial=0)
    order = np.argsort(-sizes, kind="stable")
    sizes, apart = sizes[order], np.abs(one - two).max(axis=0, initial=0)[order]
    likely = apart <= _LIKENESS * sizes + _NOISE
    excused = apart * np.where(apart <= _ROUNDED * sizes, _NOISIER, 1)
    return bool(np.all(likely | (apart <= np.maximum.accumulate(np.where(likely, excused, 0)))))


def equal(one: Array, two: Array) -> bool:
    return np.array_equal(one, two, equal_nan=one.dtype.kind == "f")


def is_finite(tensor: TensorSpec, array: Array) -> bool:
    array = _numbers(tensor, array)
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


def _numbers(tensor: TensorSpec, array: Array) -> Array:
    if tensor.datatype == "BF16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64) if array.dtype.kind == "f" else array
