"""Buffers between requests and a device: page-locked host memory, and the device's own; and the copies between them and
clients' tensors that are already in device memory.

Lives here: how long each buffer lives, who may write to it, and which bytes go where. Must not: a runtime, what waits
for what (`onnx.staged`). The rules: nothing is allocated in steady state; a host buffer that results are views of isn't
written to before the last view is gone; bytes that are on the device stay there. They are copied even for a batch of
one: binding a client's tensor in place would take a binding per request, could not be captured in a graph, and would
let the tensor change during the computation.
"""

from __future__ import annotations

import math
import operator
from collections import deque
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any, Generic, NamedTuple, TypeVar, cast

import numpy as np

from paceline.backends.base import DeviceTensor, Targets
from paceline.backends.cuda.accelerator import DeviceMemory, HostMemory, Stream
from paceline.backends.errors import DeviceError, ExecutionError, InstanceError
from paceline.backends.lengths import Filling, fill_up, runs
from paceline.backends.onnx.failures import device_failure
from paceline.backends.spec import Array, Shape, Tensors

_GRANULE_BYTES = 256
"""Sizes are rounded up to a multiple of this; tensors without elements have it, too, as they need an address."""
_KEPT_BLOCKS = 8
"""Blocks per output that are kept for later batches. This many are in use at once only if answers leave slowly."""

_UINT8 = np.dtype(np.uint8)

DType = np.dtype[Any]

M = TypeVar("M", bound=DeviceMemory | HostMemory)


class Growing(Generic[M]):
    """One block of memory that grows as needed. Growing moves it: `on_move` is called before the old block is freed."""

    def __init__(self, allocate: Callable[[int], M], on_move: Callable[[], None] = lambda: None) -> None:
        self._allocate = allocate
        self._on_move = on_move
        self._memory: M | None = None

    def fit(self, size_bytes: int) -> M:
        """Memory of at least `size_bytes`.

        It at least doubles when it grows, so that slowly growing sizes cost few allocations. Raises DeviceError; the
        next call tries again.
        """
        memory = self._memory
        if memory is not None and memory.size_bytes >= size_bytes:
            return memory
        wanted = max(size_bytes, 2 * memory.size_bytes if memory is not None else 0)
        # Freed before the new one is allocated: both together may not fit.
        del memory
        self._on_move()
        self._memory = None
        self._memory = self._allocate(_rounded(wanted))
        return self._memory


