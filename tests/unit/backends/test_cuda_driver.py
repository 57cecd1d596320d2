"""The driver is played by an object with its C functions, which answers what its manual says they may."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from typing import Any

import pytest

from backends.cuda_driver import count_gpus
from backends.errors import LoadError


@dataclass
class Driver:
    gpus: int = 0
    init_code: int = 0
    count_code: int = 0
    names: bool = True

    def cuInit(self, flags: int) -> int:
        return self.init_code

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self.gpus
        return self.count_code

    def cuGetErrorName(self, code: int, name: Any) -> int:
        if self.names:
            name._obj.value = b"CUDA_ERROR_OF_SOME_KIND"
        return 0


def test_count_gpus_driver_with_gpus_returns_their_number() -> None:
    asked: list[str] = []

    def load(name: str) -> Driver:
        asked.append(name)
        return Driver(gpus=2)

    assert count_gpus(load) == 2
    assert asked == ["libcuda.so.1"]


def test_count_gpus_library_missing_says_no_driver() -> None:
    def load(name: str) -> Any:
        return ctypes.CDLL("libno-such-library.so.9")

    with pytest.raises(LoadError, match=r"no NVIDIA driver: libcuda.so.1 can't be loaded \(libno-such-library.so.9: "):
        count_gpus(load)


@pytest.mark.parametrize(
    ("driver", "message"),
    [
        (Driver(init_code=100), "the NVIDIA driver is there, but shows no GPU to this process"),
        (Driver(gpus=0), "the NVIDIA driver is there, but shows no GPU to this process"),
        (Driver(init_code=803), "the NVIDIA driver failed: cuInit returned 803 (CUDA_ERROR_OF_SOME_KIND)"),
        (Driver(count_code=3), "the NVIDIA driver failed: cuDeviceGetCount returned 3 (CUDA_ERROR_OF_SOME_KIND)"),
        (Driver(init_code=999, names=False), "the NVIDIA driver failed: cuInit returned 999 (unknown error)"),
    ],
)
def test_count_gpus_driver_without_usable_gpu_says_why(driver: Driver, message: str) -> None:
    with pytest.raises(LoadError, match=re.escape(message)):
        count_gpus(lambda name: driver)
