"""Reads inputs from shared memory into the tensors that the model sees, on the instance's thread, right before it
executes.

Lives here: what stands between the batcher and an instance if clients' shared memory is allowed. Must not: know how
regions are read. The rule: bytes go from the client's memory to the model's tensor in one copy, stacked or not, and a
request whose memory is gone fails alone. (In a batch with tensors on a GPU, those in the host's shared memory take a
second copy.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from time import monotonic_ns
from typing import Any, cast

import numpy as np

from paceline.backends.base import Allocate, DeviceTensor, Execution, ProvidesBuffers, Slot, Targets
from paceline.backends.batching import shares
from paceline.backends.packed import Packed
from paceline.backends.spec import Array, ModelSpec, Tensors
from paceline.server.errors import GpuLost, InvalidRequest
from paceline.server.memory.bulk_copy import Piece, copy_all
from paceline.server.memory.region_tensors import Input, Inputs, RegionTensor, TargetedInputs
from paceline.server.memory.regions import Region, all_intact

__all__ = ["Execute", "ExecuteInputs", "reading", "reading_by"]

Execute = Callable[[Sequence[Tensors], int], Execution]
ExecuteInputs = Callable[[Sequence[Inputs], int], Execution]

_Failures = dict[int, InvalidRequest | GpuLost]
"""By the place of the request in its batch."""


def reading(execute: Execute, spec: ModelSpec, buffers: ProvidesBuffers | None = None) -> ExecuteInputs:
    """Wrap an instance's `execute` for requests some of whose inputs aren't read yet. `buffers` is the instance, if
    it has memory of its own for inputs.

    A request whose inputs can't be read gets an InvalidRequest or GpuLost in the place of its results.
    """
    stackable = spec.by_rows and spec.batched
    allocate = buffers.buffer if buffers is not None and stackable else None

    def read_and_execute(requests: Sequence[Inputs], padded_rows: int) -> Execution:
        # hot path for those who bring their own bytes: 20 to 40 ns an input
        if not [inputs for inputs in requests if type(inputs) is not Packed and RegionTensor in map(type, inputs)]:
            return execute(cast("Sequence[Tensors]", requests), padded_rows)
        began_ns = monotonic_ns()
        failures: _Failures = {}
        try:
            if stackable and (len(requests) > 1 or padded_rows > requests[0][0].shape[0]):
                pads = allocate is not None and buffers is not None and buffers.pads
                done = _joined(execute, requests, padded_rows, failures, began_ns, allocate, pads)
            else:
                done = _one_by_one(execute, requests, padded_rows, failures, began_ns, allocate)
        finally:
            if buffers is not None:
                buffers.release_buffers()
        return _placed(done, failures, len(requests))

    return read_and_execute


def reading_by(slot: Slot, spec: ModelSpec) -> ExecuteInputs:
    """The same for a slot: tensors that lie in its GPU's memory, or belong there, stay out of the host's."""
    plain, gpu = reading(slot.execute, spec, slot), slot.gpu
    if gpu is None:
        return plain

    def read_and_execute(requests: Sequence[Inputs], padded_rows: int) -> Execution:
        # hot path for those who bring their own bytes, as above
        if not any(
            type(inputs) is TargetedInputs or (type(inputs) is not Packed and RegionTensor in map(type, inputs))
            for inputs in requests
        ):
            return slot.execute(cast("Sequence[Tensors]", requests), padded_rows)
        began_ns = monotonic_ns()
        targets = [_targets(inputs, gpu) for inputs in requests]
        located = [[_on_gpu(one, gpu) for one in inputs] for inputs in requests]
        if not any(targets) and not any(type(one) is DeviceTensor for inputs in located for one in inputs):
            return plain(requests, padded_rows)
        failures: _Failures = {}

        def execute(there: Sequence[Tensors], rows: int) -> Execution:
            return slot.execute(there, rows, [one for number, one in enumerate(targets) if number not in failures])

        # Padding also takes the place of requests that fail: only certain batch sizes may be allowed.
        rows = max(padded_rows, sum(inputs[0].shape[0] for inputs in requests)) if spec.batched else 0
        return _placed(_one_by_one(execute, located, rows, failures, began_ns), failures, len(requests))

    return read_and_execute


def _targets(inputs: Inputs, gpu: int) -> Targets:
    if type(inputs) is not TargetedInputs:
        return {}
    wanted = {index: span.on_gpu(gpu) for index, span in inputs.targets.items()}
    return {index: target for index, target in wanted.items() if target is not None}


def _on_gpu(one: Input, gpu: int) -> Input | DeviceTensor:
    return (one.on_gpu(gpu) or one) if isinstance(one, RegionTensor) else one


def _placed(done: Execution, failures: _Failures, requests: int) -> Execution:
    """`done`, with the result or failure of each of the batch's `requests` requests, in their order."""
    results = iter(done.results)
    return replace(done, results=[failures.get(number) or next(results) for number in range(requests)])


