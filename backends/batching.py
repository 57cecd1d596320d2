"""Many requests in, one execution, many results out.

Lives here: pure numpy: requests as they arrive (`Packed`), joined (`stack`, `join_into`), and their results (`Share`).
Must not: a runtime, a lock, a log, messages. The rules: a row is copied at most once, or if it is small and packed
twice, when several requests are stacked; results are shares of what the model wrote, which become views of it. Other
code sees `Packed` and `Share` as sequences of arrays, which many small requests never create.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from time import monotonic_ns
from typing import Any, cast, overload

import numpy as np

from paceline.backends.base import Allocate, Execution
from paceline.backends.errors import ExecutionError, UnfitOutputs
from paceline.backends.spec import MISSING, Array, ModelSpec, Tensors, fits
from paceline.protos.datatypes import DATATYPES

Run = Callable[[list[Array]], Tensors]

_ALIGNMENT_BYTES = 16
"""What malloc guarantees, and hence the arrays and bytes objects of C and Python."""

_COPIED_TWICE_BYTES = 4_096
"""Up to this size a slice, which is a copy, costs less than a view."""


class PackedLayout:
    """The dtypes, shapes and bytes of a request's `tensors`, in C order and little endian. Compared by identity."""

    __slots__ = ("rows", "tensors")

    def __init__(self, tensors: Sequence[tuple[np.dtype[Any], tuple[int, ...], int]]) -> None:
        self.tensors = tuple(tensors)
        self.rows = tensors[0][1][0] if tensors and tensors[0][1] else 0
        """Rows of each request, if axis 0 is the batch's."""


class _OnDemand(Sequence[Array]):
    """A sequence of `arrays`, which are made when somebody asks for them."""

    __slots__ = ()

    @property
    @abstractmethod
    def arrays(self) -> tuple[Array, ...]: ...

    def __len__(self) -> int:
        return len(self.arrays)

    @overload
    def __getitem__(self, index: int) -> Array: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Array]: ...

    def __getitem__(self, index: int | slice) -> Array | Sequence[Array]:
        return self.arrays[index]

    def __iter__(self) -> Iterator[Array]:
        return iter(self.arrays)


@dataclass(slots=True, eq=False, repr=False)
class Packed(_OnDemand):
    """The tensors that `layout` describes, at `starts` in `data`. As a sequence, read-only views of `data`."""

    data: bytes | memoryview
    layout: PackedLayout
    starts: tuple[int, ...]
    _arrays: tuple[Array, ...] | None = field(init=False, default=None)

    def raw(self, index: int) -> tuple[tuple[int, ...], bytes]:
        """Shape and bytes of a tensor."""
        _, shape, size_bytes = self.layout.tensors[index]
        start = self.starts[index]
        return shape, bytes(self.data[start : start + size_bytes])

    @property
    def arrays(self) -> tuple[Array, ...]:
        if self._arrays is None:
            places = zip(self.layout.tensors, self.starts, strict=True)
            self._arrays = (*[np.ndarray(shape, dtype, self.data, start) for (dtype, shape, _), start in places],)
        return self._arrays


def _common_layout(requests: Sequence[Sequence[Any]]) -> PackedLayout | None:
    """The layout of `requests`, if they are several and packed with the same one; else None."""
    # hot path: 50 ns a request
    first = requests[0]
    if type(first) is not Packed or len(requests) == 1:
        return None
    layout = first.layout
    return None if [one for one in requests if type(one) is not Packed or one.layout is not layout] else layout


