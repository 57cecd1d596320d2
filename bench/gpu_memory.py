"""Memory of this process on the first GPU, for servers on the same machine to open, as CUDA's clients provide it.

Lives here: filling and exporting it. Must not: RPCs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from paceline.backends.cuda.accelerator import CudaAccelerator, DeviceMemory
from paceline.backends.cuda.driver import check, load_driver
from paceline.backends.cuda.memory import HANDLE_BYTES
from tests.wire import Array

__all__ = ["Exported", "export"]


@dataclass(frozen=True, slots=True)
class Exported:
    """Exported memory; `handle` opens it as long as this object is held."""

    handle: bytes
    memory: DeviceMemory


def export(array: Array, load: Callable[[str], Any] = ctypes.CDLL) -> Exported:
    """A copy of `array` on GPU 0. `load` opens the driver. Blocks, the first time for a second; raises DeviceError."""
    driver = load_driver(load)
    accelerator = CudaAccelerator(driver, 0)
    accelerator.enter()
    memory, host, stream = (
        accelerator.device_memory(array.nbytes),
        accelerator.host_memory(array.nbytes),
        accelerator.stream(),
    )
    ctypes.memmove(host.address, array.ctypes.data, array.nbytes)
    stream.copy_in(memory.address, host.address, array.nbytes)
    stream.synchronize()
    handle = (ctypes.c_ubyte * HANDLE_BYTES)()
    code = driver.cuIpcGetMemHandle(ctypes.byref(handle), ctypes.c_uint64(memory.address))
    check(driver, "cuIpcGetMemHandle", code)
    return Exported(bytes(handle), memory)
