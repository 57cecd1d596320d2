"""Ragged batches against plain numpy: what the model sees, and that each request gets its own results."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.backends.ragged import batch_runner
from paceline.backends.spec import Array, BatchInput, BatchInputKind, BatchOutput, ModelSpec, TensorSpec

KINDS = tuple(BatchInputKind)


@dataclass(frozen=True)
class Batch:
    spec: ModelSpec
    requests: list[tuple[Array, ...]]


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    """One ragged input whose dims all differ, one that is stacked, every batch input, and an output of each kind."""
    rank = draw(st.integers(0, 3))
    random = np.random.default_rng(draw(st.integers(0, 2**16)))
    shapes = st.tuples(st.integers(1, 4), *[st.integers(0, 4)] * rank)
    requests: list[tuple[Array, ...]] = [
        (random.random(shape, np.float32), random.integers(0, 9, (shape[0], 2)))
        for shape in draw(st.lists(shapes, min_size=1, max_size=8))
    ]
    made = tuple(BatchInput(kind, (kind.value,), "INT32", "r") for kind in KINDS)
    inputs = (TensorSpec("r", "FP32", (-1,) * rank, ragged=True), TensorSpec("a", "INT64", (2,)))
    outputs = (TensorSpec("x", "FP32", (-1,) * rank), TensorSpec("b", "INT64", (2,)))
    return Batch(ModelSpec(inputs, outputs, True, made, (BatchOutput(("x",), "r"),)), requests)


@given(batches())
def test_each_request_of_a_ragged_batch_gets_its_own_results(batch: Batch) -> None:
    results = batch_runner(batch.spec)(batch.requests, lambda inputs: [inputs[0] * 2, inputs[1] + 1], 0).results

    for (scattered, stacked), (ragged, rows) in zip(results, batch.requests, strict=True):
        np.testing.assert_array_equal(scattered, ragged * 2, strict=True)
        np.testing.assert_array_equal(stacked, rows + 1, strict=True)


@given(batches())
def test_model_sees_a_ragged_batch_as_numpy_would_make_it(batch: Batch) -> None:
    seen: list[Array] = []

    def run(inputs: list[Array]) -> list[Array]:
        seen.extend(inputs)
        return inputs[:2]

    batch_runner(batch.spec)(batch.requests, run, 0)

    sources = [request[0] for request in batch.requests]
    sizes = np.array([source.size for source in sources])
    items = np.concatenate([np.tile(source.shape[1:], (source.shape[0], 1)) for source in sources])
    expected = dict(
        zip(
            KINDS,
            (sizes, sizes.cumsum(), np.append(0, sizes.cumsum()), np.zeros(sizes.max()), items, items.ravel()),
            strict=True,
        )
    )
    np.testing.assert_array_equal(seen[0], np.concatenate([source.ravel() for source in sources]), strict=True)
    for kind, array in zip(KINDS, seen[2:], strict=True):
        assert array.dtype == np.int32
        np.testing.assert_array_equal(array, expected[kind].reshape(array.shape))
        assert array.shape == expected[kind].shape
