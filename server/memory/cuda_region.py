"""CUDA shared memory: a client's allocation on a GPU. Instances on that GPU copy from and to it themselves; for all
others the driver copies to and from host memory.

Lives here: its bounds, and the driver's errors in the caller's terms. Must not: the driver's calls
(`backends.cuda.memory`), names of regions (`regions`), messages.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable

import numpy as np

from paceline.backends.cuda.codes import BROKEN, code_of
from paceline.backends.cuda.memory import CudaMemories, CudaMemory
from paceline.backends.errors import DeviceError
from paceline.backends.spec import Array
from paceline.server.errors import GpuLost, InvalidRequest, ServerError

__all__ = ["CudaRegion", "CudaRegions"]

_log = logging.getLogger("paceline.server.shared_memory")

_LOST = BROKEN | {4, 709, 999}
"""Codes of the driver after which only another process can use CUDA. Clients can cause none of these by what they
register; an unknown device or a handle of this very process are theirs."""

_LAST = 2**31 - 1
"""The driver takes 32 bits, and would take a larger number for another device."""


class CudaRegion:
    """The first `byte_size` bytes of an allocation, which stays open as long as somebody holds the region."""

    kind = "cuda"

    def __init__(self, name: str, device: int, byte_size: int, memory: CudaMemory, made_by: CudaRegions) -> None:
        self.name = name
        self.device = device
        self.byte_size = byte_size
        self._memory = memory
        self._made_by = made_by

    @property
    def mapped_at(self) -> None:
        """None: it isn't in the host's memory."""

    def check(self) -> None:
        """Nothing to check: what is open can't become smaller."""

    def address_on(self, gpu: int) -> int | None:
        return self._memory.address if gpu == self.device else None

    def read_into(self, target: Array, offset: int) -> None:
        """Fill `target`, which is C-contiguous, with what begins at `offset`. Blocks; raises InvalidRequest or
        GpuLost."""
        try:
            self._memory.read(target.ctypes.data, target.nbytes, offset)
        except DeviceError as error:
            raise self._made_by.failure(error, f"shared memory region '{self.name}' can't be read") from None

    def write(self, data: bytes | memoryview, offset: int) -> None:
        """Put `data` at `offset`. Blocks; raises InvalidRequest or GpuLost."""
        source = np.frombuffer(data, np.uint8)
        try:
            self._memory.write(source.ctypes.data, source.nbytes, offset)
        except DeviceError as error:
            raise self._made_by.failure(error, f"shared memory region '{self.name}' can't be written") from None


class CudaRegions:
    """Opens regions. `load` opens a shared library.

    `lost` is the driver's error after which only another process can use CUDA, "" before; instances on GPUs find that
    out for themselves. Then `on_loss` is called, on any thread.
    """

    def __init__(self, load: Callable[[str], object] = ctypes.CDLL) -> None:
        self._memories = CudaMemories(load)
        self.lost = ""
        self.on_loss: Callable[[], object] = lambda: None

    def open(self, name: str, handle: bytes, device: int, byte_size: int) -> CudaRegion:
        """The region `name`: `byte_size` bytes of what `handle` stands for on GPU `device`.

        Blocks. Raises InvalidRequest for a handle that the driver doesn't open, or a size beyond the allocation's;
        GpuLost.
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
            raise self.failure(error, where) from None
        if byte_size > memory.byte_size:
            raise InvalidRequest(f"{where}: expected up to the {memory.byte_size} bytes of its memory, got {byte_size}")
        return CudaRegion(name, device, byte_size, memory, self)

    def failure(self, error: DeviceError, what: str) -> ServerError:
        """The exception to raise for the driver's `error`, which is why `what`."""
        if code_of(error) not in _LOST:
            return InvalidRequest(f"{what}: {error}")
        if not self.lost:
            self.lost = str(error)
            _log.error("CUDA shared memory is lost until the server restarts: %s", error)
            self.on_loss()
        return GpuLost(f"{what}: {error}; the server has to restart")
