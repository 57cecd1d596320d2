"""How far results of the same rows are apart.

Lives here: distances between outputs, in pure numpy. Must not: what distance is too large (`length_trial`).
"""

from __future__ import annotations

import numpy as np

from paceline.backends.spec import Array, ModelSpec, Tensors, TensorSpec
from paceline.protos.datatypes import by_name


def is_exact(tensor: TensorSpec) -> bool:
    return tensor.datatype != "BF16" and by_name(tensor.datatype).dtype.kind != "f"


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
    if is_exact(tensor):
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


def _numbers(tensor: TensorSpec, array: Array) -> Array:
    if tensor.datatype == "BF16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)
