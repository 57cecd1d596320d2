"""Requests of different sizes in one batch against plain numpy: any datatypes, rows, sizes and common sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from paceline.backends.batching import Packed, PackedLayout
from paceline.backends.ragged import batch_runner
from paceline.backends.spec import Array, JoinedAxis, Length, ModelSpec, Tensors, TensorSpec
from paceline.protos.datatypes import DATATYPES, by_name

FILLS = {"BYTES": (0,), "BOOL": (0, 1), "UINT8": (0, 255)}


@dataclass(frozen=True)
class Batch:
    """`sizes` of each request, by length."""

    spec: ModelSpec
    rows: list[int]
    sizes: list[tuple[int, ...]]
    requests: list[Tensors]


def _array(datatype: str, shape: tuple[int, ...], seed: int) -> Array:
    dtype = DATATYPES[datatype].dtype
    numbers = np.random.default_rng(seed).integers(0, 2 if datatype == "BOOL" else 100, shape)
    return (
        np.array([b"%d" % n for n in numbers.ravel()], object).reshape(shape)
        if dtype.hasobject
        else (numbers.astype(dtype))
    )


@st.composite
def batches(draw: st.DrawFn) -> Batch:
    count = draw(st.integers(1, 2))
    tensors, axes = [], []
    for index in range(draw(st.integers(1, 3))):
        datatype = draw(st.sampled_from(sorted(DATATYPES)))
        # -1: the axis of the first length, -2: of the second; others have their own size.
        dims = draw(st.lists(st.sampled_from([-1, -count, 1, 3]), max_size=1 if index == 0 else 2))
        dims += [-1, -count] if index == 0 else []
        fill = draw(st.sampled_from(FILLS.get(datatype, (0, 1, 2))))
        tensors.append(TensorSpec(f"T{index}", datatype, tuple(max(dim, -1) for dim in dims), fill=fill))
        axes += [(-dim - 1, (index, axis + 1)) for axis, dim in enumerate(dims) if dim < 0]
    steps, multiples = draw(st.booleans()), draw(st.sampled_from([(), (2, 5, 9)]))
    lengths = []
    for number in range(count):
        places = tuple(place for length, place in axes if length == number)
        lengths.append(Length(f"length {number}", places, places, multiples, in_steps=steps))
    spec = ModelSpec(tuple(tensors), tuple(tensors), batched=True, lengths=tuple(lengths))
    sizes = draw(st.lists(st.tuples(*[st.integers(0, 17)] * count), min_size=1, max_size=4))
    rows = draw(st.lists(st.integers(1, 3), min_size=len(sizes), max_size=len(sizes)))
    requests: list[Tensors] = [
        tuple(
            _array(tensor.datatype, _shape(spec, index, (n, *tensor.dims), size), 31 * number + index)
            for index, tensor in enumerate(tensors)
        )
        for number, (n, size) in enumerate(zip(rows, sizes, strict=True))
    ]
    return Batch(spec, rows, sizes, requests)


def _shape(spec: ModelSpec, index: int, shape: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
    own = {axis: size for one, size in zip(spec.lengths, sizes, strict=True) for at, axis in one.inputs if at == index}
    return tuple(own.get(axis, dim) for axis, dim in enumerate(shape))


def _packed(request: Tensors) -> Tensors:
    if any(array.dtype.hasobject for array in request):
        return request
    starts = np.cumsum([0, *(array.nbytes for array in request[:-1])])
    layout = PackedLayout([(array.dtype, array.shape, array.nbytes) for array in request])
    return Packed(b"".join(array.tobytes() for array in request), layout, tuple(map(int, starts)))


def _same(one: Array, other: Array) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and one.tolist() == other.tolist()


@given(batches(), st.integers(0, 4), st.booleans())
def test_filled_batch_shows_the_model_rows_and_fill(batch: Batch, padding: int, is_packed: bool) -> None:
    seen: list[Array] = []

    def run(inputs: Sequence[Array]) -> Tensors:
        seen.extend(inputs)
        return list(inputs)

    requests = [_packed(request) for request in batch.requests] if is_packed else batch.requests
    results = batch_runner(batch.spec)(requests, run, sum(batch.rows) + padding).results

    longest = [max(sizes) for sizes in zip(*batch.sizes, strict=True)]
    common = [one.padded(size) for one, size in zip(batch.spec.lengths, longest, strict=True)]
    for index, tensor in enumerate(batch.spec.inputs):
        shape = _shape(batch.spec, index, (sum(batch.rows) + padding, *tensor.dims), common)
        expected = np.full(shape, b"" if tensor.datatype == "BYTES" else _fill(tensor), by_name(tensor.datatype).dtype)
        row = 0
        for request in batch.requests:
            expected[row : row + len(request[index])][tuple(map(slice, request[index].shape))] = request[index]
            row += len(request[index])
        expected[row:] = expected[row - 1]
        assert _same(seen[index], expected)
    for result, request in zip(results, batch.requests, strict=True):
        assert not isinstance(result, Exception)
        assert all(map(_same, result, request))


def _fill(tensor: TensorSpec) -> int:
    """Small integers in BF16 are exact."""
    return int(np.float32(tensor.fill).view(np.uint32)) >> 16 if tensor.datatype == "BF16" else int(tensor.fill)


@given(batches())
def test_filled_rows_give_elementwise_results_as_alone(batch: Batch) -> None:
    spec = batch.spec
    run = batch_runner(spec)

    def echo(inputs: Sequence[Array]) -> Tensors:
        return [np.where(array == array, array, array) for array in inputs]

    together = run(batch.requests, echo).results
    alone = [run([request], echo).results[0] for request in batch.requests]
    pooled = replace(spec, lengths=tuple(replace(one, outputs=()) for one in spec.lengths))
    pooled = replace(pooled, outputs=(TensorSpec("FIRST", spec.inputs[0].datatype, ()),))
    firsts = batch_runner(pooled)(batch.requests, lambda inputs: [np.arange(len(inputs[0])).astype(inputs[0].dtype)])

    for one, other in zip(together, alone, strict=True):
        assert not isinstance(one, Exception)
        assert not isinstance(other, Exception)
        assert all(map(_same, one, other))
    assert [len(result[0]) for result in firsts.results if not isinstance(result, Exception)] == batch.rows


MEMORY = ModelSpec(
    (TensorSpec("now", "FP32", (-1, 2), fill=7), TensorSpec("past", "FP32", (3, -1, 2), fill=8)),
    (TensorSpec("all", "FP32", (3, -1, 2)),),
    batched=True,
)


@given(
    st.sampled_from([(1, None, 0), (1, 0), (None, 0), (1, None), (0,), (1,)]),
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=6),
    st.integers(0, 3),
    st.sampled_from([(), (4, 12)]),
)
def test_state_joined_of_parts_grows_as_alone(
    parts: tuple[int | None, ...], sizes: list[tuple[int, int]], padding: int, common: tuple[int, ...]
) -> None:
    """Of the lengths 0, what is new, and 1, the past; where that is no length, all have the same."""
    filled = [number for number in (0, 1) if number in parts or (number == 0 and 1 in parts)]
    lengths = tuple(Length(str(number), ((number, number + 1),), (), common) for number in filled)
    numbered = tuple(None if part is None else filled.index(part) for part in parts)
    spec = replace(MEMORY, lengths=lengths, joined=(JoinedAxis(0, 2, numbered),))
    runner = batch_runner(spec)
    random = np.random.default_rng(len(sizes))
    requests = [
        (
            random.random((1, new, 2), np.float32),
            random.random((1, 3, past if 1 in parts else 5, 2), np.float32),
        )
        for new, past in sizes
    ]

    def joined(inputs: Sequence[Array]) -> Tensors:
        now, past = inputs
        rest = past if None in parts and 1 not in parts else np.repeat(now[:, :1, None], 3, 1)
        of = {0: np.repeat(now[:, None], 3, 1), 1: past, None: rest}
        return [np.concatenate([of[part] for part in parts], axis=2)]

    results = runner(requests, joined, len(requests) + padding).results

    for request, result in zip(requests, results, strict=True):
        assert not isinstance(result, Exception)
        assert _same(np.asarray(result[0]), joined(request)[0])
