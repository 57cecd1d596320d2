"""Memory of a device that is kept from one execution to the next, such as the states of sequences.

Lives here: blocks, and the pool that they come from. Must not: what is in them, or who needs how many. The rules:
allocating and freeing may wait for all of the device, so memory is allocated many blocks at a time, and a block that
nobody holds any more goes back to the pool without a call to the driver, on whichever thread; memory is freed only when
there is too little of it, or the pool is closed. A lost device's isn't read or written any more.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from paceline.backends.base import DeviceTensor
from paceline.backends.cuda.accelerator import CudaAccelerator, DeviceMemory
from paceline.backends.errors import DeviceError, DeviceLost, OutOfMemory
from paceline.backends.onnx.failures import device_failure
from paceline.backends.spec import Array

_GRANULE_BYTES = 256
_SLAB_BYTES = 2**20
_MAX_BLOCKS = 64
"""Allocated at once: so many blocks, if they are small, and no more bytes than that, unless one has more."""

_Place = tuple[DeviceMemory, int]
"""An address, and the allocation that it is in."""


class Block:
    """`size_bytes` bytes at `address` in the device's memory. They go back to the pool when nobody holds the block."""

    __slots__ = ("_free", "_pool", "_slab", "address", "size_bytes")

    def __init__(self, pool: BlockPool, free: deque[_Place], place: _Place, size_bytes: int) -> None:
        self._pool, self._free = pool, free
        self._slab, self.address = place
        self.size_bytes = size_bytes

    def __del__(self) -> None:
        # If the pool has been closed or has dropped its free blocks since, nobody else has this deque, or only others
        # that are in use: at the latest with the last of them, the memory is freed.
        self._free.append((self._slab, self.address))

    @property
    def gpu(self) -> int:
        return self._pool.gpu

    @property
    def is_lost(self) -> bool:
        return self._pool.is_lost

    def read(self, tensor: DeviceTensor) -> Array:
        return self._pool.read(tensor)


class BlockPool:
    """Blocks of the memory of `accelerator`'s device. `is_lost`: the device is, and with it what is in them."""

    def __init__(self, accelerator: CudaAccelerator) -> None:
        self.gpu = accelerator.gpu
        self.is_lost = False
        self._accelerator = accelerator
        # By size. Appending and popping are atomic.
        self._free: dict[int, deque[_Place]] = {}

    def lease(self, size_bytes: int) -> Block:
        """A block of at least `size_bytes`, with arbitrary contents. Raises OutOfMemory, or another InstanceError."""
        size_bytes = max(1, -(-size_bytes // _GRANULE_BYTES)) * _GRANULE_BYTES
        free = self._free.setdefault(size_bytes, deque())
        try:
            place = free.pop()
        except IndexError:
            try:
                place = self._allocate(size_bytes, free)
            except DeviceError as error:
                raise self._failed(error) from error
        return Block(self, free, place, size_bytes)

    def read(self, tensor: DeviceTensor) -> Array:
        """A copy of `tensor`, which is in one of the blocks, in the host's memory; on any thread. Blocks. Raises
        DeviceLost if the device is lost, or another InstanceError."""
        if self.is_lost:
            raise DeviceLost(f"GPU {self.gpu} was lost, with what was in its memory")
        array = np.empty(tensor.shape, tensor.dtype)
        try:
            with self._accelerator.current():
                stream = self._accelerator.stream()
                if array.nbytes:
                    stream.copy_out(array.ctypes.data, tensor.address, array.nbytes)
                stream.synchronize()
        except DeviceError as error:
            raise self._failed(error) from error
        return array

    def close(self) -> None:
        """Free the memory of all blocks that nobody holds; that of the others follows. Blocks."""
        self._drop_free()
        self._free.clear()

    def _allocate(self, size_bytes: int, free: deque[_Place]) -> _Place:
        self._accelerator.enter()
        count = max(1, min(_MAX_BLOCKS, _SLAB_BYTES // size_bytes))
        try:
            slab = self._accelerator.device_memory(count * size_bytes)
        except DeviceError as error:
            if not isinstance(device_failure(error), OutOfMemory):
                raise
            # Blocks of other sizes may have what there is.
            self._drop_free()
            count, slab = 1, self._accelerator.device_memory(size_bytes)
        free.extend([(slab, slab.address + number * size_bytes) for number in range(count - 1, 0, -1)])
        return slab, slab.address

    def _drop_free(self) -> None:
        for free in list(self._free.values()):
            free.clear()

    def _failed(self, error: DeviceError) -> Exception:
        failed = device_failure(error)
        self.is_lost = self.is_lost or isinstance(failed, DeviceLost)
        return failed
