"""What stands between the batcher and an instance if clients' shared memory is allowed, on the instance's thread: reads
inputs from there into the tensors that the model sees, right before it executes, and writes to CUDA shared memory those
outputs that the instance hasn't left there itself.

Lives here: which tensors are read and written, and how. Must not: know how regions are, or make error texts for outputs
that don't fit or can't be written: what isn't written here is left to the codec, like the outputs of split requests.
The rules: bytes go from the client's memory to the model's tensor in one copy, stacked or not, and a request whose
memory is gone fails alone. (In a batch with tensors on a GPU, those in the host's shared memory take a second copy.)
The event loop doesn't wait for a GPU.

Code that reads a mapping whose file was truncated dies of SIGBUS; if the kernel reads it instead, as it reads the
memory of any process, it returns a short count where the memory is gone. Why a single call for a batch: each time a
thread releases the interpreter lock, as it does for each read from a file, getting it back may take as long as the
event loop holds it: half a millisecond, for a copy of 40 us.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from time import monotonic_ns
from typing import Any, cast

import numpy as np

from paceline.backends.base import DeviceTensor, Execution, ModelInstance, ProvidesBuffers, Slot, Targets
from paceline.backends.batching import Packed, shares
from paceline.backends.open_request import ELSEWHERE, OpenRequest
from paceline.backends.spec import Array, ModelSpec, Tensors
from paceline.server.errors import GpuLost, InvalidRequest, as_value
from paceline.server.memory.region_tensors import NOWHERE, Input, Inputs, RegionTensor, Span, TargetedInputs
from paceline.server.memory.regions import Region, all_intact

Execute = Callable[[Sequence[Tensors], int], Execution]
ExecuteInputs = Callable[[Sequence[Inputs], int], Execution]
ExecuteOpen = Callable[[Sequence[OpenRequest]], Execution]

_log = logging.getLogger("paceline.server")

_Failures = dict[int, Exception]
"""By the place of the request in its batch."""

Piece = tuple[int, int, int]
"""Target address, source address, number of bytes."""
_MAX_PIECES = 1024
"""IOV_MAX of Linux."""
_MAX_BYTES = 0x7FFF0000
"""A little less than what Linux moves in a call."""

# ctypes gives it no type, and it may not be there.
_process_vm_readv: Any = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
if _process_vm_readv is not None:
    _process_vm_readv.restype = ctypes.c_ssize_t
    _process_vm_readv.argtypes = [ctypes.c_int, *2 * (ctypes.c_void_p, ctypes.c_ulong), ctypes.c_ulong]


class SystemCall:
    """Whether the system allows `process_vm_readv`; some sandboxes never do."""

    is_allowed = _process_vm_readv is not None


Room = Callable[[Inputs], Targets]
"""Where outputs of a request belong that stay in the memory of a slot's GPU. On the thread that executes; raises as
`execute`."""


def over_shared_memory(instance: ModelInstance, spec: ModelSpec, room: Room | None = None) -> ExecuteInputs:
    """`instance.execute` for requests with tensors in shared memory. A request whose inputs can't be read gets an
    InvalidRequest or GpuLost in the place of its results. Only a slot with a GPU can have `room`."""
    if isinstance(instance, Slot):
        execute = _reading_by(instance, spec, room)
    else:
        execute = reading(instance.execute, spec, instance if isinstance(instance, ProvidesBuffers) else None)
    return writing_outputs(execute) if spec.by_rows else execute


def reading(execute: Execute, spec: ModelSpec, buffers: ProvidesBuffers | None = None) -> ExecuteInputs:
    """Wrap an instance's `execute` for requests some of whose inputs aren't read yet. `buffers` is the instance, if
    it has memory of its own for inputs."""
    stackable = spec.by_rows and spec.batched and not spec.lengths  # those are filled up, with a second copy

    def read_and_execute(requests: Sequence[Inputs], padded_rows: int) -> Execution:
        # hot path for those who bring their own bytes: 20 to 40 ns an input
        if not [inputs for inputs in requests if type(inputs) is not Packed and RegionTensor in map(type, inputs)]:
            return execute(cast("Sequence[Tensors]", requests), padded_rows)
        reader = _Reader(execute, buffers if stackable else None, {})
        try:
            if stackable and (len(requests) > 1 or padded_rows > requests[0][0].shape[0]):
                return reader.joined(requests, padded_rows)
            return reader.one_by_one(requests, padded_rows)
        finally:
            if buffers is not None:
                buffers.release_buffers()

    return read_and_execute


def reading_open(execute_open: ExecuteOpen) -> ExecuteOpen:
    """`AnswersOpenly.execute_open` for requests whose inputs are given, and some not read yet."""

    def read_and_execute(requests: Sequence[OpenRequest]) -> Execution:
        failures: _Failures = {}
        # First what is given, then whether anybody waits: the event loop takes it away in the other order. A step is
        # executed all the same, as those behind it build on it, and keeps what it was given.
        given = [(one, one.given) for one in requests]
        wanted = {one: inputs for one, inputs in given if one.step is not None or not one.cancelled}

        def execute(there: Sequence[Tensors], rows: int) -> Execution:
            left = [one for number, one in enumerate(wanted) if number not in failures]
            for one, inputs in zip(left, there, strict=True):
                one.inputs = inputs
            return execute_open(left)

        try:
            done = _Reader(execute, None, failures).one_by_one([*wanted.values()], 0)
        finally:
            for one in requests:
                one.inputs = ()
                if one.cancelled:
                    one.given = ()
        results = dict(zip(wanted, done.results, strict=True))
        return replace(done, results=[results.get(one, ELSEWHERE) for one in requests])

    return read_and_execute


def _reading_by(slot: Slot, spec: ModelSpec, room: Room | None) -> ExecuteInputs:
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
            stay = () if room is None else [*map(room, requests)]
            return slot.execute(cast("Sequence[Tensors]", requests), padded_rows, stay)

        failures: _Failures = {}

        def execute(there: Sequence[Tensors], rows: int) -> Execution:
            # Not from the reader, which leads here: a cycle would hold clients' regions.
            return slot.execute(there, rows, [one for number, one in enumerate(targets) if number not in failures])

        reader = _Reader(execute, None, failures)
        targets = [
            {
                **({} if room is None else room(inputs)),
                **{index: there for index, span in _spans(inputs).items() if (there := span.on_gpu(gpu)) is not None},
            }
            for inputs in requests
        ]
        # hot path for states: with `room`, there are targets, and nothing is joined into one request
        located = [
            [(one.on_gpu(gpu) or one) if isinstance(one, RegionTensor) else one for one in inputs]
            for inputs in requests
        ]
        if not any(targets) and not any(type(one) is DeviceTensor for inputs in located for one in inputs):
            return plain(requests, padded_rows)
        # Padding also takes the place of requests that fail: only certain batch sizes may be allowed.
        rows = max(padded_rows, sum(inputs[0].shape[0] for inputs in requests)) if spec.batched else 0
        return reader.one_by_one(located, rows)

    return read_and_execute


def read_now(inputs: Inputs) -> Inputs:
    """`inputs`, with arrays in place of what lies in clients' shared memory. Raises InvalidRequest and GpuLost."""
    if type(inputs) is Packed or RegionTensor not in map(type, inputs):
        return inputs
    read: list[Input] = []
    for one in inputs:
        if isinstance(one, RegionTensor):
            one.read_into(array := np.empty(one.shape, one.dtype))
            read.append(array)
        else:
            read.append(one)
    return TargetedInputs.to(inputs.targets, read) if isinstance(inputs, TargetedInputs) else tuple(read)


