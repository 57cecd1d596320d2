"""Stacking and splitting against plain numpy, over every datatype, any shape and any partition into requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.backends.batching import Packed, PackedLayout, rows_of, run_batch, split, stack
from paceline.backends.spec import Array, ModelSpec, Tensors, TensorSpec
from paceline.protos.datatypes import DATATYPES, by_name


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


@given(batches(), st.integers(0, 3), st.booleans())
def test_stack_into_given_buffers_gives_the_same_arrays(batch: Batch, padding: int, is_large: bool) -> None:
    requests = [[_wide(array) if is_large else array for array in request] for request in batch.requests]
    buffers: list[Array] = []

    def allocate(index: int, shape: tuple[int, ...]) -> Array | None:
        dtype = by_name(batch.spec.inputs[index].datatype).dtype
        if index:
            return None
        buffers.append(np.full(shape, 1, dtype))
        return buffers[-1]

    stacked = stack(requests, padding, allocate)

    for array, expected in zip(stacked, stack(requests, padding), strict=True):
        assert _same(array, expected)
    first = requests[0][0]
    has_buffer = (len(requests) > 1 or padding > 0) and not first.dtype.hasobject and first.size >= 500
    assert [one is stacked[0] for one in buffers] == [True] * has_buffer


def _wide(array: Array) -> Array:
    """The array with rows too large to be joined by numpy alone."""
    return np.repeat(array[..., None], 600, axis=-1)


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
def test_run_batch_identity_returns_its_inputs(batch: Batch) -> None:
    execution = run_batch(batch.spec, batch.requests, lambda inputs: inputs)

    assert rows_of(batch.requests) == batch.rows
    for result, request in zip(execution.results, batch.requests, strict=True):
        assert all(_same(got, expected) for got, expected in zip(result, request, strict=True))


@given(batches())
def test_stack_any_requests_leaves_them_unchanged(batch: Batch) -> None:
    before = [[array.copy() for array in request] for request in batch.requests]
    for request in batch.requests:
        for array in request:
            array.flags.writeable = False

    stack(batch.requests)

    for request, copies in zip(batch.requests, before, strict=True):
        assert all(_same(array, copy) for array, copy in zip(request, copies, strict=True))


@given(st.data())
def test_packed_requests_are_batched_as_their_arrays_would_be(data: st.DataObject) -> None:
    """All of one layout, of several, or mixed with requests of arrays; with padding or without, in buffers or
    without."""
    draw = data.draw
    kinds = sorted(name for name, datatype in DATATYPES.items() if datatype.item_bytes)
    large = draw(st.sampled_from([1, 1, 3_000]))
    specs = [
        TensorSpec(f"T{i}", draw(st.sampled_from(kinds)), (*draw(st.lists(st.integers(0, 3), max_size=2)), large))
        for i in range(draw(st.integers(1, 3)))
    ]
    layouts = {rows: layout_of(specs, rows) for rows in draw(st.sets(st.integers(1, 3), min_size=1, max_size=2))}
    requests: list[Tensors] = []
    for seed in range(draw(st.integers(1, 5))):
        rows = draw(st.sampled_from(sorted(layouts)))
        arrays = [_array(one.datatype, (rows, *one.dims), seed, "C") for one in specs]
        packed = packed_of(arrays, layouts[rows], draw(st.permutations(range(len(arrays)))))
        assert all(_same(got, expected) for got, expected in zip(packed, arrays, strict=True))
        requests.append(packed if draw(st.integers(0, 5)) else arrays)
    spec = ModelSpec(tuple(specs), tuple(specs), batched=True)
    padded_rows = draw(st.integers(0, 20))
    seen: list[Array] = []

    def run(inputs: list[Array]) -> Tensors:
        seen.extend(inputs)
        return inputs

    buffers: list[Array] = []

    def allocate(index: int, shape: tuple[int, ...]) -> Array:
        buffers.append(np.empty(shape, DATATYPES[specs[index].datatype].dtype))
        return buffers[-1]

    given = draw(st.sampled_from([None, allocate]))
    execution = run_batch(spec, requests, run, padded_rows, given)

    if given is not None:
        are_alike = len(requests) > 1 and len({id(getattr(one, "layout", one)) for one in requests}) == 1
        is_joined = len(requests) > 1 or padded_rows > rows_of(requests)[0]
        in_buffers = [index for index, one in enumerate(requests[0]) if are_alike or (is_joined and one.size >= 500)]
        assert len(buffers) == len(in_buffers)
        assert all(one is seen[index] for one, index in zip(buffers, in_buffers, strict=True))
    expected = stack([tuple(request) for request in requests], max(0, padded_rows - sum(rows_of(requests))))
    assert all(_same(got, wanted) for got, wanted in zip(seen, expected, strict=True))
    assert all(array.flags.c_contiguous for array in seen)
    for result, request in zip(execution.results, requests, strict=True):
        assert all(_same(got, wanted) for got, wanted in zip(result, request, strict=True))


def layout_of(specs: Sequence[TensorSpec], rows: int) -> PackedLayout:
    shapes = [(rows, *one.dims) for one in specs]
    dtypes = [DATATYPES[one.datatype].dtype for one in specs]
    sizes = [int(np.prod(shape)) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True)]
    return PackedLayout(list(zip(dtypes, shapes, sizes, strict=True)))


def packed_of(arrays: Sequence[Array], layout: PackedLayout, order: Sequence[int]) -> Packed:
    """The tensors in `order`, packed in a message with some bytes before, between and behind them."""
    message, starts = b"?", [0] * len(arrays)
    for index in order:
        starts[index] = len(message)
        message += arrays[index].tobytes() + b"!" * index
    return Packed(message, layout, tuple(starts))
