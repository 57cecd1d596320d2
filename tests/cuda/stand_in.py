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
