"""CUDA's driver, which every machine with a usable GPU has: whether there are GPUs, and a process's context for one.

Lives here: loading it, counting, the primary context of a device, and what its result codes mean; those of CUDA's
runtime are the same numbers. Must not: memory, streams, a runtime; whether that can use the GPU is for its backend to
find out. The rule: everything in the process uses the primary context, as ONNX Runtime does, so that memory and streams
are interchangeable.
"""

from __future__ import annotations

import ctypes
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from paceline.backends.errors import DeviceError, DriverFailed, LoadError, NoDriver

# Those after which, says NVIDIA, the process must be terminated and relaunched to use CUDA again: every further call
# fails with the same. ECC and NVLink errors, what kernels did wrong (addresses, instructions, asserts, time), a process
# of the same MPS server that was ended, and another device's error.
BROKEN = frozenset((214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911))
# The device is gone, or gone for this process: the driver was shut down, the device is unavailable, there is none, its
# context is gone, or CUDA has no name for the error, as after a reset.
GONE = frozenset((3, 4, 46, 100, 101, 201, 709, 999))

_CODE = re.compile(r"returned (\d+) \(")


def code_of(error: DeviceError) -> int | None:
    """The driver's code in `error`; None if it is none of its calls that failed."""
    found = _CODE.search(str(error))
    return int(found[1]) if found else None


LIBRARY = "libcuda.so.1"
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


def count_gpus(load: Callable[[str], Any] = ctypes.CDLL) -> int:
    """The number of GPUs that this process may use, at least one; otherwise LoadError saying what is missing: the
    driver (NoDriver), one that works (DriverFailed), or a GPU.

    CUDA_VISIBLE_DEVICES counts. Initialises the driver, which takes up to a second the first time. `load` opens a
    shared library by name.
    """
    return _count(_open(load))


def gpu_uuids(load: Callable[[str], Any] = ctypes.CDLL) -> list[str]:
    """The UUIDs, such as `GPU-8f2b…`, of the GPUs that `count_gpus` counts, in the order of their indices. Raises as
    there."""
    driver = _open(load)
    names = []
    for index in range(_count(driver)):
        device, raw = ctypes.c_int(0), (ctypes.c_ubyte * 16)()
        _check(driver, "cuDeviceGet", driver.cuDeviceGet(ctypes.byref(device), index))
        # The second version distinguishes a slice of a GPU (MIG) from the whole; drivers before CUDA 11.4 have only the
        # first.
        ask = getattr(driver, "cuDeviceGetUuid_v2", None) or driver.cuDeviceGetUuid
        _check(driver, "cuDeviceGetUuid", ask(raw, device))
        names.append(f"GPU-{uuid.UUID(bytes=bytes(raw))}")
    return names


def _open(load: Callable[[str], Any]) -> Any:
    try:
        driver = load(LIBRARY)
    except OSError as error:
        # A driver that is there names another library, or another reason.
        if str(error).startswith(f"{LIBRARY}: cannot open shared object file: No such file"):
            raise NoDriver(f"no NVIDIA driver: {LIBRARY} can't be loaded ({error})") from error
        raise DriverFailed(f"the NVIDIA driver failed: {LIBRARY} can't be loaded ({error})") from error
    _check(driver, "cuInit", driver.cuInit(0))
    return driver


def _count(driver: Any) -> int:
    count = ctypes.c_int(0)
    _check(driver, "cuDeviceGetCount", driver.cuDeviceGetCount(ctypes.byref(count)))
    if count.value < 1:
        raise LoadError("the NVIDIA driver is installed, but this process sees no GPU")
    return count.value


def _check(driver: Any, call: str, code: int) -> None:
    if code == _NO_DEVICE:
        raise LoadError("the NVIDIA driver is installed, but this process sees no GPU")
    if code != 0:
        raise DriverFailed(failure_text(driver, call, code))


def failure_text(driver: Any, call: str, code: int) -> str:
    """The error message for a `call` that returned `code`."""
    text = ctypes.c_char_p()
    driver.cuGetErrorName(code, ctypes.byref(text))
    name = (text.value or b"unknown error").decode()
    return f"the NVIDIA driver failed: {call} returned {code} ({name})"


_THREAD_LOCAL = 1  # CU_STREAM_CAPTURE_MODE_THREAD_LOCAL

_threads = threading.local()


def load_driver(load: Callable[[str], Any] = ctypes.CDLL) -> Any:
    """The initialised driver; `load` opens a shared library by name. Raises DeviceError with the driver's reason."""
    try:
        return _open(load)
    except LoadError as error:
        raise DeviceError(str(error)) from error


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
