"""Model inputs that are made per batch, from the shapes of the requests in it.

Lives here: the value of each kind of `batch_input`, pure numpy. Must not: requests, specs. Source of the values:
`BatchInput.Kind` of Triton's model configuration.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

import numpy as np

from paceline.backends.spec import Array, BatchInputKind

__all__ = ["batch_input"]

DType = np.dtype[Any]


def batch_input(kind: BatchInputKind, sources: Sequence[Array], dtype: DType) -> Array:
    """A new array for a batch whose requests, in order, bring `sources`, batch axis first.

    Counts are of all elements of a request, over all its rows. Shapes, for n requests: [n] for element counts and
    running sums, [n + 1] for sums that begin with 0, [largest count] for the maximum (all zeros: its size is the
    value), [rows, dims] or [rows * dims] for item shapes, which leave out the batch axis.
    """
    return _KINDS[kind](sources, dtype)


def _element_count(sources: Sequence[Array], dtype: DType) -> Array:
    return np.array([source.size for source in sources], dtype)


def _accumulated(sources: Sequence[Array], dtype: DType) -> Array:
    return np.array(list(accumulate(source.size for source in sources)), dtype)


def _accumulated_with_zero(sources: Sequence[Array], dtype: DType) -> Array:
    return np.array(list(accumulate((source.size for source in sources), initial=0)), dtype)


def _max_as_shape(sources: Sequence[Array], dtype: DType) -> Array:
    return np.zeros(max(source.size for source in sources), dtype)


def _item_shape(sources: Sequence[Array], dtype: DType) -> Array:
    items = [source.shape[1:] for source in sources for _ in range(source.shape[0])]
    return np.array(items, dtype).reshape(len(items), sources[0].ndim - 1)


def _item_shape_flatten(sources: Sequence[Array], dtype: DType) -> Array:
    return _item_shape(sources, dtype).reshape(-1)


_KINDS: Final[Mapping[BatchInputKind, Callable[[Sequence[Array], DType], Array]]] = {
    BatchInputKind.ELEMENT_COUNT: _element_count,
    BatchInputKind.ACCUMULATED_ELEMENT_COUNT: _accumulated,
    BatchInputKind.ACCUMULATED_ELEMENT_COUNT_WITH_ZERO: _accumulated_with_zero,
    BatchInputKind.MAX_ELEMENT_COUNT_AS_SHAPE: _max_as_shape,
    BatchInputKind.ITEM_SHAPE: _item_shape,
    BatchInputKind.ITEM_SHAPE_FLATTEN: _item_shape_flatten,
}
