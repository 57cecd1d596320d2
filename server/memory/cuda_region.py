"""CUDA shared memory: a client's allocation on a GPU. Instances on that GPU copy from and to it themselves; for all
others the driver copies to and from host memory.

Lives here: its bounds, and the driver's errors in the caller's terms. Must not: the driver's calls
(`backends.cuda.memory`), names of regions (`regions`), messages.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

from backends.base import Array
from backends.cuda.memory import CudaMemories, CudaMemory
from backends.errors import DeviceError
from server.errors import InvalidRequest

__all__ = ["CudaRegion", "CudaRegions"]

_LAST = 2**31 - 1
"""The driver takes 32 bits, and would take a larger number for another device."""


class CudaRegion:
    """The first `byte_size` bytes of an allocation, which stays open as long as somebody holds the region."""

    kind = "cuda"

    def __init__(self, name: str, device: int, byte_size: int, memory: CudaMemory) -> None:
        self.name = name
        self.device = device
        self.byte_size = byte_size
        self._memory = memory

    @property
    def mapped_at(self) -> None:
        """None: it isn't in the host's memory."""

    def check(self) -> None:
        """Nothing to check: what is open can't become smaller."""

    def address_on(self, gpu: int) -> int | None:
        return self._memory.address if gpu == self.device else None

    def read_into(self, target: Array, offset: int) -> None:
        """Fill `target`, which is C-contiguous, with what begins at `offset`. Blocks; raises InvalidRequest."""
        try:
            self._memory.read(target.ctypes.data, target.nbytes, offset)
        except DeviceError as error:
            raise InvalidRequest(f"shared memory region '{self.name}' can't be read: {error}") from None

    def write(self, data: bytes | memoryview, offset: int) -> None:
        """Put `data` at `offset`. Blocks; raises InvalidRequest."""
        source = np.frombuffer(data, np.uint8)
        try:
            self._memory.write(source.ctypes.data, source.nbytes, offset)
        except DeviceError as error:
            raise InvalidRequest(f"shared memory region '{self.name}' can't be written: {error}") from None


class CudaRegions:
    """Opens regions. `load` opens a shared library."""

    def __init__(self, load: Callable[[str], Any] = ctypes.CDLL) -> None:
        self._memories = CudaMemories(load)

    def open(self, name: str, handle: bytes, device: int, byte_size: int) -> CudaRegion:
        """The region `name`: `byte_size` bytes of what `handle` stands for on GPU `device`.

        Blocks. Raises InvalidRequest for a handle that the driver doesn't open, or a size beyond the allocation's.
        """
        where = f"failed to register CUDA shared memory region '{name}': invalid args"
        if device < 0:
            raise InvalidRequest(f"{where}: expected a device_id of at least 0, got {device}")
        if device > _LAST:
            raise InvalidRequest(f"{where}: expected a device_id of at most {_LAST}, got {device}")
        if byte_size < 1:
            raise InvalidRequest(f"{where}: expected at least 1 byte, got {byte_size}")
        try:
            memory = self._memories.open(handle, device)
        except DeviceError as error:
            raise InvalidRequest(f"{where}: {error}") from None
        if byte_size > memory.byte_size:
            raise InvalidRequest(f"{where}: expected up to the {memory.byte_size} bytes of its memory, got {byte_size}")
        return CudaRegion(name, device, byte_size, memory)
