"""Made-up inputs for a model of which only the types and shapes of its inputs are known: for the trial of its rows, and
rows of several sizes for the trial of its lengths.

Lives here: which inputs are tried, in which order, and their numbers, in pure numpy. Must not: execute.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from operator import mul
from typing import NamedTuple

import numpy as np

from paceline.backends.errors import InstanceError
from paceline.backends.length_axes import Sizes, is_of_integers
from paceline.backends.lengths import Lengths
from paceline.backends.spec import Array, ModelSpec, TensorSpec
from paceline.protos.datatypes import by_name

MAX_BYTES = 1 << 26
"""Limit for the rows of a trial that are executed together, with their results: a trial must not take more memory than
the model's own requests may."""

_FLOAT_BYTES, _TEXT_BYTES = 4, 128
"""What an element of a made-up row takes at least, being made from a float; and one of text, being an object."""

_WORDS = 63
"""The largest integer for a model with one input, of integers: they may be words, of which 0 and 1 are often none.
Small vocabularies have fewer."""

_FAINT, _LOUD = 1e-3, 1e4
"""Factors for the floats of two rows that are to be extremely different."""


class MadeUp(NamedTuple):
    """Inputs to try: integers up to `highest`, floats of both signs (`signed`) or in [0, 1), with `contrast` of
    extremely different size, `rows` at a time, free dimensions of size `free`."""

    highest: int = 1
    signed: bool = False
    rows: int = 1
    free: int = 1
    contrast: bool = False

    @property
    def short_words(self) -> bool:
        return self.highest == _WORDS and self.free == 1

    def adds_to(self, other: MadeUp) -> bool:
        """Whether these may show what `other`, which were accepted, don't."""
        return (0 if other.signed else other.free) < self.free <= _LONG

    def row_bytes(self, spec: ModelSpec) -> int:
        """What one set of rows takes, over all inputs."""
        return self.rows * sum(
            max(_FLOAT_BYTES, bytes_of(tensor.datatype))
            * math.prod(dim if dim >= 0 else self.free for dim in tensor.dims[can_be_stacked(spec) :])
            for tensor in spec.inputs
        )


# First those that are likeliest to show something, then those that are likelier to be accepted. Roots and logarithms
# accept no negative numbers. An index of 1 refers to a second row or word, which may not exist. Windows need several
# steps, and those of audio so many that other models would take long: these are only for models that accept nothing
# shorter.
_LONG, _LONGEST = 32, 4096
_ATTEMPTS = (
    MadeUp(signed=True),
    MadeUp(highest=_WORDS),
    MadeUp(),
    MadeUp(highest=0),
    MadeUp(highest=_WORDS, free=_LONG),
    MadeUp(free=_LONG),
    MadeUp(highest=0, free=_LONG),
    MadeUp(highest=0, free=_LONG, rows=8),
    MadeUp(free=_LONGEST),
    MadeUp(highest=0, free=_LONGEST),
)


def attempts(spec: ModelSpec, fixed_rows: int = 0) -> Iterator[MadeUp]:
    """What to try with a model of `spec`, in this order, of at most MAX_BYTES for what is executed together: two rows
    where they can be stacked, or `fixed_rows`, if that is how many the model always takes."""
    together = fixed_rows or 1 + can_be_stacked(spec)
    datatypes = [tensor.datatype for tensor in spec.inputs]
    takes_words = len(datatypes) == 1 and datatypes[0] != "BF16" and by_name(datatypes[0]).dtype.kind in "iu"
    for made_up in _ATTEMPTS:
        are_words = made_up.highest == _WORDS
        is_for_it = (takes_words or not are_words) and (has_free_dims(spec) or made_up.free <= _LONG)
        is_for_it = is_for_it and not (fixed_rows and made_up.rows > 1)
        if is_for_it and together * made_up.row_bytes(spec) <= MAX_BYTES:
            yield made_up


def bytes_of(datatype: str) -> int:
    """What an element takes in memory."""
    dtype = by_name(datatype).dtype
    return _TEXT_BYTES if dtype.hasobject else dtype.itemsize


def can_be_stacked(spec: ModelSpec) -> bool:
    """Whether all inputs have a free first dimension."""
    return bool(spec.inputs) and all(tensor.dims[:1] == (-1,) for tensor in spec.inputs)


def has_free_dims(spec: ModelSpec) -> bool:
    """Whether dims other than those to stack along are free."""
    return any(-1 in tensor.dims[can_be_stacked(spec) :] for tensor in spec.inputs)


def make_rows(spec: ModelSpec, made_up: MadeUp, count: int) -> list[tuple[Array, ...]]:
    """`count` sets of rows, each with one array per input of `spec`. In the first two, every element differs, unless it
    is an integer and `highest` is 0. So does the average, with `signed` even in sign: the mean of many numbers of one
    kind is always the same, and a model that takes it over all rows would go unnoticed. Further sets are like these two
    in turn. Integers in text are digits, which are in every vocabulary."""
    random = np.random.default_rng(0)
    columns = [_column(tensor, made_up, can_be_stacked(spec), count, random) for tensor in spec.inputs]
    # Also without any inputs, where zip() gives no sets at all.
    return [tuple(column[number] for column in columns) for number in range(count)]


def _column(
    tensor: TensorSpec, made_up: MadeUp, stackable: bool, count: int, random: np.random.Generator
) -> list[Array]:
    shape = tuple(made_up.free if dim < 0 else dim for dim in tensor.dims)
    if stackable:
        shape = (made_up.rows, *shape[1:])
    dtype = by_name(tensor.datatype).dtype
    # Flat: arrays that have the maximum number of axes can't be stacked.
    random_floats = random.random((count, math.prod(shape)), np.float32)
    if tensor.datatype == "BF16":
        rows = (_floats(random_floats, made_up).view(np.uint32) >> 16).astype(dtype)
    elif dtype.kind == "f":
        rows = _floats(random_floats, made_up).astype(dtype, copy=False)
    else:
        integers = _integers(random_floats, made_up.highest)
        rows = np.where(integers, b"1", b"0").astype(dtype) if dtype.hasobject else integers.astype(dtype)
    return [row.reshape(shape) for row in rows]


def _floats(floats: Array, made_up: MadeUp) -> Array:
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


# ---- of several sizes ------------------------------------------------------------------------------------------------

_SIZES = ((5, 11, 24), (13, 6, 25), (8, 19, 10))
"""Of three rows, along each length: no two, nor sums of several, grow alike, to see which ones an output follows."""
_LONGER = 37
"""Added for models that accept nothing shorter."""
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
