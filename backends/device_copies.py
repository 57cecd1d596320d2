"""Copies between a slot's buffers and tensors of clients that lie in the device's memory already.

Lives here: which bytes go where. Must not: how buffers live (`staging`), what waits for what (`onnx.staged`). The rule:
bytes that are on the device stay there. They are copied even for a batch of one: a tensor bound where the client has it
would want a binding for each request, could be captured in no graph, and could change while it is computed with.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import NamedTuple, cast

from backends.accelerator import Stream
from backends.base import Array, DeviceTensor, Targets, Tensors
from backends.errors import DeviceError, ExecutionError, SessionError
from backends.joining import join_into
from backends.onnx.failures import device_failure
from backends.staging import DType, Shape

__all__ = ["Made", "gather", "leave", "with_left"]


class Made(NamedTuple):
    """An output of a batch: `shape` with all its rows, and where it is on the device; None if it isn't there."""

    dtype: DType
    shape: Shape
    address: int | None


def gather(
    stream: Stream, column: Sequence[Array | DeviceTensor], host: Array, device: int | None, padding: int
) -> None:
    """Queue what brings `column` together along its first axis, the last row again in `padding` more rows.

    In the device's memory at `device`, or else in that of the host, page-locked, that `host` is over: what comes from
    there is written to its place in `host` first. Without a `device` it blocks until all is there. Raises DeviceError,
    and ExecutionError for what doesn't fit or can't be copied.
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
        _repeat(stream, device + offset, offset // row, padding)


def _repeat(stream: Stream, end: int, row_bytes: int, count: int) -> None:
    """The row before `end` again, `count` times: twice as many with each copy."""
    done, begin = 1, end - row_bytes
    while done <= count:
        more = min(done, count + 1 - done)
        stream.copy_within(begin + done * row_bytes, begin, more * row_bytes)
        done += more


def leave(
    stream: Stream, targets: Sequence[Targets], rows: Sequence[int] | None, outputs: Sequence[Made]
) -> list[Targets]:
    """Queue what brings `outputs` to where requests want them; which of them, by index, and what lies there then.

    `rows` are those of each request, None if there is no batch axis. Of a request that can't have all that it wants
    nothing is copied. Raises ExecutionError.
    """
    left: list[Targets] = []
    starts = accumulate(rows or (), initial=0)
    for number, (wanted, start) in enumerate(zip(targets, starts, strict=False)):
        parts = {
            index: _part(outputs[index], start, rows[number] if rows is not None else None, room)
            for index, room in wanted.items()
        }
        left.append({})
        if all(parts.values()):
            left[-1] = {index: there for index, (there, _) in cast("dict[int, _Part]", parts).items()}
            for there, source in cast("dict[int, _Part]", parts).values():
                _copy(stream.copy_within, there.address, source, there.nbytes)
    return left


_Part = tuple[DeviceTensor, int]


def _part(made: Made, start: int, count: int | None, room: DeviceTensor) -> _Part | None:
    """What `room` will hold, and where that is now; None if there isn't room enough, or it isn't on the device."""
    if made.address is None:
        return None
    shape = made.shape if count is None else (count, *made.shape[1:])
    there = DeviceTensor(room.owner, room.address, made.dtype, shape)
    if there.nbytes > room.nbytes:
        return None
    return there, made.address + start * math.prod(made.shape[1:]) * made.dtype.itemsize


def with_left(results: Sequence[Tensors], left: Sequence[Targets]) -> list[Tensors]:
    """`results` with what was left on the device in its place."""
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
    """From or to a client's memory, which may be to blame if that fails: the others of the batch run again without."""
    if not size_bytes:
        return
    try:
        copy(target, source, size_bytes)
    except DeviceError as error:
        problem = device_failure(error)
        if type(problem) is not SessionError:
            raise
        raise ExecutionError(f"memory of a client on the GPU can't be copied from or to: {error}") from error
