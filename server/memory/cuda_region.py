"""CUDA shared memory: a client's allocation on a GPU. Instances on that GPU copy from and to it themselves; for all
others the driver copies to and from host memory.

Lives here: its bounds, and the driver's errors in the caller's terms. Must not: the driver's calls
(`backends.cuda.memory`), names of regions (`regions`), messages.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from paceline.backends.cuda.driver import BROKEN, code_of
from paceline.backends.cuda.memory import CudaMemories, CudaMemory
from paceline.backends.errors import DeviceError
from paceline.backends.spec import Array
from paceline.server.errors import GpuLost, InvalidRequest
from paceline.server.memory.regions import Region

_log = logging.getLogger("paceline.server.shared_memory")

_LOST = BROKEN | {4, 709, 999}
"""Codes of the driver after which only another process can use CUDA. Clients can cause none of these by what they
register; an unknown device or a handle of this very process are theirs."""

_LAST = 2**31 - 1
"""The driver takes 32 bits, and would take a larger number for another device."""


@dataclass(eq=False)
class CudaRegion(Region):
    """The first `byte_size` bytes of an allocation, which stays open as long as somebody holds the region. What is open
    can't become smaller."""

    kind = "cuda"
    name: str
    device: int
    byte_size: int
    memory: CudaMemory
    made_by: CudaRegions

    def address_on(self, gpu: int) -> int | None:
        return self.memory.address if gpu == self.device else None

    def read_into(self, target: Array, offset: int) -> None:
        with self.made_by.failures(f"shared memory region '{self.name}' can't be read"):
            self.memory.read(target.ctypes.data, target.nbytes, offset)

    def write(self, data: bytes | memoryview, offset: int) -> None:
        source = np.frombuffer(data, np.uint8)
        with self.made_by.failures(f"shared memory region '{self.name}' can't be written"):
            self.memory.write(source.ctypes.data, source.nbytes, offset)


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
        """The region `name`: `byte_size` bytes of what `handle` stands for on GPU `device`. Blocks. Raises
        InvalidRequest for a handle that the driver doesn't open, or a size beyond the allocation's; GpuLost."""
        where = f"failed to register CUDA shared memory region '{name}': invalid args"
        if not 0 <= device <= _LAST:
            bound = "at least 0" if device < 0 else f"at most {_LAST}"
            raise InvalidRequest(f"{where}: expected a device_id of {bound}, got {device}")
        if byte_size < 1:
            raise InvalidRequest(f"{where}: expected at least 1 byte, got {byte_size}")
        with self.failures(where):
            memory = self._memories.open(handle, device)
        if byte_size > (most := memory.byte_size):
            del memory  # which closes it now, not when the last who holds the error forgets it
            raise InvalidRequest(f"{where}: expected up to the {most} bytes of its memory, got {byte_size}")
        return CudaRegion(name, device, byte_size, memory, self)

    @contextmanager
    def failures(self, what: str) -> Iterator[None]:
        """Raise InvalidRequest or GpuLost for the driver's errors in the block, which are why `what`."""
        try:
            yield
        except DeviceError as error:
            if code_of(error) not in _LOST:
                raise InvalidRequest(f"{what}: {error}") from None
            if not self.lost:
                self.lost = str(error)
                _log.error("CUDA shared memory is lost until the server restarts: %s", error)
                self.on_loss()
            raise GpuLost(f"{what}: {error}; the server has to restart") from None
