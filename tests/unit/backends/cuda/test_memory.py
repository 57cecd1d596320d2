"""The driver is a fake object with its C functions, over host memory; it counts what is open."""

from __future__ import annotations

import ctypes
import re
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from backends.cuda.memory import HANDLE_BYTES, CudaMemory, open_cuda_memory
from backends.errors import DeviceError

HANDLE = bytes(range(HANDLE_BYTES))


@dataclass
class Driver:
    """One GPU with one allocation of `size` bytes, which `HANDLE` opens at `begin` bytes into it. `codes` are what
    calls return instead of 0."""

    size: int = 100
    begin: int = 0
    codes: dict[str, int] = field(default_factory=dict)
    contexts: int = 0
    opened: int = 0
    current: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.memory = ctypes.create_string_buffer(self.size)
        self.base = ctypes.addressof(self.memory)

    def load(self, name: str) -> Driver:
        assert name == "libcuda.so.1"
        return self

    def cuInit(self, flags: int) -> int:
        return self.codes.get("cuInit", 0)

    def cuGetErrorName(self, code: int, name: Any) -> int:
        name._obj.value = b"CUDA_ERROR_OF_SOME_KIND"
        return 0

    def cuDeviceGet(self, device: Any, ordinal: int) -> int:
        device._obj.value = 40 + ordinal
        return 0 if ordinal == 0 else 101

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        assert device.value == 40
        context._obj.value = 7
        self.contexts += not self.codes.get("retain", 0)
        return self.codes.get("retain", 0)

    def cuDevicePrimaryCtxRelease_v2(self, device: Any) -> int:
        assert device.value == 40
        self.contexts -= 1
        return 0

    def cuCtxPushCurrent_v2(self, context: Any) -> int:
        if self.codes.get("push"):
            return self.codes["push"]
        self.current.append(context.value)
        return 0

    def cuCtxPopCurrent_v2(self, context: Any) -> int:
        self.current.pop()
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        assert (self.current, mode._obj.value) == ([7], 1)
        return 0

    def cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, flags: Any) -> int:
        assert (self.current, flags.value, bytes(handle)) == ([7], 1, HANDLE)
        address._obj.value = self.base + self.begin
        self.opened += not self.codes.get("open", 0)
        return self.codes.get("open", 0)

    def cuMemGetAddressRange_v2(self, base: Any, size: Any, address: Any) -> int:
        assert self.current == [7]
        base._obj.value, size._obj.value = self.base, self.size
        return self.codes.get("range", 0)

    def cuIpcCloseMemHandle(self, address: Any) -> int:
        assert (self.current, address.value) == ([7], self.base + self.begin)
        self.opened -= 1
        return 0

    def cuMemcpyDtoH_v2(self, target: Any, source: Any, size: Any) -> int:
        assert self.current == [7]
        ctypes.memmove(target, source.value, size.value)
        return self.codes.get("copy", 0)

    def cuMemcpyHtoD_v2(self, target: Any, source: Any, size: Any) -> int:
        assert self.current == [7]
        ctypes.memmove(target.value, source, size.value)
        return self.codes.get("copy", 0)

    def cuStreamSynchronize(self, stream: Any) -> int:
        assert (self.current, stream) == ([7], None)
        return self.codes.get("wait", 0)


def read(memory: CudaMemory, size: int, offset: int = 0) -> bytes:
    target = np.empty(size, np.uint8)
    memory.read(target.ctypes.data, size, offset)
    return target.tobytes()


def test_opened_memory_is_read_and_written_in_the_primary_context_which_is_popped_again() -> None:
    driver = Driver(begin=10)
    memory = open_cuda_memory(HANDLE, 0, driver.load)
    assert memory.byte_size == 90
    sent = np.arange(5, dtype=np.uint8)
    memory.write(sent.ctypes.data, 5, 20)
    assert driver.memory.raw[30:35] == sent.tobytes()
    assert read(memory, 5, 20) == sent.tobytes()
    assert driver.current == []


def test_dropped_memory_is_closed_and_its_context_released() -> None:
    driver = Driver()
    memory = open_cuda_memory(HANDLE, 0, driver.load)
    assert (driver.opened, driver.contexts) == (1, 1)
    del memory
    assert (driver.opened, driver.contexts, driver.current) == (0, 0, [])


def test_dropped_memory_raises_nothing_when_the_driver_fails() -> None:
    driver = Driver()
    memory = open_cuda_memory(HANDLE, 0, driver.load)
    driver.codes["push"] = 700
    del memory
    assert driver.contexts == 0


@pytest.mark.parametrize(
    ("call", "code", "text"),
    [
        ("cuInit", 803, "cuInit returned 803 (CUDA_ERROR_OF_SOME_KIND)"),
        ("retain", 2, "cuDevicePrimaryCtxRetain returned 2"),
        ("push", 4, "cuCtxPushCurrent returned 4"),
        ("open", 201, "cuIpcOpenMemHandle returned 201"),
        ("range", 1, "cuMemGetAddressRange returned 1"),
    ],
)
def test_open_refused_by_the_driver_says_why_and_leaves_nothing_open(call: str, code: int, text: str) -> None:
    driver = Driver(codes={call: code})
    with pytest.raises(DeviceError, match=re.escape(f"the NVIDIA driver failed: {text}")):
        open_cuda_memory(HANDLE, 0, driver.load)
    assert (driver.opened, driver.contexts, driver.current) == (0, 0, [])


def test_open_on_a_missing_gpu_is_an_error() -> None:
    with pytest.raises(DeviceError, match="cuDeviceGet returned 101"):
        open_cuda_memory(HANDLE, 3, Driver().load)


@pytest.mark.parametrize("size", [0, 63, 65])
def test_open_handle_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(DeviceError, match=f"expected a handle of 64 bytes, got {size}"):
        open_cuda_memory(b"x" * size, 0, Driver().load)


def test_open_without_a_driver_is_an_error() -> None:
    def load(name: str) -> Any:
        return ctypes.CDLL("libno-such-library.so.9")

    with pytest.raises(DeviceError, match=r"no NVIDIA driver: libcuda.so.1 can't be loaded"):
        open_cuda_memory(HANDLE, 0, load)


def test_failed_copies_are_errors_and_leave_no_context_current() -> None:
    driver = Driver()
    memory = open_cuda_memory(HANDLE, 0, driver.load)
    driver.codes["copy"] = 700
    with pytest.raises(DeviceError, match="cuMemcpyDtoH returned 700"):
        read(memory, 1)
    with pytest.raises(DeviceError, match="cuMemcpyHtoD returned 700"):
        memory.write(driver.base, 1, 0)
    driver.codes = {"wait": 700}
    with pytest.raises(DeviceError, match="cuStreamSynchronize returned 700"):
        memory.write(driver.base, 1, 0)
    assert driver.current == []