def _stack_packed(
    requests: Sequence[Packed], layout: PackedLayout, padding_rows: int, allocate: Allocate | None
) -> list[Array]:
    """As `stack`, for requests of one `layout`. Large tensors are copied once, small ones twice."""
    # hot path: 0.2 us a tensor
    columns = []
    rows = len(requests) * layout.rows + padding_rows
    for index, (dtype, one_shape, size_bytes) in enumerate(layout.tensors):
        shape = (rows, *one_shape[1:])
        pieces: list[bytes | memoryview]
        if size_bytes > _COPIED_TWICE_BYTES:
            pieces = [memoryview(one.data)[(start := one.starts[index]) : start + size_bytes] for one in requests]
        else:
            pieces = [one.data[(start := one.starts[index]) : start + size_bytes] for one in requests]
        if padding_rows:
            pieces += repeat(pieces[-1][size_bytes - size_bytes // layout.rows :], padding_rows)
        if allocate is not None and (target := allocate(index, shape)) is not None:
            _join_bytes_into(target, pieces)
            columns.append(target)
            continue
        # Unlike `bytes`, the result is writable. Releases the GIL once for more than a MiB, else never.
        columns.append(np.ndarray(shape, dtype, bytearray().join(pieces)))
    return columns


class Outputs:
    """A batch's outputs, one array each, all with the batch's rows along axis 0. `notes` are for callers that process
    many shares: what holds for all of them. `size_bytes` is the total; of object arrays, of their references."""

    __slots__ = ("_data", "arrays", "notes", "size_bytes")

    def __init__(self, arrays: Tensors) -> None:
        self.arrays = arrays
        self.size_bytes = sum([one.nbytes for one in arrays])
        self.notes: dict[Any, Any] = {}
        self._data: dict[int, memoryview | None] = {}

    def data(self, index: int) -> memoryview | None:
        """The bytes of output `index`, row after row; None if its elements aren't plain contiguous bytes."""
        if index not in self._data:
            array = np.asarray(self.arrays[index])
            plain = array.flags.c_contiguous and not array.dtype.hasobject
            self._data[index] = array.reshape(-1).view(np.uint8).data if plain else None
        return self._data[index]


@dataclass(slots=True, eq=False, repr=False)
class Share(_OnDemand):
    """Rows `start` to `stop` of each output that is there: a request's result. As a sequence, views of these rows."""

    outputs: Outputs
    start: int
    stop: int

    def __len__(self) -> int:
        return len(self.outputs.arrays)

    @property
    def arrays(self) -> tuple[Array, ...]:
        start, stop = self.start, self.stop
        return (*[array if array is MISSING else array[start:stop] for array in self.outputs.arrays],)


MIN_RELEASING_ELEMENTS = 500
"""From this many elements on, numpy releases the GIL for each array that it copies. Beside a busy event loop, each
release may cost as long as threads keep the GIL: half a millisecond, for a copy of half a microsecond."""

MAX_HELD_BYTES = 2**20
"""The most bytes of one request that are copied without releasing the GIL. Between two copies other threads get it once
they have waited for the switch interval, half a millisecond; releasing it may cost as much for each copy."""


def join_into(target: Array, arrays: Sequence[Array]) -> None:
    """Write `arrays` one after the other along axis 0 of `target`. One copy, whatever their layout.

    `target` is C-contiguous, has no objects, and as many rows as all of these. ExecutionError if they don't fit.
    """
    # hot path
    if (
        arrays[0].size >= MIN_RELEASING_ELEMENTS
        and arrays[0].nbytes <= MAX_HELD_BYTES
        and _join_holding_on(target, arrays)
    ):
        return
    try:
        if len(arrays) == 1:
            np.copyto(target, arrays[0], casting="no")
        else:
            np.concatenate(arrays, out=target, casting="no")
    except (ValueError, TypeError) as error:
        raise ExecutionError(f"requests of one batch don't fit together: {error}") from error


def _join_bytes_into(target: Array, pieces: Sequence[bytes | memoryview]) -> None:
    """Write `pieces` one after the other into `target`, which is C-contiguous and has as many bytes as all of them."""
    flat = target.reshape(-1).view(np.uint8)
    if max(map(len, pieces)) > MAX_HELD_BYTES:
        np.concatenate([np.frombuffer(one, np.uint8) for one in pieces], out=flat)
        return
    buffer, begin = flat.data, 0
    for one in pieces:
        end = begin + len(one)
        buffer[begin:end] = one
        begin = end


def _join_holding_on(target: Array, arrays: Sequence[Array]) -> bool:
    """Join without releasing the GIL during a copy. False, with `target` partly written, if layouts differ."""
    dtype, dims = target.dtype, target.shape[1:]
    buffer, begin = target.data.cast("B"), 0
    try:
        for array in arrays:
            if array.dtype != dtype or array.shape[1:] != dims:
                return False
            data = array.data.cast("B")
            end = begin + data.nbytes
            buffer[begin:end] = data
            begin = end
    except TypeError:  # not in C order, or without elements
        return False
    return True


def rows_of(requests: Sequence[Tensors]) -> list[int]:
    """The number of rows in each request of a batched spec: the first dimension of its first input."""
    return [one.layout.rows if type(one) is Packed else one[0].shape[0] for one in requests]


def stack(requests: Sequence[Tensors], padding_rows: int = 0, allocate: Allocate | None = None) -> list[Array]:
    """One C-contiguous array per input: the requests' arrays joined along axis 0, in order.

    Every row is copied once. A batch of one isn't copied: its own arrays are returned, unless they aren't contiguous or
    lack the alignment of numpy's own arrays, which kernels may rely on.
    All requests must agree, input by input, in datatype and trailing dimensions; ExecutionError if dimensions differ.
    `padding_rows` copies of the last row follow, which the model has to handle anyhow. Joined arrays lie in `allocate`
    where it has memory for them.
    """
    # hot path: 0.3 us per array above the copy itself; what page faults of fresh memory add, see bench/README.md
    if (layout := _common_layout(requests)) is not None:
        return _stack_packed(cast("Sequence[Packed]", requests), layout, padding_rows, allocate)
    if padding_rows:
        requests = [*requests, [np.repeat(array[-1:], padding_rows, axis=0) for array in requests[-1]]]
    if len(requests) == 1:
        return [
            one if one.flags.c_contiguous and one.ctypes.data % _ALIGNMENT_BYTES == 0 else one.copy(order="C")
            for one in requests[0]
        ]
    try:
        return [_joined(column, index, allocate) for index, column in enumerate(zip(*requests, strict=True))]
    except ValueError as error:
        raise ExecutionError(f"requests of one batch don't fit together: {error}") from error


def _joined(column: Sequence[Array], index: int, allocate: Allocate | None) -> Array:
    """The arrays of `column` (input `index`) joined along axis 0. ValueError or ExecutionError if they don't fit."""
    shape = _common_shape(column) if column[0].size >= MIN_RELEASING_ELEMENTS else None
    if shape is not None:
        if allocate is not None and (target := allocate(index, shape)) is not None:
            join_into(target, column)
            return target
        try:
            # Releases the GIL once for more than a MiB, else never. Unlike `bytes`, the result is writable.
            return np.ndarray(shape, column[0].dtype, bytearray().join(cast("Sequence[memoryview]", column)))
        except (TypeError, ValueError):
            shape = None  # not in C order
    # np.concatenate keeps Fortran order if every array has it; ascontiguousarray costs nothing otherwise.
    return np.ascontiguousarray(np.concatenate(column))


def _common_shape(column: Sequence[Array]) -> tuple[int, ...] | None:
    """The joined array's shape if it is just the elements of `column` one after the other; None if it may not be."""
    # hot path: 0.12 us per array; counting compares by identity first, and one dtype is the same object everywhere.
    dtype, shape = column[0].dtype, column[0].shape
    if dtype.hasobject or not shape or [one.dtype for one in column].count(dtype) < len(column):
        return None
    shapes = [one.shape for one in column]
    if shapes.count(shape) == len(shapes):
        return (len(shapes) * shape[0], *shape[1:])
    if any(one[1:] != shape[1:] for one in shapes):
        return None
    return (sum(one[0] for one in shapes), *shape[1:])


def split(outputs: Tensors, rows: Sequence[int], spec: ModelSpec) -> Sequence[Tensors]:
    """One result per entry of `rows`: consecutive shares of `outputs` with that many rows each, in order; without a
    batch axis, the outputs themselves.

    Raises ExecutionError, naming output, expected and got, if `outputs` aren't what `spec` says for `sum(rows)` rows.
    """
    check_outputs(outputs, spec, sum(rows))
    if not (spec.batched and outputs):
        return [tuple(outputs)] * len(rows)
    # hot path: for most of them nobody ever needs an array
    return shares(outputs, [0, *accumulate(rows)])


def shares(outputs: Tensors, bounds: Sequence[int]) -> Sequence[Tensors]:
    """One share of `outputs` per pair of consecutive `bounds`."""
    return [*map(Share, repeat(Outputs(outputs)), bounds, bounds[1:])]


def check_outputs(outputs: Tensors, spec: ModelSpec, rows: int) -> None:
    """Raise ExecutionError unless `outputs` fit `spec`; `rows` counts only if the spec is batched."""
    if len(outputs) != len(spec.outputs):
        raise UnfitOutputs(f"expected {len(spec.outputs)} outputs, got {len(outputs)}")
    lead = (rows,) if spec.batched else ()
    for output, tensor in zip(outputs, spec.outputs, strict=True):
        free = (-1,) * (output.ndim - len(lead))
        expected = (*lead, *(free if tensor.any_rank or tensor.assumed else tensor.dims))
        # A tensor that the model declares as a scalar, and clients see as a vector of one, may have that shape already.
        is_scalar = tensor.reshape == () and output.shape == (*lead, *[1] * len(free))
        if output.shape != expected and not (fits(output.shape, expected) or is_scalar):
            what = f"output '{tensor.name}': expected shape {list(expected)}, got {list(output.shape)}"
            if spec.batched and output.shape[:1] != lead:
                what += f"; the first dimension of every output must be the {rows} rows of the batch"
            # Without elements, it says nothing about other inputs: in this one, nothing was found.
            raise ExecutionError(what) if 0 in output.shape else UnfitOutputs(what)
        if output.dtype != DATATYPES[tensor.datatype].dtype:
            raise UnfitOutputs(f"output '{tensor.name}': expected {tensor.datatype}, got numpy's {output.dtype}")


def check_count(spec: ModelSpec, requests: Sequence[object]) -> None:
    """Raise ValueError unless `requests` can be a batch: one request, or several for a model with a batch axis."""
    if len(requests) != 1 and (not requests or not spec.batched):
        raise ValueError(f"expected {'one or more requests' if spec.batched else 'one request'}, got {len(requests)}")


def run_batch(
    spec: ModelSpec, requests: Sequence[Tensors], run: Run, padded_rows: int = 0, allocate: Allocate | None = None
) -> Execution:
    """Stack `requests`, call `run` once with one array per input, split its outputs, and time each step. Stacked arrays
    lie in `allocate` where it has memory for them.

    What `run` raises passes through. ValueError if a spec that isn't batched doesn't get exactly one request, or a
    batched one gets none: those are the caller's mistakes, not the model's.
    """
    check_count(spec, requests)
    began_ns = monotonic_ns()
    rows = rows_of(requests) if spec.batched else [1]
    padding = max(0, max(padded_rows, spec.fixed_rows) - sum(rows)) if spec.batched else 0
    inputs = stack(requests, padding, allocate)
    stacked_ns = monotonic_ns()
    outputs = run(inputs)
    ran_ns = monotonic_ns()
    results = split(outputs, [*rows, padding] if padding else rows, spec)[: len(rows)]
    return Execution(results, stacked_ns - began_ns, ran_ns - stacked_ns, monotonic_ns() - ran_ns)
