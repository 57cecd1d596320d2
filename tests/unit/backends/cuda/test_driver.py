"""The driver is a fake object with its C functions, which return what its manual says they may."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass
from typing import Any

import pytest

from paceline.backends.cuda.driver import count_gpus, gpu_uuids
from paceline.backends.errors import DriverFailed, LoadError, NoDriver


@dataclass
class Driver:
    gpus: int = 0
    init_code: int = 0
    count_code: int = 0
    names: bool = True
    uuid_code: int = 0

    def cuInit(self, flags: int) -> int:
        return self.init_code

    def cuDeviceGetCount(self, count: Any) -> int:
        count._obj.value = self.gpus
        return self.count_code

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = 40 + index
        return 0

    def cuDeviceGetUuid(self, raw: Any, device: Any) -> int:
        raw[0], raw[15] = device.value, 255
        return self.uuid_code

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
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pass
    else:
        pytest.skip("there is a driver here")
    with pytest.raises(NoDriver, match=r"no NVIDIA driver: libcuda.so.1 can't be loaded \(libcuda.so.1: "):
        count_gpus()


def test_count_gpus_library_that_lacks_another_is_a_failure() -> None:
    def load(name: str) -> Any:
        return ctypes.CDLL("libno-such-library.so.9")

    with pytest.raises(DriverFailed, match=r"libcuda.so.1 can't be loaded \(libno-such-library.so.9: "):
        count_gpus(load)


@pytest.mark.parametrize(
    ("driver", "message"),
    [
        (Driver(init_code=100), "the NVIDIA driver is installed, but this process sees no GPU"),
        (Driver(gpus=0), "the NVIDIA driver is installed, but this process sees no GPU"),
        (Driver(init_code=803), "the NVIDIA driver failed: cuInit returned 803 (CUDA_ERROR_OF_SOME_KIND)"),
        (Driver(count_code=3), "the NVIDIA driver failed: cuDeviceGetCount returned 3 (CUDA_ERROR_OF_SOME_KIND)"),
        (Driver(init_code=999, names=False), "the NVIDIA driver failed: cuInit returned 999 (unknown error)"),
    ],
)
def test_count_gpus_driver_without_usable_gpu_says_why(driver: Driver, message: str) -> None:
    with pytest.raises(LoadError, match=re.escape(message)) as caught:
        count_gpus(lambda name: driver)
    assert isinstance(caught.value, DriverFailed) == ("failed" in message)


def test_gpu_uuids_are_nvidias_names_in_the_order_of_indices() -> None:
    assert gpu_uuids(lambda name: Driver(gpus=2)) == [
        "GPU-28000000-0000-0000-0000-0000000000ff",
        "GPU-29000000-0000-0000-0000-0000000000ff",
    ]


def test_gpu_uuids_come_from_the_newer_function_of_drivers_since_cuda_11_4() -> None:
    class Later(Driver):
        def cuDeviceGetUuid_v2(self, raw: Any, device: Any) -> int:
            raw[0] = 1
            return 0

    assert gpu_uuids(lambda name: Later(gpus=1)) == ["GPU-01000000-0000-0000-0000-000000000000"]


def test_gpu_uuids_failure_says_why() -> None:
    with pytest.raises(LoadError, match="cuDeviceGetUuid returned 101"):
        gpu_uuids(lambda name: Driver(gpus=1, uuid_code=101))
    with pytest.raises(LoadError, match="sees no GPU"):
        gpu_uuids(lambda name: Driver(gpus=0))
