"""Tensors that are parts of requests' bytes: a batch of them equals stacking their arrays."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from paceline.backends.batching import Packed, PackedLayout, run_batch, stack
from paceline.backends.spec import Array, ModelSpec, Tensors, TensorSpec

FP32, INT8 = np.dtype("<f4"), np.dtype("i1")
TENSORS = (TensorSpec("a", "FP32", (-1,)), TensorSpec("b", "INT8", (3,)))
SPEC = ModelSpec(TENSORS, TENSORS, batched=True)


def layout(rows: int, columns: int) -> PackedLayout:
    shapes = (FP32, (rows, columns)), (INT8, (rows, 3))
    return PackedLayout([(dtype, shape, dtype.itemsize * shape[0] * shape[1]) for dtype, shape in shapes])


def packed(of: PackedLayout, seed: int) -> Packed:
    """A request with other bytes before, between and after its tensors, which are stored in another order."""
    (_, _, first_bytes), (_, _, second_bytes) = of.tensors
    data = np.random.default_rng(seed).integers(0, 100, 40 + first_bytes + second_bytes, np.uint8).tobytes()
    return Packed(data, of, (20 + second_bytes, 8))


def joined(requests: Sequence[Tensors], padding: int) -> list[Array]:
    """What a model gets for a batch of `requests`."""
    given: list[Array] = []

    def run(inputs: list[Array]) -> Tensors:
        given.extend(inputs)
        return inputs

    run_batch(SPEC, requests, run, sum(len(one[0]) for one in requests) + padding)
    return given


@pytest.mark.parametrize("columns", [1, 2_000], ids=["small", "large"])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("count", [1, 4])
def test_batch_equals_stacking_its_arrays(columns: int, rows: int, padding: int, count: int) -> None:
    of = layout(rows, columns)
    requests = [packed(of, seed) for seed in range(count)]
    made = joined(requests, padding)
    for array, expected in zip(made, stack([tuple(one) for one in requests], padding), strict=True):
        assert (array.dtype, array.shape) == (expected.dtype, expected.shape)
        assert array.tobytes() == expected.tobytes()
        assert array.flags.writeable or count + padding == 1
        assert array.flags.c_contiguous


def test_requests_of_other_layouts_and_plain_arrays_share_a_batch() -> None:
    one = packed(layout(1, 2), 0)
    for other in (packed(layout(1, 2), 1), packed(layout(2, 2), 1), tuple(packed(layout(1, 2), 1))):
        for requests in ([one, other], [other, one]):
            for array, expected in zip(joined(requests, 0), stack([tuple(each) for each in requests]), strict=True):
                assert array.tobytes() == expected.tobytes()


def test_request_is_a_sequence_of_read_only_views() -> None:
    one = packed(layout(2, 2), 0)
    first, second = one
    assert len(one) == 2
    assert (one[0].tolist(), one[1].tolist()) == (first.tolist(), second.tolist())
    assert [array.shape for array in one[:]] == [(2, 2), (2, 3)]
    assert not first.flags.writeable
    assert not first.flags.owndata
