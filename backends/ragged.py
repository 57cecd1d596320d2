"""Batches whose tensors aren't all stacked and split by rows: ragged, optional and shape tensors, inputs made per
batch, outputs scattered by an input's shape.

Lives here: `batch_runner`, which decides once per instance how its batches are assembled; models that need none of this
get plain `batching.run_batch`. Must not: a runtime. The rule: one way of joining per input and one way of splitting per
output, chosen from the spec in advance, so that an execution decides nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from time import monotonic_ns
from typing import Protocol

import numpy as np

from paceline.backends.base import Allocate, Execution
from paceline.backends.batch_inputs import batch_input
from paceline.backends.batching import Run, check_count, check_outputs, rows_of, run_batch, split, stack
from paceline.backends.errors import ExecutionError, UnfitOutputs
from paceline.backends.spec import MISSING, Array, BatchOutput, ModelSpec, Tensors, TensorSpec
from paceline.protos.datatypes import by_name

__all__ = ["BatchRunner", "as_the_model_sees", "batch_input_tensors", "batch_runner", "row_counter"]


class BatchRunner(Protocol):
    """Executes `requests` by `run`, padded to `padded_rows`. `run` gets one array per input of the spec, MISSING if it
    is left out, followed by one per target of each `batch_input`, in order. If all inputs are stacked by rows, they lie
    in `allocate` where it has memory for them."""

    def __call__(
        self, requests: Sequence[Tensors], run: Run, padded_rows: int = 0, allocate: Allocate | None = None
    ) -> Execution: ...


RowCounter = Callable[[Sequence[Tensors]], list[int]]
Join = Callable[[Sequence[Array], int], Array]
Cut = Callable[[Array, Sequence[Tensors], list[int]], Sequence[Array]]


def batch_runner(spec: ModelSpec) -> BatchRunner:
    """How instances that serve `spec` execute a batch."""
    seen = as_the_model_sees(spec)
    return partial(run_batch, seen) if spec.by_rows else _MixedBatches(seen).run


def row_counter(spec: ModelSpec) -> RowCounter:
    """A function that returns the rows of each request; each counts as one if the spec has no batch axis."""
    if not spec.batched:
        return lambda requests: [1] * len(requests)
    rows = [index for index, tensor in enumerate(spec.inputs) if not tensor.shape_tensor]
    if not rows or (rows[0] == 0 and not spec.inputs[0].optional):
        return rows_of
    return lambda requests: [
        next(request[index].shape[0] for index in rows if request[index] is not MISSING) for request in requests
    ]


def batch_input_tensors(spec: ModelSpec) -> list[TensorSpec]:
    """The inputs made per batch, in the order in which `run` gets them after the requests' own."""
    return [TensorSpec(name, one.datatype, (-1,)) for one in spec.batch_inputs for name in one.targets]


def as_the_model_sees(spec: ModelSpec) -> ModelSpec:
    """`spec` with the dims of `reshape` in place of those that clients see."""
    return replace(
        spec,
        inputs=tuple(replace(tensor, dims=tensor.model_dims) for tensor in spec.inputs),
        outputs=tuple(replace(tensor, dims=tensor.model_dims) for tensor in spec.outputs),
    )


class _MixedBatches:
    """`BatchRunner` for any spec; `spec` has the model's dims."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self._rows = row_counter(spec)
        self._joins = [_join_of(tensor) for tensor in spec.inputs]
        places = {tensor.name: index for index, tensor in enumerate(spec.inputs)}
        self._batch_inputs = [
            (one.kind, places[one.source], by_name(one.datatype).dtype, len(one.targets)) for one in spec.batch_inputs
        ]
        scattered = {name: one for one in spec.batch_outputs for name in one.targets}
        self._cuts = [_cut_of(tensor, scattered.get(tensor.name), places, spec.batched) for tensor in spec.outputs]

    def run(
        self, requests: Sequence[Tensors], run: Run, padded_rows: int = 0, allocate: Allocate | None = None
    ) -> Execution:
        """As `run_batch`, but doesn't use `allocate`."""
        spec = self._spec
        check_count(spec, requests)
        began_ns = monotonic_ns()
        rows = self._rows(requests)
        padding = max(0, padded_rows - sum(rows)) if spec.batched and spec.paddable else 0
        inputs = self._join(requests, padding)
        joined_ns = monotonic_ns()
        outputs = run(inputs)
        ran_ns = monotonic_ns()
        results = self._cut(outputs, requests, [*rows, padding] if padding else rows)
        return Execution(results, joined_ns - began_ns, ran_ns - joined_ns, monotonic_ns() - ran_ns)

    def _join(self, requests: Sequence[Tensors], padding: int) -> list[Array]:
        inputs = [join([request[index] for request in requests], padding) for index, join in enumerate(self._joins)]
        for kind, source, dtype, copies in self._batch_inputs:
            inputs += [batch_input(kind, [request[source] for request in requests], dtype)] * copies
        return inputs

    def _cut(self, outputs: Tensors, requests: Sequence[Tensors], rows: list[int]) -> list[tuple[Array, ...]]:
        if len(outputs) != len(self._cuts):
            raise UnfitOutputs(f"expected {len(self._cuts)} outputs, got {len(outputs)}")
        columns = [cut(output, requests, rows) for cut, output in zip(self._cuts, outputs, strict=True)]
        # Padding rows come after the requests' own: the columns have them at the end, and no request gets them.
        return [tuple(column[number] for column in columns) for number in range(len(requests))]


