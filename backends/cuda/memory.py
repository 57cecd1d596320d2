"""GPU memory of another process, opened through the CUDA driver's interprocess handles.

Lives here: the calls into libcuda through ctypes. Must not: a runtime, names of regions, tensors. The rule: every call
happens in the device's primary context, which runtimes use too. It is pushed before and popped after, so that the
thread's current context stays as it was.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

from paceline.backends.cuda.driver import PrimaryContext, check, load_driver
from paceline.backends.errors import DeviceError

HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
_LAZY_ENABLE_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS, the only flag there is


class _Handle(ctypes.Structure):
    """`CUipcMemHandle`, which is passed by value."""

    _fields_ = (("reserved", ctypes.c_ubyte * HANDLE_BYTES),)


class CudaMemory:
    """One allocation of another process, of `byte_size` bytes; closed when nobody holds it any more."""

    def __init__(self, driver: Any, context: PrimaryContext, address: int, byte_size: int) -> None:
        self._driver = driver
        self._context = context
        self.address = address
        self.byte_size = byte_size
        closing = weakref.finalize(self, _close, driver, context, address)
        # At process exit the driver may be gone first.
        closing.atexit = False

    def read(self, target: int, byte_size: int, offset: int) -> None:
        """Copy `byte_size` bytes from `offset` to host memory at address `target`. Blocks; raises DeviceError."""
        with self._context.current():
            code = self._driver.cuMemcpyDtoH_v2(
                ctypes.c_void_p(target), ctypes.c_uint64(self.address + offset), ctypes.c_size_t(byte_size)
            )
        check(self._driver, "cuMemcpyDtoH", code)

    def write(self, source: int, byte_size: int, offset: int) -> None:
        """Copy `byte_size` bytes of host memory at address `source` to `offset`. Blocks until every process can see
        them; raises DeviceError."""
        with self._context.current():
            code = self._driver.cuMemcpyHtoD_v2(
                ctypes.c_uint64(self.address + offset), ctypes.c_void_p(source), ctypes.c_size_t(byte_size)
            )
            check(self._driver, "cuMemcpyHtoD", code)
            # From pageable memory, that returns once everything has been read. Other processes wouldn't wait for the
            # rest.
            check(self._driver, "cuStreamSynchronize", self._driver.cuStreamSynchronize(None))


class CudaMemories:
    """Opens memory of other processes. `load` opens a shared library by name.

    A device's context stays from its first use on. The driver destroys a context with its last reference, and whoever
    drops the last memory would have to wait for that, which may be the event loop.
    """

    def __init__(self, load: Callable[[str], Any] = ctypes.CDLL) -> None:
        self._load = load
        self._contexts: dict[int, PrimaryContext] = {}

    def open(self, handle: bytes, device: int) -> CudaMemory:
        """The memory that `handle`, of `HANDLE_BYTES` bytes, stands for, on GPU `device`.

        Blocks, the first time until the device's context is created. May be called on any thread. Raises DeviceError
        with the driver's reason.
        """
        if len(handle) != HANDLE_BYTES:
            raise DeviceError(f"expected a handle of {HANDLE_BYTES} bytes, got {len(handle)}")
        driver = load_driver(self._load)
        # Two threads may retain it twice, which is harmless: it isn't released anyway.
        context = self._contexts.get(device) or self._contexts.setdefault(device, PrimaryContext(driver, device))
        address, base, size = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_size_t()
        with context.current():
            code = driver.cuIpcOpenMemHandle_v2(
                ctypes.byref(address), _Handle.from_buffer_copy(handle), ctypes.c_uint(_LAZY_ENABLE_PEER_ACCESS)
            )
            check(driver, "cuIpcOpenMemHandle", code)
            code = driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), address)
            if code:
                driver.cuIpcCloseMemHandle(address)
            check(driver, "cuMemGetAddressRange", code)
        return CudaMemory(driver, context, address.value, base.value + size.value - address.value)


def _close(driver: Any, context: PrimaryContext, address: int) -> None:
    """Errors are ignored: the memory's owner may be gone already."""
    try:
        with context.current():
            driver.cuIpcCloseMemHandle(ctypes.c_uint64(address))
    except DeviceError:
        pass
