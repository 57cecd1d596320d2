"""Which rows share a call, and what that costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.backends.lengths import Lengths
from paceline.backends.spec import Length, ModelSpec, TensorSpec
from paceline.server.bulk.batches import batches
from paceline.server.bulk.rows import Rows, Tensor
from paceline.server.bulk.values import Fixed

_AXES = ((0, 1),)
_SPEC = ModelSpec(
    (TensorSpec("x", "INT64", (-1,)),), (), batched=True, lengths=(Length("words", _AXES, sizes=(4, 8, 16)),)
)
_EXACT = ModelSpec(_SPEC.inputs, (), batched=True, lengths=(Length("words", _AXES),))


def _rows(sizes: Sequence[int], spec: ModelSpec | None) -> Rows:
    """Of a model whose only input has rows of these sizes."""
    own = np.array(sizes, np.int64)
    begins = np.cumsum(own) - own
    tensor = Tensor(np.zeros(sum(sizes), np.int64), begins, own[:, None], ((0, 0),) if spec else ())
    lengths = Lengths(spec) if spec else None
    return Rows({"x": tensor}, np.arange(len(own)), (), True, lengths, own[:, None] if spec else own[:, None][:, :0])


def _fixed(batch_rows: int) -> Fixed:
    return Fixed(unit_rows=1000, chunk_rows=1000, chunk_bytes=1 << 30, batch_rows=batch_rows, intra_op_threads=1)


@pytest.mark.parametrize(
    ("sizes", "spec", "by_length", "max_elements", "expected"),
    [
        ([3, 9, 3, 9, 2, 3], None, False, 0, [[0, 2], [5], [1, 3], [4]]),
        ([3, 9, 3, 9, 2, 3], None, True, 0, [[4], [0, 2], [5], [1, 3]]),
        ([3, 9, 3, 9, 2, 3], _SPEC, False, 0, [[0, 2], [4, 5], [1, 3]]),
        ([3, 9, 3, 9, 2, 3], _SPEC, False, 8, [[0, 2], [4, 5], [1], [3]]),
        ([3, 3, 3, 8, 8, 8], _SPEC, False, 0, [[0, 1], [3, 4], [2], [5]]),
        ([3, 3, 3, 8, 8, 8], _SPEC, True, 0, [[0], [1, 2], [3], [4, 5]]),
        ([14, 15, 16], _EXACT, False, 0, [[0], [1, 2]]),
    ],
)
def test_rows_that_share_a_call(
    sizes: list[int], spec: ModelSpec | None, by_length: bool, max_elements: int, expected: list[list[int]]
) -> None:
    found = batches(_rows(sizes, spec), _fixed(2), by_length=by_length, max_elements=max_elements)
    assert [batch.tolist() for batch in found] == expected


def test_models_without_rows_get_one() -> None:
    rows = _rows([2, 2], None)
    alone = Rows(rows.inputs, rows.good, (), False, None, rows.sizes)
    assert [batch.tolist() for batch in batches(alone, _fixed(8))] == [[0], [1]]


def test_sorted_lengths_waste_little() -> None:
    random = np.random.default_rng(1)
    sizes = np.clip(random.lognormal(4, 1, 4000), 1, 512).astype(int).tolist()
    rows = _rows(sizes, _EXACT)
    shared = batches(rows, _fixed(32), by_length=True)
    assert len(shared) <= 1.2 * math.ceil(len(sizes) / 32)
    assert sum(len(batch) * math.prod(rows.common_sizes(batch)) for batch in shared) <= sum(sizes) / 0.98


@given(st.lists(st.integers(1, 40), min_size=1, max_size=25), st.integers(1, 7), st.sampled_from([0, 30, 100]))
def test_sorted_rows_are_cut_best(sizes: list[int], most: int, max_elements: int) -> None:
    """Against all ways to cut them."""
    rows = _rows(sizes, _EXACT)
    ordered = sorted(sizes)
    worth = most * sum(sizes) // (40 * len(sizes)) + 1

    @cache
    def least(end: int) -> int:
        if end == 0:
            return 0
        ways = []
        for begin in range(max(0, end - most), end):
            elements = (end - begin) * ordered[end - 1]
            if not max_elements or elements <= max_elements or begin == end - 1:
                ways.append(least(begin) + elements + worth)
        return min(ways)

    shared = batches(rows, _fixed(most), by_length=True, max_elements=max_elements)
    assert sum(len(batch) * rows.common_sizes(batch)[0] + worth for batch in shared) == least(len(sizes))