def _join_of(tensor: TensorSpec) -> Join:
    join = _flattened if tensor.ragged else _shared if tensor.shape_tensor else _stacked
    return partial(_unless_missing, join, tensor.name) if tensor.optional else join


def _stacked(arrays: Sequence[Array], padding: int) -> Array:
    return stack([(array,) for array in arrays], padding)[0]


def _flattened(arrays: Sequence[Array], padding: int) -> Array:
    """All elements as one vector. One copy; none for a single contiguous array."""
    if len(arrays) == 1:
        return np.ascontiguousarray(arrays[0].reshape(-1))
    return np.concatenate([array.reshape(-1) for array in arrays])


def _shared(arrays: Sequence[Array], padding: int) -> Array:
    """The array that all requests share: requests that differ in it are never batched together."""
    return _stacked(arrays[:1], 0)


def _unless_missing(join: Join, name: str, arrays: Sequence[Array], padding: int) -> Array:
    missing = sum(array is MISSING for array in arrays)
    if not missing:
        return join(arrays, padding)
    if missing != len(arrays):
        raise ExecutionError(
            f"requests of one batch don't fit together: input '{name}' is missing in {missing} of {len(arrays)}"
        )
    return MISSING


def _cut_of(tensor: TensorSpec, scattered: BatchOutput | None, places: dict[str, int], batched: bool) -> Cut:
    alone = ModelSpec((), (tensor,), batched=batched and not tensor.shape_tensor)
    cut: Cut
    if scattered is not None:
        cut = partial(_scattered, tensor, places[scattered.source])
    else:
        cut = partial(_whole if tensor.shape_tensor else _by_rows, alone)
    return partial(_all_missing, cut) if tensor.optional else cut


def _by_rows(alone: ModelSpec, output: Array, requests: Sequence[Tensors], rows: list[int]) -> Sequence[Array]:
    return [part for (part,) in split([output], rows, alone)]


def _whole(alone: ModelSpec, output: Array, requests: Sequence[Tensors], rows: list[int]) -> Sequence[Array]:
    check_outputs([output], alone, 0)
    return [output] * len(requests)


def _scattered(
    tensor: TensorSpec, source: int, output: Array, requests: Sequence[Tensors], rows: list[int]
) -> Sequence[Array]:
    """Consecutive views, each with as many elements as its request's shape has."""
    if output.dtype != by_name(tensor.datatype).dtype:
        raise UnfitOutputs(f"output '{tensor.name}': expected {tensor.datatype}, got numpy's {output.dtype}")
    shapes = [_filled((-1, *tensor.dims), request[source].shape) for request in requests]
    bounds = list(accumulate(map(math.prod, shapes), initial=0))
    if output.size != bounds[-1]:
        raise ExecutionError(
            f"output '{tensor.name}': expected {bounds[-1]} elements to scatter by the shapes of the requests' inputs, "
            f"got {output.size}"
        )
    flat = output.reshape(-1)
    return [flat[begin:end].reshape(shape) for (begin, end), shape in zip(pairwise(bounds), shapes, strict=True)]


def _filled(dims: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(shape[axis] if dim == -1 else dim for axis, dim in enumerate(dims))


def _all_missing(cut: Cut, output: Array, requests: Sequence[Tensors], rows: list[int]) -> Sequence[Array]:
    return [MISSING] * len(requests) if output is MISSING else cut(output, requests, rows)
