"""Whether there are GPUs, according to the CUDA driver, which every machine with a usable GPU has.

Lives here: a few calls into libcuda through ctypes. Must not: a runtime; whether a runtime can use the GPU is for its
backend to find out.
"""

from __future__ import annotations

import ctypes
import uuid
from collections.abc import Callable
from typing import Any

from paceline.backends.errors import DriverFailed, LoadError, NoDriver

__all__ = ["LIBRARY", "count_gpus", "failure_text", "gpu_uuids"]

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
