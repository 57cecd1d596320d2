"""Whether replays of CUDA graphs do what the model does.

Lives here: what to compare, and how. Must not: execute. A graph repeats what was captured: copies from host memory that
has meanwhile got other contents, and the seed of random numbers. ONNX Runtime captures such operators without an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

import numpy as np

from backends.base import Array, ModelSpec, Tensors
from backends.errors import ExecutionError
from backends.trial import alike

__all__ = ["GraphUse", "changed", "check_replayed"]


class GraphUse(Enum):
    """What an execution does with the graph of its shape: make it, use it if there is one, or neither."""

    CAPTURE = auto()
    REPLAY = auto()
    NONE = auto()


def changed(requests: Sequence[Tensors], rows: int, *, batched: bool) -> Tensors:
    """A request like the last of `requests`, but with other floats, and with `rows` rows if the model is batched.
    Integers stay: they may be indices."""
    random = np.random.default_rng(0)

    def change(array: Array) -> Array:
        if batched:
            array = np.repeat(array[-1:], rows, axis=0)
        return random.random(array.shape, np.float32).astype(array.dtype) if array.dtype.kind == "f" else array

    return [change(array) for array in requests[-1]]


def check_replayed(spec: ModelSpec, replayed: Tensors, computed: Tensors) -> None:
    """Raise ExecutionError unless the results are the same but for rounding."""
    for tensor, one, two in zip(spec.outputs, replayed, computed, strict=True):
        if not alike(tensor, np.atleast_1d(one), np.atleast_1d(two)):
            raise ExecutionError(f"output '{tensor.name}' of a replayed graph is not what the model computes")
