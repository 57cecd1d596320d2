"""Batches whose tensors aren't all stacked and split by rows: ragged, optional and shape tensors, states whose rows
aren't in front, inputs made per batch, outputs scattered by an input's shape.

Lives here: `batch_runner`, which decides once per instance how its batches are assembled; models that need none of this
get plain `batching.run_batch`. Must not: a runtime. The rule: one way of joining per input and one way of splitting per
output, given by the spec alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from time import monotonic_ns
from typing import Any, Protocol

import numpy as np

from paceline.backends.base import Allocate, Execution
from paceline.backends.batching import Run, check_count, check_outputs, rows_of, run_batch, split, stack
from paceline.backends.errors import ExecutionError, UnfitOutputs
from paceline.backends.lengths import LengthBatches
from paceline.backends.spec import MISSING, Array, BatchInputKind, ModelSpec, Tensors, TensorSpec
from paceline.protos.datatypes import by_name


def batch_input(kind: BatchInputKind, sources: Sequence[Array], dtype: np.dtype[Any]) -> Array:
    """A new array for a batch whose requests, in order, bring `sources`, batch axis first. Source of the values:
    `BatchInput.Kind` of Triton's model configuration.

    Counts are of all elements of a request, over all its rows. Shapes, for n requests: [n] for element counts and
    running sums, [n + 1] for sums that begin with 0, [largest count] for the maximum (all zeros: its size is the
    value), [rows, dims] or [rows * dims] for item shapes, which leave out the batch axis.
    """
    counts = [source.size for source in sources]
    match kind:
        case BatchInputKind.ELEMENT_COUNT:
            return np.array(counts, dtype)
        case BatchInputKind.ACCUMULATED_ELEMENT_COUNT:
            return np.array(list(accumulate(counts)), dtype)
        case BatchInputKind.ACCUMULATED_ELEMENT_COUNT_WITH_ZERO:
            return np.array(list(accumulate(counts, initial=0)), dtype)
        case BatchInputKind.MAX_ELEMENT_COUNT_AS_SHAPE:
            return np.zeros(max(counts), dtype)
        case BatchInputKind.ITEM_SHAPE | BatchInputKind.ITEM_SHAPE_FLATTEN:
            items = [source.shape[1:] for source in sources for _ in range(source.shape[0])]
            shapes = np.array(items, dtype).reshape(len(items), sources[0].ndim - 1)
            return shapes if kind is BatchInputKind.ITEM_SHAPE else shapes.reshape(-1)


class BatchRunner(Protocol):
    """Executes `requests` by `run`, padded to `padded_rows`. `run` gets one array per input of the spec, MISSING if it
    is left out, followed by one per target of each `batch_input`, in order. If all inputs are stacked by rows, they lie
    in `allocate` where it has memory for them."""

    def __call__(
        self, requests: Sequence[Tensors], run: Run, padded_rows: int = 0, allocate: Allocate | None = None
    ) -> Execution: ...


RowCounter = Callable[[Sequence[Tensors]], list[int]]


def batch_runner(spec: ModelSpec) -> BatchRunner:
    """How instances that serve `spec` execute a batch."""
    seen = as_the_model_sees(spec)
    mixed = any(one.optional or one.shape_tensor for one in (*spec.inputs, *spec.outputs)) or not spec.paddable
    runner: BatchRunner = partial(run_batch, seen)
    if mixed:
        runner = _MixedBatches(seen).run
    elif spec.lengths:
        runner = LengthBatches(seen).run
    return _rows_in_front(runner, spec) if any(one.batch_axis for one in (*spec.inputs, *spec.outputs)) else runner


def _rows_in_front(runner: BatchRunner, spec: ModelSpec) -> BatchRunner:
    """`runner`, which sees the batch axis in front of all tensors, for a model that has it elsewhere in some."""
    turned = turning(spec)

    def run_turned(
        requests: Sequence[Tensors], run: Run, padded_rows: int = 0, allocate: Allocate | None = None
    ) -> Execution:
        return runner(requests, turned(run), padded_rows, allocate)

    return run_turned


def turning(spec: ModelSpec) -> Callable[[Run], Callable[[Sequence[Array]], Tensors]]:
    """What makes, of what runs a model that serves `spec`, what takes and gives tensors with their rows in front."""
    inputs = [(place, one.batch_axis) for place, one in enumerate(spec.inputs) if one.batch_axis]
    outputs = [(place, one.batch_axis) for place, one in enumerate(spec.outputs) if one.batch_axis]

    def turned(run: Run) -> Callable[[Sequence[Array]], Tensors]:
        def run_turned(arrays: Sequence[Array]) -> Tensors:
            given = [*arrays]
            for place, axis in inputs:
                given[place] = np.ascontiguousarray(np.moveaxis(given[place], 0, axis))
            results = list(run(given))
            for place, axis in outputs if len(results) == len(spec.outputs) else ():
                if results[place].ndim > axis:  # else it is found not to fit
                    results[place] = np.moveaxis(results[place], axis, 0)
            return results

        return run_turned

    return turned


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
        places = {tensor.name: index for index, tensor in enumerate(spec.inputs)}
        self._batch_inputs = [
            (one.kind, places[one.source], by_name(one.datatype).dtype, len(one.targets)) for one in spec.batch_inputs
        ]
        scattered = {name: places[one.source] for one in spec.batch_outputs for name in one.targets}
        # Each output by itself, and the input by whose shapes it is scattered, if it is.
        self._outputs = [
            (ModelSpec((), (tensor,), batched=spec.batched and not tensor.shape_tensor), scattered.get(tensor.name))
            for tensor in spec.outputs
        ]
        # Where nothing about the outputs is special, they are shares of the batch's.
        special = scattered or any(one.optional or one.shape_tensor for one in spec.outputs)
        self._shared = None if special else ModelSpec((), spec.outputs, batched=spec.batched)

    def run(
        self, requests: Sequence[Tensors], run: Run, padded_rows: int = 0, allocate: Allocate | None = None
    ) -> Execution:
        """As `run_batch`, but doesn't use `allocate`."""
        spec = self._spec
        check_count(spec, requests)
        began_ns = monotonic_ns()
        rows = self._rows(requests)
        padding = max(0, padded_rows - sum(rows), spec.fixed_rows - sum(rows)) if spec.batched and spec.paddable else 0
        inputs = [
            _joined(tensor, [request[index] for request in requests], padding)
            for index, tensor in enumerate(spec.inputs)
        ]
        for kind, source, dtype, copies in self._batch_inputs:
            inputs += [batch_input(kind, [request[source] for request in requests], dtype)] * copies
        joined_ns = monotonic_ns()
        outputs = run(inputs)
        ran_ns = monotonic_ns()
        results = self._cut(outputs, requests, [*rows, padding] if padding else rows)
        return Execution(results, joined_ns - began_ns, ran_ns - joined_ns, monotonic_ns() - ran_ns)

    def _cut(self, outputs: Tensors, requests: Sequence[Tensors], rows: list[int]) -> Sequence[Tensors]:
        if self._shared is not None:
            return split(outputs, rows, self._shared)[: len(requests)]
        if len(outputs) != len(self._outputs):
            raise UnfitOutputs(f"expected {len(self._outputs)} outputs, got {len(outputs)}")
        columns: list[Sequence[Array]] = []
        for output, (alone, source) in zip(outputs, self._outputs, strict=True):
            (tensor,) = alone.outputs
            if tensor.optional and output is MISSING:
                columns.append([MISSING] * len(requests))
            elif source is not None:
                columns.append(_scattered(tensor, output, [request[source].shape for request in requests]))
            elif tensor.shape_tensor:
                check_outputs([output], alone, 0)
                columns.append([output] * len(requests))
            else:
                columns.append([part for (part,) in split([output], rows, alone)])
        # Padding rows come after the requests' own: the columns have them at the end, and no request gets them.
        return [tuple(column[number] for column in columns) for number in range(len(requests))]