def _one_by_one(
    execute: Execute,
    requests: Sequence[Sequence[Input | DeviceTensor]],
    padded_rows: int,
    failures: _Failures,
    began_ns: int,
    allocate: Allocate | None = None,
) -> Execution:
    """Read each request into arrays of its own, and execute all of them. A lone request may be read into what
    `allocate` gives."""
    there: list[Tensors] = []
    for number, inputs in enumerate(requests):
        try:
            read = [
                _read(one, index, allocate) if isinstance(one, RegionTensor) else one
                for index, one in enumerate(inputs)
            ]
        except (InvalidRequest, GpuLost) as error:
            failures[number] = _bare(error)
        else:
            there.append(cast("Tensors", read))
    return _timed(execute, there, padded_rows, began_ns)


def _joined(
    execute: Execute,
    requests: Sequence[Inputs],
    padded_rows: int,
    failures: _Failures,
    began_ns: int,
    allocate: Allocate | None,
    pads: bool,
) -> Execution:
    """Read all requests into the rows of one as large as the batch, and execute that: stacking would be a second copy.
    `pads`: the instance pads it by itself."""
    rows = max(sum(inputs[0].shape[0] for inputs in requests), padded_rows)
    columns = [
        _place(index, (rows, *first.shape[1:]), first.dtype, allocate) for index, first in enumerate(requests[0])
    ]
    bounds = _fill_at_once(columns, requests) or _fill_one_by_one(columns, requests, failures)
    if len(bounds) == 1:
        return _timed(execute, [], rows, began_ns)
    # Padding, as for any other batch; also in place of those that failed: only certain batch sizes may be allowed.
    if pads:
        columns = [column[: bounds[-1]] for column in columns]
    else:
        for column in columns:
            column[bounds[-1] :] = column[bounds[-1] - 1]
    done = _timed(execute, [columns], rows, began_ns)
    outputs = cast("Tensors", done.results[0])
    return replace(done, results=shares(outputs, bounds))


def _read(one: RegionTensor, index: int, allocate: Allocate | None) -> Array:
    there = _place(index, one.shape, one.dtype, allocate)
    one.read_into(there)
    return there


def _place(index: int, shape: tuple[int, ...], dtype: np.dtype[Any], allocate: Allocate | None) -> Array:
    """The array that input `index` is to be read into."""
    there = None if allocate is None else allocate(index, shape)
    return np.empty(shape, dtype) if there is None else there


def _fill_at_once(columns: Sequence[Array], requests: Sequence[Inputs]) -> list[int] | None:
    """Fill `columns` with all of `requests`. Returns the row where each begins, and where the last ends. None if that
    can't be done at once, for instance because the memory of one of them is gone: then the caller has to find out which
    one it is."""
    bounds = [0, *accumulate(inputs[0].shape[0] for inputs in requests)]
    pieces: list[Piece] = []
    arrays: list[tuple[Array, Array]] = []
    regions: set[Region] = set()
    for index, column in enumerate(columns):
        begin, row_bytes = column.ctypes.data, column.strides[0]
        for start, stop, inputs in zip(bounds, bounds[1:], requests, strict=False):
            one, size_bytes = inputs[index], (stop - start) * row_bytes
            if not isinstance(one, RegionTensor):
                arrays.append((column[start:stop], one))
            elif (source := one.mapped_at(size_bytes)) is not None:
                pieces.append((begin + start * row_bytes, source, size_bytes))
                regions.add(one.region)
            else:
                return None
    # Bytes beyond a file's end, but in its last page, can be read, and are zero.
    if len(pieces) < 2 or not copy_all(pieces) or not all_intact(regions):
        return None
    for rows, one in arrays:
        rows[...] = one
    return bounds


def _fill_one_by_one(columns: Sequence[Array], requests: Sequence[Inputs], failures: _Failures) -> list[int]:
    """Fill `columns` with those of `requests` that can be read. Returns the row where each of them begins, and where
    the last ends."""
    bounds = [0]
    for number, inputs in enumerate(requests):
        start, stop = bounds[-1], bounds[-1] + inputs[0].shape[0]
        try:
            for column, one in zip(columns, inputs, strict=True):
                _fill(column[start:stop], one)
        except (InvalidRequest, GpuLost) as error:
            # The next one takes its rows.
            failures[number] = _bare(error)
        else:
            bounds.append(stop)
    return bounds


def _fill(target: Array, one: Array | RegionTensor) -> None:
    if isinstance(one, RegionTensor):
        one.read_into(target)
    else:
        target[...] = one


def _timed(execute: Execute, requests: Sequence[Tensors], padded_rows: int, began_ns: int) -> Execution:
    """Execute what could be read, if anything. Reading counts as part of getting the inputs together."""
    read_ns = monotonic_ns() - began_ns
    if not requests:
        return Execution([], read_ns, 0, 0)
    done = execute(requests, padded_rows)
    return replace(done, input_ns=done.input_ns + read_ns)


def _bare(error: InvalidRequest | GpuLost) -> InvalidRequest | GpuLost:
    """`error` without tracebacks, whose frames would hold the batch, and with it other clients' regions."""
    error.__context__ = None
    return error.with_traceback(None)
