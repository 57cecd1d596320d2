"""Tensors that are parts of requests' bytes: a batch of them equals stacking their arrays."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.backends.batching import stack
from paceline.backends.packed import Packed, PackedLayout, are_alike, stacked

FP32, INT8 = np.dtype("<f4"), np.dtype("i1")


def layout(rows: int, columns: int) -> PackedLayout:
    shapes = (FP32, (rows, columns)), (INT8, (rows, 3))
    return PackedLayout([(dtype, shape, dtype.itemsize * shape[0] * shape[1]) for dtype, shape in shapes])


def packed(of: PackedLayout, seed: int) -> Packed:
    """A request with other bytes before, between and after its tensors, which are stored in another order."""
    (_, _, first_bytes), (_, _, second_bytes) = of.tensors
    data = np.random.default_rng(seed).integers(0, 100, 40 + first_bytes + second_bytes, np.uint8).tobytes()
    return Packed(data, of, (20 + second_bytes, 8))


@pytest.mark.parametrize("columns", [1, 2_000], ids=["small", "large"])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("count", [1, 4])
def test_batch_equals_stacking_its_arrays(columns: int, rows: int, padding: int, count: int) -> None:
    of = layout(rows, columns)
    requests = [packed(of, seed) for seed in range(count)]
    made = stacked(requests, padding)
    for array, expected in zip(made, stack([tuple(one) for one in requests], padding), strict=True):
        assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
        assert array.tobytes() == expected.tobytes()
        assert array.flags.writeable
        assert array.flags.c_contiguous


def test_requests_are_alike_if_they_are_packed_with_the_same_layout_object() -> None:
    of = layout(1, 2)
    one = packed(of, 0)
    assert are_alike([one, packed(of, 1)])
    for other in (packed(layout(1, 2), 1), tuple(one)):
        assert not are_alike([one, other])
        assert not are_alike([other, one])


def test_request_is_a_sequence_of_read_only_views() -> None:
    one = packed(layout(2, 2), 0)
    first, second = one
    assert len(one) == 2
    assert (one[0].tolist(), one[1].tolist()) == (first.tolist(), second.tolist())
    assert [array.shape for array in one[:]] == [(2, 2), (2, 3)]
    assert not first.flags.writeable
    assert not first.flags.owndata
