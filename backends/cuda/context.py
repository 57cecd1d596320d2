"""A process's CUDA context for a GPU, through the driver.

Lives here: loading the driver, the primary context of a device, and the result codes of its calls. Must not: memory,
streams, a runtime. The rule: everything in the process uses the primary context, as ONNX Runtime does, so that memory
and streams are interchangeable.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from paceline.backends.cuda.driver import LIBRARY, failure_text
from paceline.backends.errors import DeviceError

__all__ = ["PrimaryContext", "check", "ignore_captures", "load_driver"]

_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL

_threads = threading.local()


def load_driver(load: Callable[[str], Any] = ctypes.CDLL) -> Any:
    """The initialised driver; `load` opens a shared library by name. Raises DeviceError with the driver's reason."""
    try:
        driver = load(LIBRARY)
    except OSError as error:
        raise DeviceError(f"no NVIDIA driver: {LIBRARY} can't be loaded ({error})") from error
    check(driver, "cuInit", driver.cuInit(0))
    return driver


def check(driver: Any, call: str, code: int) -> None:
    """Raise DeviceError unless `call` succeeded."""
    if code != 0:
        raise DeviceError(failure_text(driver, call, code))


def ignore_captures(driver: Any) -> None:
    """Allow the calling thread, which must have a current context, all calls while other threads capture graphs. In the
    mode in which ONNX Runtime captures, allocations anywhere in the process would otherwise fail, and the capture with
    them."""
    if getattr(_threads, "ignoring", False):
        return
    mode = ctypes.c_int(_THREAD_LOCAL)
    check(driver, "cuThreadExchangeStreamCaptureMode", driver.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)))
    _threads.ignoring = True


class PrimaryContext:
    """The primary context of one device, retained until `release`; `handle` is the driver's. Raises DeviceError."""

    def __init__(self, driver: Any, device: int) -> None:
        self._driver = driver
        number = ctypes.c_int()
        check(driver, "cuDeviceGet", driver.cuDeviceGet(ctypes.byref(number), device))
        handle = ctypes.c_void_p()
        check(driver, "cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain(ctypes.byref(handle), number))
        self._number, self.handle = number, handle

    @contextmanager
    def current(self) -> Iterator[None]:
        """Make it current on this thread within the block, and restore the previous one afterwards."""
        check(self._driver, "cuCtxPushCurrent", self._driver.cuCtxPushCurrent_v2(self.handle))
        try:
            ignore_captures(self._driver)
            yield
        finally:
            self._driver.cuCtxPopCurrent_v2(ctypes.byref(ctypes.c_void_p()))

    def release(self) -> None:
        self._driver.cuDevicePrimaryCtxRelease_v2(self._number)
