"""Made-up rows of several sizes, for the trial of a model's lengths.

Lives here: which sizes, and what is in such rows. Must not: run a model, or judge its results (`length_trial`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from operator import mul
from typing import NamedTuple

import numpy as np

from paceline.backends.errors import InstanceError
from paceline.backends.length_axes import Sizes, is_of_integers
from paceline.backends.lengths import Lengths
from paceline.backends.made_up import MAX_BYTES, bytes_of
from paceline.backends.spec import Array, ModelSpec, TensorSpec
from paceline.protos.datatypes import by_name

_SIZES = ((5, 11, 24), (13, 6, 25), (8, 19, 10))
"""Of three rows, along one length after the other: no two of these, nor sums of several, grow in the same way, to see
which ones an output follows."""
_LONGER = 37
"""Added for models that accept nothing shorter."""
_WORDS = 63
"""The largest integer that is tried first, for the first input of integers: small vocabularies have fewer words."""
_FREE = 2
"""The size of free axes that aren't lengths."""


class GivenUp(InstanceError):
    """The trial would take too much time or memory."""


class Attempt(NamedTuple):
    """Rows with integers up to `highest`, or `words` in their first input of integers; sizes are `longer`."""

    words: int
    highest: int
    longer: int = 0


ATTEMPTS = (Attempt(_WORDS, 1), Attempt(1, 1), Attempt(0, 0), Attempt(_WORDS, 1, _LONGER), Attempt(1, 1, _LONGER))


class Row(NamedTuple):
    """A row (or several) as the model sees it, and its sizes, one for each length."""

    sizes: Sizes
    inputs: list[Array]


class Rows:
    """Made-up rows of `spec`; inputs in `fixed` have that value throughout, but for the last place along the last axis
    of those that are in `holed`, which is 0 in every other row."""

    def __init__(
        self, spec: ModelSpec, fixed: Mapping[int, object], attempt: Attempt, holed: frozenset[int] = frozenset()
    ) -> None:
        self._spec, self._fixed, self._attempt, self._holed = spec, fixed, attempt, holed
        words = (index for index, one in enumerate(spec.inputs) if is_of_integers(one) and index not in fixed)
        self._words = next(words, None)
        self._axes = Lengths(spec).inputs
        self.longer = attempt.longer

    def sizes(self, number: int) -> Sizes:
        """Those of the few rows that a trial begins with, `number` 0 to 2."""
        # Twice as large after each three: sums of those before grow in another way.
        return tuple((_SIZES[at % 3][number] << at // 3) + at + self.longer for at in range(len(self._spec.lengths)))

    def one(self, content: int, sizes: Sizes) -> Row:
        """A row. If `content` is even, no integer is what is filled up with: a maximum over all words would not show it
        otherwise. Raises GivenUp if it is too large."""
        random = np.random.default_rng((content, *sizes))
        shapes, made = [], list[Array]()
        for tensor, axes in zip(self._spec.inputs, self._axes, strict=True):
            own = dict(axes)
            dims = [sizes[own[axis]] if axis in own else dim for axis, dim in enumerate(tensor.dims, 1)]
            shapes.append((1, *(_FREE if dim < 0 else dim for dim in dims)))
        sizes_bytes = map(bytes_of, (one.datatype for one in self._spec.inputs))
        if 4 * sum(map(mul, map(math.prod, shapes), sizes_bytes)) > MAX_BYTES:
            raise GivenUp(f"four rows take more than {MAX_BYTES >> 20} MiB")
        for index, (tensor, shape) in enumerate(zip(self._spec.inputs, shapes, strict=True)):
            highest = self._attempt.words if index == self._words else self._attempt.highest
            if index in self._fixed:
                made.append(np.full(shape, self._fixed[index], by_name(tensor.datatype).dtype))
                if index in self._holed and content % 2 and shape[-1] > 1:
                    made[-1][..., -1] = 0
            else:
                made.append(_elements(tensor, random, shape, highest, content % 2 == 0))
        return Row(sizes, made)


def _elements(
    tensor: TensorSpec, random: np.random.Generator, shape: tuple[int, ...], highest: int, other_than_fill: bool
) -> Array:
    dtype = by_name(tensor.datatype).dtype
    if not is_of_integers(tensor) and not dtype.hasobject:
        floats = random.standard_normal(shape, np.float32)
        return (floats.view(np.uint32) >> 16).astype(dtype) if tensor.datatype == "BF16" else floats.astype(dtype)
    if dtype.hasobject:
        return np.array([b"%d" % one for one in random.integers(0, 10, shape).ravel()], object).reshape(shape)
    words = [one for one in range(highest + 1) if one != tensor.fill or not other_than_fill] or [0]
    return random.choice(np.array(words), shape).astype(dtype)
