"""How far results of a model are apart, and whether they are the same but for what kernels and quantization round.

Lives here: comparisons of outputs, in pure numpy. Must not: execute, or know why results are compared.
"""

from __future__ import annotations

import numpy as np

from paceline.backends.spec import Array, ModelSpec, Tensors, TensorSpec
from paceline.protos.datatypes import by_name

_LIKENESS = 0.05
"""The fraction of the largest number by which results may differ: kernels round differently for other sizes, and models
that quantize at run time differ by more than floats round. Real dependencies between rows exceed this."""

_NOISE = 4e-5
"""The absolute difference allowed where results cancel out, for inputs up to 4: all of such a remainder may differ."""

_ROUNDED = 0.005
"""The largest fraction of a number that only rounding changes, unless a model quantizes at run time."""

_NOISIER = 10
"""How many times as much as larger numbers of the same output, if these are only rounded, smaller ones may differ:
errors are proportional to the largest. Larger ones that differ by more excuse only as much as that."""


_EXPONENT = 0x7F80
"""Of BF16: all of its bits are set in infinities and NaN."""

_NONE: tuple[Array, Array] = (np.empty(0), np.empty(0))

_AT_ONCE = 1 << 20
"""How many numbers are compared at a time: that takes several times their memory, as they are converted."""


def is_of_floats(tensor: TensorSpec) -> bool:
    """Also if they are BF16, whose arrays are of integers."""
    return tensor.datatype == "BF16" or by_name(tensor.datatype).dtype.kind == "f"


def alike(tensor: TensorSpec, one: Array, two: Array) -> bool:
    """Whether two results of `tensor`, of the same shape and one axis or more, are the same but for rounding. Takes a
    fixed amount of memory, however large they are."""
    if not one.size:
        return True
    one, two = (array.reshape(len(array), -1) for array in (one, two))
    step = max(1, _AT_ONCE // len(one))
    parts = [(one[:, at : at + step], two[:, at : at + step]) for at in range(0, one.shape[1], step)]
    if one.dtype.kind != "f" and tensor.datatype != "BF16":
        return all(np.array_equal(mine, other) for mine, other in parts)
    # By columns, since a column of large numbers would hide what happens in others.
    unlikely = _NONE
    for part in parts:
        sizes, apart = _differences(tensor, *part)
        if np.isnan(apart).any():
            return False
        unlikely = _foremost(unlikely, sizes, np.where(_are_likely(sizes, apart), 0, apart))
    if not unlikely[0].size:
        return True
    # What differs more than is likely may still be rounding, if larger numbers are rounded as much.
    excuses = _NONE
    for part in parts:
        sizes, apart = _differences(tensor, *part)
        excused = apart * np.where(apart <= _ROUNDED * sizes, _NOISIER, 1)
        excuses = _foremost(excuses, sizes, np.where(_are_likely(sizes, apart), excused, 0))
    larger = np.searchsorted(-excuses[0], -unlikely[0], side="right")
    return bool(np.all(unlikely[1] <= np.append(0, excuses[1])[larger]))


def equal(one: Array, two: Array) -> bool:
    return np.array_equal(one, two, equal_nan=one.dtype.kind == "f")


def is_finite(tensor: TensorSpec, array: Array) -> bool:
    if tensor.datatype == "BF16":
        return bool(((array & _EXPONENT) != _EXPONENT).all())
    return array.dtype.kind != "f" or bool(np.isfinite(array).all())


def _differences(tensor: TensorSpec, one: Array, two: Array) -> tuple[Array, Array]:
    """The largest number of each column, and by how much its numbers differ; NaN if not the same ones are finite."""
    one, two = (_numbers(tensor, array) for array in (one, two))
    finite = np.isfinite(one)
    is_same = (finite == np.isfinite(two)).all(axis=0)
    one, two = (np.where(finite, array, 0) for array in (one, two))
    sizes = np.maximum(np.abs(one), np.abs(two)).max(axis=0)
    return sizes, np.where(is_same, np.abs(one - two).max(axis=0), np.nan)


def _numbers(tensor: TensorSpec, array: Array) -> Array:
    if tensor.datatype == "BF16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)


def _are_likely(sizes: Array, apart: Array) -> Array:
    return apart <= _LIKENESS * sizes + _NOISE


def _foremost(known: tuple[Array, Array], sizes: Array, values: Array) -> tuple[Array, Array]:
    """Those of `known` and the columns given that exceed the values of all larger ones: the largest columns first."""
    sizes, values = np.append(known[0], sizes[values > 0]), np.append(known[1], values[values > 0])
    order = np.argsort(-sizes, kind="stable")
    sizes, values = sizes[order], values[order]
    before = np.append(0, np.maximum.accumulate(values))[:-1]
    return sizes[values > before], values[values > before]


def distances(spec: ModelSpec, one: Tensors, two: Tensors) -> list[float]:
    """How far two results of `spec` are apart, for each output."""
    return list(map(_distance, spec.outputs, one, two))


def _distance(tensor: TensorSpec, one: Array, two: Array) -> float:
    """How far two results are apart at most: of numbers, relative to their usual size, in each vector along the last
    axis; of others, the fraction that differs."""
    if one.shape != two.shape:
        return np.inf
    if not one.size:
        return 0.0
    if not is_of_floats(tensor):
        return float(np.mean(one != two))
    one, two = (_numbers(tensor, array) for array in (one, two))
    finite = np.isfinite(one)
    if not np.array_equal(finite, np.isfinite(two)):
        return np.inf
    one, two = (
        np.where(finite, array, 0).reshape(-1, array.shape[-1] if array.ndim > 2 else 1) for array in (one, two)
    )
    usual = float(np.sqrt(np.mean(one**2)))
    distance = float(np.sqrt(np.mean((one - two) ** 2, axis=1)).max())
    return distance / usual if usual else float(distance > 0)