def _spans(inputs: Inputs) -> Mapping[int, Span]:
    return inputs.targets if isinstance(inputs, TargetedInputs) else NOWHERE


class _Reader:
    """Reads a batch and has it executed. `buffers` may have memory for its inputs. `failures` gets those of requests
    that can't be read."""

    def __init__(self, execute: Execute, buffers: ProvidesBuffers | None, failures: _Failures) -> None:
        self._execute = execute
        self._buffers = buffers
        self._failures = failures
        self._began_ns = monotonic_ns()

    def one_by_one(self, requests: Sequence[Sequence[Input | DeviceTensor]], padded_rows: int) -> Execution:
        """Read each request into arrays of its own. Only a lone request may be read into `buffers`."""
        there: list[Tensors] = []
        for number, inputs in enumerate(requests):
            read: list[Array | DeviceTensor] = []
            try:
                for index, one in enumerate(inputs):
                    if isinstance(one, RegionTensor):
                        one.read_into(array := self._place(index, one.shape, one.dtype))
                        read.append(array)
                    else:
                        read.append(one)
            except (InvalidRequest, GpuLost) as error:
                self._failures[number] = as_value(error)
            else:
                there.append(cast("Tensors", read))
        return self._placed(self._timed(there, padded_rows), len(requests))

    def joined(self, requests: Sequence[Inputs], padded_rows: int) -> Execution:
        """Read all requests into the rows of one as large as the batch, and execute that: stacking would be a second
        copy."""
        rows = max(sum(inputs[0].shape[0] for inputs in requests), padded_rows)
        columns = [self._place(index, (rows, *one.shape[1:]), one.dtype) for index, one in enumerate(requests[0])]
        bounds = _fill_at_once(columns, requests) or self._fill_one_by_one(columns, requests)
        if len(bounds) == 1:
            return self._placed(self._timed([], rows), len(requests))
        # Padding, as for any other batch; also in place of those that failed: only certain batch sizes may be allowed.
        if self._buffers is not None and self._buffers.pads:
            columns = [column[: bounds[-1]] for column in columns]
        else:
            for column in columns:
                column[bounds[-1] :] = column[bounds[-1] - 1]
        done = self._timed([columns], rows)
        return self._placed(replace(done, results=shares(cast("Tensors", done.results[0]), bounds)), len(requests))

    def _place(self, index: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
        """The array that input `index` is to be read into."""
        there = None if self._buffers is None else self._buffers.buffer(index, shape)
        return np.empty(shape, dtype) if there is None else there

    def _fill_one_by_one(self, columns: Sequence[Array], requests: Sequence[Inputs]) -> list[int]:
        """Fill `columns` with those of `requests` that can be read. Returns the row where each of them begins, and
        where the last ends."""
        bounds = [0]
        for number, inputs in enumerate(requests):
            start, stop = bounds[-1], bounds[-1] + inputs[0].shape[0]
            try:
                for column, one in zip(columns, inputs, strict=True):
                    if isinstance(one, RegionTensor):
                        one.read_into(column[start:stop])
                    else:
                        column[start:stop] = one
            except (InvalidRequest, GpuLost) as error:
                self._failures[number] = as_value(error)  # the next one takes its rows
            else:
                bounds.append(stop)
        return bounds

    def _timed(self, requests: Sequence[Tensors], padded_rows: int) -> Execution:
        """Execute what could be read, if anything. Reading counts as part of getting the inputs together."""
        read_ns = monotonic_ns() - self._began_ns
        if not requests:
            return Execution([], read_ns, 0, 0, ran=False)
        done = self._execute(requests, padded_rows)
        return replace(done, input_ns=done.input_ns + read_ns)

    def _placed(self, done: Execution, requests: int) -> Execution:
        """`done`, with the result or failure of each of the batch's `requests` requests, in their order."""
        results = iter(done.results)
        return replace(done, results=[self._failures.get(number) or next(results) for number in range(requests)])


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


def copy_all(pieces: Sequence[Piece]) -> bool:
    """Copy `pieces`, if that can be done in one call. False if not: copy them another way; some of them may have been
    copied. All targets must exist; sources need not. Blocks, with the interpreter lock released."""
    size_bytes = sum(piece[2] for piece in pieces)
    if not SystemCall.is_allowed or len(pieces) > _MAX_PIECES or size_bytes > _MAX_BYTES:
        return False
    # struct iovec: address and length
    to = array("Q", [one for target, _, count in pieces for one in (target, count)])
    come = array("Q", [one for _, source, count in pieces for one in (source, count)])
    places = to.buffer_info()[0], len(pieces), come.buffer_info()[0], len(pieces)
    done = _process_vm_readv(os.getpid(), *places, 0)
    if done < 0 and (code := ctypes.get_errno()) in (errno.EPERM, errno.ENOSYS):
        SystemCall.is_allowed = False
        _log.info("shared memory is read tensor by tensor, which is slower: process_vm_readv: %s", os.strerror(code))
    return bool(done == size_bytes)


def writing_outputs(execute: ExecuteInputs) -> ExecuteInputs:
    """Wrap `execute` for requests that say where outputs belong. Results have to be rows (`ModelSpec.by_rows`)."""

    def execute_and_write(requests: Sequence[Inputs], padded_rows: int) -> Execution:
        done = execute(requests, padded_rows)
        # hot path for those who want their outputs in the response
        if not any(type(inputs) is TargetedInputs for inputs in requests):
            return done
        began_ns = monotonic_ns()
        results = [_left(inputs, result) for inputs, result in zip(requests, done.results, strict=True)]
        return replace(done, results=results, output_ns=done.output_ns + monotonic_ns() - began_ns)

    return execute_and_write


def _left(inputs: Inputs, result: Tensors | Exception) -> Tensors | Exception:
    """`result`, with a DeviceTensor for each output that is in its place now. Unchanged if any output with a target
    doesn't fit, is text or can't be written."""
    if not isinstance(inputs, TargetedInputs) or isinstance(result, Exception):
        return result
    targets = inputs.targets
    rest = {index: array for index in targets if not isinstance(array := result[index], DeviceTensor)}
    if any(array.dtype.hasobject or array.nbytes > targets[index].byte_size for index, array in rest.items()):
        return result
    left = list(result)
    for index, array in rest.items():
        region, offset = targets[index].region, targets[index].offset
        if region.kind != "cuda":
            continue
        try:
            region.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data, offset)
        except (InvalidRequest, GpuLost):
            return result
        left[index] = cast("Array", DeviceTensor(region, 0, array.dtype, array.shape))
    return left
