"""Is there a GPU? Asked of the CUDA driver itself, which every machine with a usable GPU has.

Lives here: two calls into libcuda through ctypes. Must not: a runtime; whether one can use the GPU is its backend's
question.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from backends.errors import LoadError

__all__ = ["LIBRARY", "count_gpus", "failure_text"]

LIBRARY = "libcuda.so.1"
_NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


def count_gpus(load: Callable[[str], Any] = ctypes.CDLL) -> int:
    """How many GPUs this process may use; at least one, or LoadError saying what is missing.

    CUDA_VISIBLE_DEVICES counts. Initialises the driver, which the first time takes up to a second. `load` opens a
    shared library by name.
    """
    try:
        driver = load(LIBRARY)
    except OSError as error:
        raise LoadError(f"no NVIDIA driver: {LIBRARY} can't be loaded ({error})") from error
    _check(driver, "cuInit", driver.cuInit(0))
    count = ctypes.c_int(0)
    _check(driver, "cuDeviceGetCount", driver.cuDeviceGetCount(ctypes.byref(count)))
    if count.value < 1:
        raise LoadError("the NVIDIA driver is there, but shows no GPU to this process")
    return count.value


def _check(driver: Any, call: str, code: int) -> None:
    if code == _NO_DEVICE:
        raise LoadError("the NVIDIA driver is there, but shows no GPU to this process")
    if code != 0:
        raise LoadError(failure_text(driver, call, code))


def failure_text(driver: Any, call: str, code: int) -> str:
    """What to say of a call that returned `code`."""
    text = ctypes.c_char_p()
    driver.cuGetErrorName(code, ctypes.byref(text))
    name = (text.value or b"unknown error").decode()
    return f"the NVIDIA driver failed: {call} returned {code} ({name})"