def _joined(tensor: TensorSpec, arrays: Sequence[Array], padding: int) -> Array:
    """What the model sees of the `arrays` that the requests have for `tensor`."""
    if tensor.optional and (missing := sum(array is MISSING for array in arrays)):
        if missing != len(arrays):
            raise ExecutionError(
                "requests of one batch don't fit together: "
                f"input '{tensor.name}' is missing in {missing} of {len(arrays)}"
            )
        return MISSING
    if tensor.ragged:
        # All elements as one vector. One copy; none for a single contiguous array.
        flat = [array.reshape(-1) for array in arrays]
        return np.ascontiguousarray(flat[0]) if len(flat) == 1 else np.concatenate(flat)
    if tensor.shape_tensor:  # all requests share it: those that differ in it are never batched together
        arrays, padding = arrays[:1], 0
    return stack([(array,) for array in arrays], padding)[0]


def _scattered(tensor: TensorSpec, output: Array, by: Sequence[tuple[int, ...]]) -> Sequence[Array]:
    """Consecutive views, each with as many elements as the request's shape in `by` says."""
    if output.dtype != by_name(tensor.datatype).dtype:
        raise UnfitOutputs(f"output '{tensor.name}': expected {tensor.datatype}, got numpy's {output.dtype}")
    dims = (-1, *tensor.dims)
    shapes = [tuple(one[axis] if dim == -1 else dim for axis, dim in enumerate(dims)) for one in by]
    bounds = list(accumulate(map(math.prod, shapes), initial=0))
    if output.size != bounds[-1]:
        raise ExecutionError(
            f"output '{tensor.name}': expected {bounds[-1]} elements to scatter by the shapes of the requests' inputs, "
            f"got {output.size}"
        )
    flat = output.reshape(-1)
    return [flat[begin:end].reshape(shape) for (begin, end), shape in zip(pairwise(bounds), shapes, strict=True)]
