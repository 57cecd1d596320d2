"""Buffers between requests and a device: page-locked memory of the host, and the device's own.

Lives here: how long each buffer lives and who may write to it. Must not: a runtime, streams' order (`onnx.staged`). The
rules: in steady state nothing is allocated; a buffer of the host that results are views of isn't written to before the
last view is gone.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np

from backends.accelerator import HostMemory, Memory
from backends.base import Array

__all__ = ["DType", "Growing", "OutputPool", "Shape", "array_in"]

_GRANULE_BYTES = 256
"""What sizes are rounded up to; also the size for tensors without elements, which need an address all the same."""
_KEPT_BLOCKS = 8
"""Of an output, kept for later batches: as many are in use at a time only where answers leave slowly."""

_UINT8 = np.dtype(np.uint8)

DType = np.dtype[Any]
Shape = tuple[int, ...]

M = TypeVar("M", bound=Memory)


class Growing(Generic[M]):
    """One block of memory that becomes as large as it has to. It lies elsewhere then: `on_move` is called before what
    was there goes."""

    def __init__(self, allocate: Callable[[int], M], on_move: Callable[[], None] = lambda: None) -> None:
        self._allocate = allocate
        self._on_move = on_move
        self._memory: M | None = None

    def fit(self, size_bytes: int) -> M:
        """Memory of at least `size_bytes`.

        At least twice of what it was, so that sizes that grow bit by bit cost few allocations. Raises DeviceError; the
        next call tries again.
        """
        memory = self._memory
        if memory is not None and memory.size_bytes >= size_bytes:
            return memory
        wanted = max(size_bytes, 2 * memory.size_bytes if memory is not None else 0)
        # Before the new one is there: both together may be more than there is.
        del memory
        self._on_move()
        self._memory = None
        self._memory = self._allocate(_rounded(wanted))
        return self._memory


class OutputPool:
    """Page-locked memory for one output's arrays, which come back when the last view of them is gone.

    `lease` is called on any thread, and arrays go on any thread; memory is freed in `lease` alone, as freeing it may
    block until the device is idle.
    """

    def __init__(self, allocate: Callable[[int], HostMemory]) -> None:
        self._allocate = allocate
        self._size_bytes = 0
        # Appending and popping are atomic.
        self._free: deque[HostMemory] = deque()

    def lease(self, dtype: np.dtype[Any], shape: tuple[int, ...]) -> tuple[Array, int]:
        """An array with whatever was in that memory, and its address. Raises DeviceError."""
        size_bytes = math.prod(shape) * dtype.itemsize
        memory = self._taken(size_bytes)
        block = _Block((memory.size_bytes,), _UINT8, _buffer(memory))
        block._memory, block._free = memory, self._free
        return np.ndarray(shape, dtype, block), memory.address

    def reserve(self, count: int) -> None:
        """Have memory for so many arrays as large as the largest so far. Raises DeviceError."""
        for _ in range(count - len(self._free)):
            self._free.append(self._allocate(max(self._size_bytes, _GRANULE_BYTES)))

    def _taken(self, size_bytes: int) -> HostMemory:
        if size_bytes > self._size_bytes:
            self._size_bytes = _rounded(max(size_bytes, 2 * self._size_bytes))
        while True:
            try:
                memory = self._free.popleft()
            except IndexError:
                # Of its own size at least: another slot that grows the pool at the same time may have the last word.
                return self._allocate(max(self._size_bytes, _rounded(size_bytes)))
            if memory.size_bytes >= size_bytes and len(self._free) < _KEPT_BLOCKS:
                return memory


class _Block(np.ndarray[Any, np.dtype[np.uint8]]):
    """The bytes of one lease, made over what is no array. Arrays made with it as their buffer have it as their base,
    and views of those have them: numpy leaves out of a chain of bases what stands between two arrays of one class."""

    __slots__ = ("_free", "_memory")
    _memory: HostMemory
    _free: deque[HostMemory]

    def __del__(self) -> None:
        self._free.append(self._memory)


def array_in(memory: HostMemory, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """The first bytes of `memory` as an array; it must not outlive the memory."""
    return np.ndarray(shape, dtype, _buffer(memory))


def _buffer(memory: HostMemory) -> Any:
    """Of no type, as releases of numpy differ in what they say that an array's buffer may be."""
    return memory.buffer


def _rounded(size_bytes: int) -> int:
    return max(1, -(-size_bytes // _GRANULE_BYTES)) * _GRANULE_BYTES