class OutputPool:
    """Page-locked memory for one output's arrays, returned to the pool when the last view of them is gone.

    On any thread, as arrays are dropped. Memory is freed only in `lease`: that may block until the device is idle.
    """

    def __init__(self, allocate: Callable[[int], HostMemory]) -> None:
        self._allocate = allocate
        self._size_bytes = 0
        # Appending and popping are atomic.
        self._free: deque[HostMemory] = deque()

    def lease(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[Array, int]:
        """An array with arbitrary contents, and its address. Raises DeviceError."""
        size_bytes = math.prod(shape) * dtype.itemsize
        memory = self._taken(size_bytes)
        block = _Block((memory.size_bytes,), _UINT8, cast("Any", memory.buffer))
        block._memory, block._free = memory, self._free
        return np.ndarray(shape, dtype, block), memory.address

    def reserve(self, count: int) -> None:
        """Have memory for `count` arrays of the largest size so far. Raises DeviceError."""
        for _ in range(count - len(self._free)):
            self._free.append(self._allocate(max(self._size_bytes, _GRANULE_BYTES)))

    def _taken(self, size_bytes: int) -> HostMemory:
        if size_bytes > self._size_bytes:
            self._size_bytes = _rounded(max(size_bytes, 2 * self._size_bytes))
        while True:
            try:
                memory = self._free.popleft()
            except IndexError:
                # At least this lease's own size: another slot that grows the pool at the same time may overwrite
                # `_size_bytes`.
                return self._allocate(max(self._size_bytes, _rounded(size_bytes)))
            if memory.size_bytes >= size_bytes and len(self._free) < _KEPT_BLOCKS:
                return memory


class _Block(np.ndarray[Any, np.dtype[np.uint8]]):
    """The bytes of one lease, made over a buffer that is no array. Arrays that use it as their buffer have it as their
    base, and views of those have them as theirs: from a chain of bases numpy removes only what stands between two
    arrays of one class."""

    __slots__ = ("_free", "_memory")
    _memory: HostMemory
    _free: deque[HostMemory]

    def __del__(self) -> None:
        self._free.append(self._memory)


def array_in(memory: HostMemory, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """The first bytes of `memory` as an array, which must not outlive the memory."""
    # Any: numpy releases differ in the types that they declare for an array's buffer.
    return np.ndarray(shape, dtype, cast("Any", memory.buffer))


def _rounded(size_bytes: int) -> int:
    return max(1, -(-size_bytes // _GRANULE_BYTES)) * _GRANULE_BYTES


class Made(NamedTuple):
    """An output of a batch: `shape` with all its rows, and its address on the device; None if it isn't there."""

    dtype: DType
    shape: Shape
    address: int | None


def gather(
    stream: Stream,
    column: Sequence[Array | DeviceTensor],
    host: Array,
    device: int | None,
    padding: int,
    fill: object = None,
) -> None:
    """Queue the copies that join `column` along its first axis, followed by `padding` copies of the last row. What is
    shorter than `host` along other axes is filled up with `fill`.

    The target is device memory at `device`, or if that is None `host`, which is an array over page-locked memory.
    Arrays of the host are first written to their place in `host`. Without a `device` it blocks until everything is
    there. Raises DeviceError, and ExecutionError for what doesn't fit or can't be copied.
    """
    begin, offset, row = host.ctypes.data, 0, 0
    for one in column:
        is_less = fill is not None and len(one.shape) == host.ndim
        is_less = is_less and all(map(operator.le, one.shape[1:], host.shape[1:]))
        if one.dtype != host.dtype or not (is_less or one.shape[1:] == host.shape[1:]):
            raise ExecutionError(
                f"requests of one batch don't fit together: expected {host.dtype} of shape {[-1, *host.shape[1:]]}, "
                f"got {one.dtype} of shape {list(one.shape)}"
            )
        rows = one.shape[0] if one.shape else 1
        there = host[row : row + rows] if one.shape else host
        is_filled = one.shape != there.shape
        if not isinstance(one, DeviceTensor):
            fill_up(there, [one], fill)
        elif is_filled:
            there[...] = fill
        if device is not None and there.nbytes and (is_filled or not isinstance(one, DeviceTensor)):
            stream.copy_in(device + offset, begin + offset, there.nbytes)
        if isinstance(one, DeviceTensor):
            copy = stream.copy_out if device is None else stream.copy_within
            (size, begins), item = runs(one.shape, there.shape), host.itemsize
            target = (begin if device is None else device) + offset
            for source, place in begins:
                _copy(copy, target + place * item, one.address + source * item, size * item)
        offset += there.nbytes
        row += rows
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
    stream: Stream,
    targets: Sequence[Targets],
    rows: Sequence[int] | None,
    outputs: Sequence[Made],
    filling: Filling | None = None,
) -> list[Targets]:
    """Queue the copies of `outputs` to where requests want them. Returns, per request, which outputs (by index) are
    left where.

    `rows` are those of each request, None if there is no batch axis; with a `filling`, each has its own sizes. Nothing
    is copied for a request that can't get everything it wants. Raises ExecutionError.
    """
    if filling is not None:
        filling.check([one.shape for one in outputs])
    left: list[Targets] = []
    starts = accumulate(rows or (), initial=0)
    for number, (wanted, start) in enumerate(zip(targets, starts, strict=False)):
        there: dict[int, DeviceTensor] = {}
        sources: list[tuple[int, Shape]] = []
        for index, target in wanted.items():
            made = outputs[index]
            whole = made.shape if rows is None else (rows[number], *made.shape[1:])
            own = whole if filling is None else filling.own_shape(index, number, whole)
            part = DeviceTensor(target.owner, target.address, made.dtype, own)
            if made.address is not None and part.nbytes <= target.nbytes:
                there[index] = part
                sources.append((made.address + start * math.prod(made.shape[1:]) * made.dtype.itemsize, whole))
        left.append(there if len(there) == len(wanted) else {})
        for part, (source, whole) in zip(left[-1].values(), sources, strict=False):
            (size, begins), item = runs(part.shape, whole), part.dtype.itemsize
            for place, begin in begins:
                _copy(stream.copy_within, part.address + place * item, source + begin * item, size * item)
    return left


def with_targets(results: Sequence[Tensors], left: Sequence[Targets]) -> list[Tensors]:
    """`results` with the outputs that were left on the device in place of the arrays."""
    return [
        cast("Tensors", [there.get(index, output) for index, output in enumerate(result)])
        for result, there in zip(results, left, strict=True)
    ]


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
