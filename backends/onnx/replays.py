"""Whether replays of CUDA graphs do what the model does.

Lives here: what to compare, and how. Must not: execute. A graph repeats what was captured: copies from host memory that
has meanwhile got other contents, and the seed of random numbers. ONNX Runtime captures such operators without an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

import numpy as np

from paceline.backends.errors import ExecutionError
from paceline.backends.likeness import alike
from paceline.backends.spec import Array, ModelSpec, Tensors, TensorSpec

__all__ = ["GraphUse", "changed", "check_replayed"]


class GraphUse(Enum):
    """What an execution does with the graph of its shape: make it, use it if there is one, or neither."""

    CAPTURE = auto()
    REPLAY = auto()
    NONE = auto()


def changed(spec: ModelSpec, requests: Sequence[Tensors], rows: int) -> Tensors:
    """A request like the last of `requests`, but with other floats, and with `rows` rows if the model is batched.
    Integers stay: they may be indices."""
    random = np.random.default_rng(0)
    repeated = [np.repeat(array[-1:], rows, axis=0) if spec.batched else array for array in requests[-1]]
    return [_changed(tensor, array, random) for tensor, array in zip(spec.inputs, repeated, strict=True)]


def _changed(tensor: TensorSpec, array: Array, random: np.random.Generator) -> Array:
    floats = random.random(array.shape, np.float32)
    if tensor.datatype == "BF16":
        return (floats.view(np.uint32) >> 16).astype(array.dtype)
    return floats.astype(array.dtype) if array.dtype.kind == "f" else array


def check_replayed(spec: ModelSpec, replayed: Tensors, computed: Tensors) -> None:
    """Raise ExecutionError unless the results are the same but for rounding."""
    for tensor, one, two in zip(spec.outputs, replayed, computed, strict=True):
        if not alike(tensor, np.atleast_1d(one), np.atleast_1d(two)):
            raise ExecutionError(f"output '{tensor.name}' of a replayed graph is not what the model computes")
