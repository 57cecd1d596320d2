"""Copies between a slot's buffers and clients' tensors that are already in device memory.

Lives here: which bytes go where. Must not: how long buffers live (`staging`), what waits for what (`onnx.staged`). The
rule: bytes that are on the device stay there. They are copied even for a batch of one: binding a client's tensor in
place would take a binding per request, could not be captured in a graph, and would let the tensor change during the
computation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple, cast

from paceline.backends.accelerator import Stream
from paceline.backends.base import DeviceTensor, Targets
from paceline.backends.errors import DeviceError, ExecutionError, InstanceError
from paceline.backends.joining import join_into
from paceline.backends.onnx.failures import device_failure
from paceline.backends.spec import Array, Tensors
from paceline.backends.staging import DType, Shape

__all__ = ["Made", "copy_to_targets", "gather", "repeat", "with_targets"]


class Made(NamedTuple):
    """An output of a batch: `shape` with all its rows, and its address on the device; None if it isn't there."""

    dtype: DType
    shape: Shape
    address: int | None


def gather(
    stream: Stream, column: Sequence[Array | DeviceTensor], host: Array, device: int | None, padding: int
) -> None:
    """Queue the copies that join `column` along its first axis, followed by `padding` copies of the last row.

    The target is device memory at `device`, or if that is None `host`, which is an array over page-locked memory.
    Arrays of the host are first written to their place in `host`. Without a `device` it blocks until everything is
    there. Raises DeviceError, and ExecutionError for what doesn't fit or can't be copied.
    """
    begin, offset, row = host.ctypes.data, 0, 0
    for one in column:
        _check_fits(one, host)
        if isinstance(one, DeviceTensor):
            copy = stream.copy_out if device is None else stream.copy_within
            _copy(copy, (begin if device is None else device) + offset, one.address, one.nbytes)
        else:
            join_into(host[row : row + len(one)], [one], 0)
            if device is not None and one.nbytes:
                stream.copy_in(device + offset, begin + offset, one.nbytes)
        offset += one.nbytes
        row += one.shape[0] if one.shape else 1
    if device is None:
        stream.synchronize()
        host[row:] = host[row - 1 : row]
    elif padding and offset:
        repeat(stream, device + offset, offset // row, padding)


def repeat(stream: Stream, end: int, row_bytes: int, count: int) -> None:
    """Queue copies that repeat the row before `end` `count` times; each doubles what is there."""
    done, begin = 1, end - row_bytes
    while done <= count:
        more = min(done, count + 1 - done)
        stream.copy_within(begin + done * row_bytes, begin, more * row_bytes)
        done += more


def copy_to_targets(
    stream: Stream, targets: Sequence[Targets], rows: Sequence[int] | None, outputs: Sequence[Made]
) -> list[Targets]:
    """Queue the copies of `outputs` to where requests want them. Returns, per request, which outputs (by index) are
    left where.

    `rows` are those of each request, None if there is no batch axis. Nothing is copied for a request that can't get
    everything it wants. Raises ExecutionError.
    """
    left: list[Targets] = []
    starts = accumulate(rows or (), initial=0)
    for number, (wanted, start) in enumerate(zip(targets, starts, strict=False)):
        parts = {
            index: _part(outputs[index], start, rows[number] if rows is not None else None, target)
            for index, target in wanted.items()
        }
        left.append({})
        if all(parts.values()):
            left[-1] = {index: there for index, (there, _) in cast("dict[int, _Part]", parts).items()}
            for there, source in cast("dict[int, _Part]", parts).values():
                _copy(stream.copy_within, there.address, source, there.nbytes)
    return left


_Part = tuple[DeviceTensor, int]


def _part(made: Made, start: int, count: int | None, target: DeviceTensor) -> _Part | None:
    """What `target` will hold, and its current address; None if `target` is too small, or the output isn't on the
    device."""
    if made.address is None:
        return None
    shape = made.shape if count is None else (count, *made.shape[1:])
    there = DeviceTensor(target.owner, target.address, made.dtype, shape)
    if there.nbytes > target.nbytes:
        return None
    return there, made.address + start * math.prod(made.shape[1:]) * made.dtype.itemsize


def with_targets(results: Sequence[Tensors], left: Sequence[Targets]) -> list[Tensors]:
    """`results` with the outputs that were left on the device in place of the arrays."""
    return [
        cast("Tensors", [there.get(index, output) for index, output in enumerate(result)])
        for result, there in zip(results, left, strict=True)
    ]


def _check_fits(one: Array | DeviceTensor, host: Array) -> None:
    if one.dtype != host.dtype or one.shape[1:] != host.shape[1:]:
        raise ExecutionError(
            f"requests of one batch don't fit together: expected {host.dtype} of shape {[-1, *host.shape[1:]]}, "
            f"got {one.dtype} of shape {list(one.shape)}"
        )


def _copy(copy: Callable[[int, int, int], None], target: int, source: int, size_bytes: int) -> None:
    """Copy from or to a client's memory. If that fails, the memory may be to blame: an ExecutionError lets the batch's
    other requests run again without it."""
    if not size_bytes:
        return
    try:
        copy(target, source, size_bytes)
    except DeviceError as error:
        problem = device_failure(error)
        if type(problem) is not InstanceError:
            raise
        raise ExecutionError(f"a client's memory on the GPU can't be copied from or to: {error}") from error
