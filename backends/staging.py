"""Buffers between requests and a device: page-locked host memory, and the device's own.

Lives here: how long each buffer lives and who may write to it. Must not: a runtime, the order of streams
(`onnx.staged`). The rules: nothing is allocated in steady state; a host buffer that results are views of isn't written
to before the last view is gone.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np

from paceline.backends.accelerator import HostMemory, Memory
from paceline.backends.spec import Array

__all__ = ["DType", "Growing", "OutputPool", "Shape", "array_in"]

_GRANULE_BYTES = 256
"""Sizes are rounded up to a multiple of this; also the size for tensors without elements, which still need an
address."""
_KEPT_BLOCKS = 8
"""Blocks per output that are kept for later batches. This many are in use at once only if answers leave slowly."""

_UINT8 = np.dtype(np.uint8)

DType = np.dtype[Any]
Shape = tuple[int, ...]

M = TypeVar("M", bound=Memory)


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

    `lease` is called on any thread, and arrays are dropped on any thread. Memory is freed only in `lease`, as freeing
    may block until the device is idle.
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
        block = _Block((memory.size_bytes,), _UINT8, _buffer(memory))
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
    return np.ndarray(shape, dtype, _buffer(memory))


def _buffer(memory: HostMemory) -> Any:
    """Typed Any because numpy releases differ in the types that they declare for an array's buffer."""
    return memory.buffer


def _rounded(size_bytes: int) -> int:
    return max(1, -(-size_bytes // _GRANULE_BYTES)) * _GRANULE_BYTES
