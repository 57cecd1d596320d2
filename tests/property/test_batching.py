"""Stacking and splitting against plain numpy, over every datatype, any shape and any partition into requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from backends.base import Array, ModelSpec, Tensors, TensorSpec
from backends.batching import rows_of, run_batch, split, stack
from protos.datatypes import DATATYPES


@dataclass(frozen=True)
class Batch:
    spec: ModelSpec
    rows: list[int]
    requests: list[Tensors]


def _array(datatype: str, shape: tuple[int, ...], seed: int, ordered: str) -> Array:
    """Any bit patterns, NaNs and infinities included."""
    random = np.random.default_rng(seed)
    dtype = DATATYPES[datatype].dtype
    if dtype.hasobject:
        elements = [random.bytes(int(size)) for size in random.integers(0, 5, int(np.prod(shape)))]
        array = np.empty(len(elements), object)
        array[:] = elements
    elif datatype == "BOOL":
        array = random.integers(0, 2, int(np.prod(shape))).astype(bool)
    else:
        array = np.frombuffer(random.bytes(int(np.prod(shape)) * dtype.itemsize), dtype)
    return np.asarray(array.reshape(shape), order="F" if ordered == "F" else "C")


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    rows = draw(st.lists(st.integers(1, 5), min_size=1, max_size=8))
    dims = st.lists(st.integers(0, 3), max_size=3).map(tuple)
    tensors = [
        TensorSpec(f"T{i}", draw(st.sampled_from(sorted(DATATYPES))), draw(dims))
        for i in range(draw(st.integers(1, 3)))
    ]
    ordered = draw(st.sampled_from(["C", "F"]))
    seed = draw(st.integers(0, 2**16))
    requests: list[Tensors] = [
        tuple(_array(t.datatype, (n, *t.dims), seed + 31 * i + j, ordered) for j, t in enumerate(tensors))
        for i, n in enumerate(rows)
    ]
    return Batch(ModelSpec(tuple(tensors), tuple(tensors), batched=True), rows, requests)


def _same(one: Array, other: Array) -> bool:
    """Equal to the bit: NaNs too."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return one.tolist() == other.tolist() if one.dtype.hasobject else one.tobytes() == other.tobytes()


@given(batches())
def test_stack_any_requests_equals_numpys_concatenation(batch: Batch) -> None:
    stacked = stack(batch.requests)

    assert len(stacked) == len(batch.spec.inputs)
    for i, array in enumerate(stacked):
        assert array.flags.c_contiguous
        assert _same(array, np.concatenate([request[i] for request in batch.requests]))


@given(batches())
def test_split_any_partition_returns_each_request_its_rows(batch: Batch) -> None:
    outputs = [np.concatenate(column) for column in zip(*batch.requests, strict=True)]

    results = split(outputs, batch.rows, batch.spec)

    assert [rows for (rows, *_) in ([array.shape[0] for array in result] for result in results)] == batch.rows
    for result, request in zip(results, batch.requests, strict=True):
        assert all(_same(got, expected) for got, expected in zip(result, request, strict=True))


@given(batches())
def test_split_any_partition_returns_views_that_cover_the_outputs(batch: Batch) -> None:
    outputs = stack(batch.requests)

    results = split(outputs, batch.rows, batch.spec)

    for i, output in enumerate(outputs):
        views = [result[i] for result in results]
        assert sum(view.size for view in views) == output.size
        assert all(np.shares_memory(view, output) for view in views if view.size)
        if not output.dtype.hasobject and output.flags.writeable:
            for view in views:
                view[...] = 0
            assert not output.any()


@given(batches())
def test_run_batch_identity_returns_what_came_in(batch: Batch) -> None:
    execution = run_batch(batch.spec, batch.requests, lambda inputs: inputs)

    assert rows_of(batch.requests) == batch.rows
    for result, request in zip(execution.results, batch.requests, strict=True):
        assert all(_same(got, expected) for got, expected in zip(result, request, strict=True))


@given(batches())
def test_stack_any_requests_leaves_them_as_they_were(batch: Batch) -> None:
    before = [[array.copy() for array in request] for request in batch.requests]
    for request in batch.requests:
        for array in request:
            array.flags.writeable = False

    stack(batch.requests)

    for request, copies in zip(batch.requests, before, strict=True):
        assert all(_same(array, copy) for array, copy in zip(request, copies, strict=True))
