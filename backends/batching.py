"""Many requests in, one execution, many results out.

Lives here: pure numpy over the value types of `base`. Must not: a runtime, a lock, a log. The rule: a row is copied at
most once, when several requests are stacked; results are shares of what the model wrote, which become views of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate, repeat
from operator import attrgetter
from time import monotonic_ns
from typing import cast

import numpy as np

from paceline.backends.base import Allocate, Execution
from paceline.backends.errors import ExecutionError, UnfitOutputs
from paceline.backends.joining import MIN_ELEMENTS, join_into
from paceline.backends.packed import Packed, are_alike, stacked
from paceline.backends.shares import Outputs, Share
from paceline.backends.spec import Array, ModelSpec, Tensors, TensorSpec, fits
from paceline.protos.datatypes import by_name

__all__ = ["Run", "check_count", "check_outputs", "rows_of", "run_batch", "shares", "split", "stack"]

_ALIGNMENT_BYTES = 16
"""What malloc guarantees, and hence the arrays and bytes objects of C and Python."""

_shape_of = attrgetter("shape")
_dtype_of = attrgetter("dtype")

Run = Callable[[list[Array]], Tensors]


def rows_of(requests: Sequence[Tensors]) -> list[int]:
    """The number of rows in each request of a batched spec: the first dimension of its first input."""
    return [request[0].shape[0] for request in requests]


def stack(requests: Sequence[Tensors], padding_rows: int = 0, allocate: Allocate | None = None) -> list[Array]:
    """One C-contiguous array per input: the requests' arrays joined along axis 0, in order.

    Every row is copied once. A batch of one isn't copied: its own arrays are returned, unless they aren't contiguous or
    lack the alignment of numpy's own arrays, which kernels may rely on.
    All requests must agree, input by input, in datatype and trailing dimensions; ExecutionError if dimensions differ.
    `padding_rows` copies of the last row follow, which the model has to handle anyhow. Joined arrays lie in `allocate`
    where it has memory for them.
    """
    # hot path: 0.3 us per array above the copy itself; what page faults of fresh memory add, see bench/README.md
    if padding_rows:
        requests = [*requests, _copies_of_last_row(requests[-1], padding_rows)]
    if len(requests) == 1:
        return [array if _is_ready(array) else array.copy(order="C") for array in requests[0]]
    try:
        return [_joined(column, index, allocate) for index, column in enumerate(zip(*requests, strict=True))]
    except ValueError as error:
        raise ExecutionError(f"requests of one batch don't fit together: {error}") from error


def _joined(column: Sequence[Array], index: int, allocate: Allocate | None) -> Array:
    """The arrays of `column` (input `index`) joined along axis 0. Raises ValueError or ExecutionError if they don't fit
    together."""
    shape = _common_shape(column) if column[0].size >= MIN_ELEMENTS else None
    if shape is None:
        return _joined_by_numpy(column)
    if allocate is not None and (target := allocate(index, shape)) is not None:
        join_into(target, column, 0)
        return target
    try:
        # Releases the GIL once for more than a MiB, else never. Unlike `bytes`, the result is writable.
        data = bytearray().join(cast("Sequence[memoryview]", column))
    except (TypeError, ValueError):  # not in C order
        return _joined_by_numpy(column)
    return np.ndarray(shape, column[0].dtype, data)


def _joined_by_numpy(column: Sequence[Array]) -> Array:
    # np.concatenate keeps Fortran order if every array has it; ascontiguousarray costs nothing otherwise.
    return np.ascontiguousarray(np.concatenate(column))


def _common_shape(column: Sequence[Array]) -> tuple[int, ...] | None:
    """The joined array's shape if it is just the elements of `column` one after the other; None if it may not be."""
    # hot path: 0.12 us per array; counting compares by identity first, and one dtype is the same object everywhere.
    dtype, shape = column[0].dtype, column[0].shape
    if dtype.hasobject or not shape or [*map(_dtype_of, column)].count(dtype) < len(column):
        return None
    shapes = [*map(_shape_of, column)]
    if shapes.count(shape) == len(shapes):
        return (len(shapes) * shape[0], *shape[1:])
    if any(one[1:] != shape[1:] for one in shapes):
        return None
    return (sum(one[0] for one in shapes), *shape[1:])


def _is_ready(array: Array) -> bool:
    return array.flags.c_contiguous and array.ctypes.data % _ALIGNMENT_BYTES == 0


def _copies_of_last_row(request: Tensors, rows: int) -> Tensors:
    return [np.repeat(array[-1:], rows, axis=0) for array in request]


def split(outputs: Tensors, rows: Sequence[int], spec: ModelSpec) -> Sequence[Tensors]:
    """One result per entry of `rows`: consecutive shares of `outputs` with that many rows each, in order.

    Raises ExecutionError, naming the output, what was expected and what came, if `outputs` don't match what `spec`
    promises for `sum(rows)` rows.
    """
    check_outputs(outputs, spec, sum(rows))
    if len(rows) == 1 or not outputs:
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
        expected = (*lead, *tensor.dims_of(output.ndim - len(lead)))
        if output.shape != expected and not (fits(output.shape, expected) or _is_scalar(output, tensor, lead)):
            raise _misshapen(output.shape, expected, tensor, spec.batched)
        if output.dtype != by_name(tensor.datatype).dtype:
            raise UnfitOutputs(f"output '{tensor.name}': expected {tensor.datatype}, got numpy's {output.dtype}")


def _is_scalar(output: Array, tensor: TensorSpec, lead: tuple[int, ...]) -> bool:
    """Whether a tensor that the model declares as a scalar, and clients see as a vector of one, already has that
    shape."""
    return tensor.reshape == () and output.shape == (*lead, *[1] * (output.ndim - len(lead)))


def _misshapen(shape: tuple[int, ...], expected: tuple[int, ...], tensor: TensorSpec, batched: bool) -> ExecutionError:
    what = f"output '{tensor.name}': expected shape {list(expected)}, got {list(shape)}"
    if batched and shape[:1] != expected[:1]:
        what += f"; the first dimension of every output must be the {expected[0]} rows of the batch"
    # Without elements, it says nothing about other inputs: in this one, nothing was found.
    return ExecutionError(what) if 0 in shape else UnfitOutputs(what)


def check_count(spec: ModelSpec, requests: Sequence[object]) -> None:
    """Raise ValueError unless `requests` can be a batch: one request for a model without batch axis, else one or
    more."""
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
    if len(requests) > 1 and are_alike(requests):
        packed = cast("Sequence[Packed]", requests)
        rows = [packed[0].layout.rows] * len(packed)
        padding = max(0, padded_rows - sum(rows))
        inputs = stacked(packed, padding, allocate)
    else:
        rows = rows_of(requests) if spec.batched else [1]
        padding = max(0, padded_rows - sum(rows)) if spec.batched else 0
        inputs = stack(requests, padding, allocate)
    stacked_ns = monotonic_ns()
    outputs = run(inputs)
    ran_ns = monotonic_ns()
    results = split(outputs, [*rows, padding] if padding else rows, spec)[: len(rows)]
    return Execution(results, stacked_ns - began_ns, ran_ns - stacked_ns, monotonic_ns() - ran_ns)
