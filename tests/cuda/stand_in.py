"""A CUDA driver without a GPU, `driver.c`, so that calls through ctypes are made for real."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from backends.cuda_accelerator import CudaAccelerator
from backends.cuda_context import load_driver

SOURCE = Path(__file__).with_name("driver.c")


@cache
def _library() -> bytes:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler to make the stand-in for the CUDA driver with")
    with TemporaryDirectory() as folder:
        made = Path(folder) / "made.so"
        flags = ["-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread"]
        subprocess.run([compiler, *flags, "-o", str(made), str(SOURCE)], check=True)
        return made.read_bytes()


def build(folder: Path) -> Any:
    """The driver, as a library in `folder` with a state of its own. Skips the test where no compiler is."""
    library = folder / "libcuda-stand-in.so"
    library.write_bytes(_library())
    return ctypes.CDLL(str(library))


def accelerator(folder: Path, driver: Any = None) -> CudaAccelerator:
    """GPU 0 of `driver`, a new one by default, with which ONNX Runtime's CPU provider computes: memory is memory."""
    made = driver or build(folder)
    return CudaAccelerator(load_driver(lambda name: made), 0, ("cpu", 0), "Cpu")


class ClientMemory:
    """Memory of a client on GPU 0 of `driver`, zeros at first, until `free`."""

    def __init__(self, driver: Any, size: int) -> None:
        self._driver, self._accelerator = driver, CudaAccelerator(driver, 0)
        self.size = size
        self._accelerator.enter()
        address = ctypes.c_uint64()
        assert driver.cuMemAlloc_v2(ctypes.byref(address), size) == 0
        self.address = address.value
        self.put(bytes(size))

    @property
    def handle(self) -> bytes:
        """What a client would register."""
        made = (ctypes.c_ubyte * 64)()
        self._accelerator.enter()
        assert self._driver.cuIpcGetMemHandle(ctypes.byref(made), ctypes.c_uint64(self.address)) == 0
        return bytes(made)

    def put(self, data: bytes, offset: int = 0) -> None:
        self._accelerator.enter()
        target, size = ctypes.c_uint64(self.address + offset), ctypes.c_size_t(len(data))
        assert self._driver.cuMemcpyHtoD_v2(target, data, size) == 0
        assert self._driver.cuStreamSynchronize(None) == 0

    def get(self, size: int, offset: int = 0) -> bytes:
        """What is there now. A client is another process, and waits for nothing that the server does."""
        return ctypes.string_at(self.address + offset, size)

    def free(self) -> None:
        self._accelerator.enter()
        assert self._driver.cuMemFree_v2(ctypes.c_uint64(self.address)) == 0
