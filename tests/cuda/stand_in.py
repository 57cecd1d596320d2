"""A stand-in for a GPU: the libraries that ONNX Runtime's CUDA provider loads, made from the C files beside this one.

`build` makes the driver alone, to be called within this process; `libraries` makes all of them, for a process that
finds them on its `LD_LIBRARY_PATH`: there the real provider opens sessions, copies, computes and captures graphs. Such
a GPU can't show a real one's speed, or what NVIDIA's libraries do inside.
"""

from __future__ import annotations

import ctypes
import functools
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from paceline.backends.cuda.accelerator import CudaAccelerator
from paceline.backends.cuda.driver import load_driver

SOURCES = Path(__file__).parent
_DRIVER = "libcuda.so.1"
_LIBRARIES: Mapping[str, Sequence[str]] = {
    _DRIVER: ("device.c", "driver.c"),
    "libcudart.so.13": ("runtime.c", "kernels.c"),
    "libcudart.so.12": ("runtime.c", "kernels.c"),  # for perf_analyzer
    "libcublas.so.13": ("cublas.c",),
    "libcublasLt.so.13": ("cublaslt.c",),
    "libcurand.so.10": (),
    "libcudnn.so.9": ("cudnn.c", "cudnn_graph.c"),
    "libnvidia-ml.so.1": ("nvml.c",),
}
_NEEDS = {name: (_DRIVER,) for name in _LIBRARIES if name != _DRIVER}
for _name in ("libcublas.so.13", "libcudnn.so.9"):
    _NEEDS[_name] = (_DRIVER, "libcudart.so.13")
_FLAGS = ("-O3", "-Wall", "-Werror", "-shared", "-fPIC", "-fvisibility=hidden", "-pthread")


def compiler() -> str:
    found = shutil.which("cc") or shutil.which("gcc")
    if found is None:
        pytest.skip("no C compiler to make the stand-in for a GPU with")
    return found


def _make(folder: Path, name: str, sources: Sequence[str]) -> None:
    """Make `folder`/`name`. Its symbols have the version that the provider links to: the library's name."""
    files = [str(SOURCES / source) for source in sources] or ["-x", "c", "/dev/null"]
    linked = [f"-Wl,-soname,{name}", "-Wl,--default-symver", "-Wl,-rpath,$ORIGIN", "-L", str(folder)]
    command = [
        compiler(),
        *_FLAGS,
        "-o",
        str(folder / name),
        *files,
        *linked,
        *(f"-l:{one}" for one in _NEEDS.get(name, ())),
    ]
    subprocess.run(command, check=True)


@functools.cache
def _driver() -> bytes:
    with TemporaryDirectory() as folder:
        # Not by the driver's name: a later load of that name would get this one.
        _make(Path(folder), "libcuda-stand-in.so", _LIBRARIES[_DRIVER])
        return (Path(folder) / "libcuda-stand-in.so").read_bytes()


@functools.cache
def _libraries() -> Mapping[str, bytes]:
    """All libraries by name. Compiling them takes seconds, and several test modules need them."""
    with TemporaryDirectory() as folder:
        for name, sources in _LIBRARIES.items():
            _make(Path(folder), name, sources)
        return {name: (Path(folder) / name).read_bytes() for name in _LIBRARIES}


def libraries(folder: Path) -> Path:
    """`folder` with all of the libraries. Skips the test if there is no compiler."""
    for name, library in _libraries().items():
        (folder / name).write_bytes(library)
    return folder


def build(folder: Path) -> Any:
    """The driver, as a library in `folder` with its own state. The host sees its memory as well, since ONNX Runtime's
    CPU provider computes. Skips the test if there is no compiler."""
    library = folder / "libcuda-stand-in.so"
    library.write_bytes(_driver())
    driver = ctypes.CDLL(str(library))
    driver.stand_in_show()
    return driver


def accelerator(folder: Path, driver: Any = None) -> CudaAccelerator:
    """GPU 0 of `driver`, a new one by default, in whose memory ONNX Runtime's CPU provider computes."""
    made = driver or build(folder)
    accelerator = CudaAccelerator(load_driver(lambda name: made), 0)
    accelerator.ort_device, accelerator.memory_name = ("cpu", 0), "Cpu"
    return accelerator


class ClientMemory:
    """Memory of a client on GPU 0 of `driver`, until `free`. Zeros at first."""

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
        """The bytes there now. A client is another process, and waits for nothing that the server does."""
        return ctypes.string_at(self.address + offset, size)

    def free(self) -> None:
        self._accelerator.enter()
        assert self._driver.cuMemFree_v2(ctypes.c_uint64(self.address)) == 0
