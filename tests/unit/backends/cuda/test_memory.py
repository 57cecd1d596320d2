"""Memory on a GPU that another process has exported: opening it by its handle, and closing it."""

from __future__ import annotations

import ctypes
import re
from typing import Any

import numpy as np
import pytest

from paceline.backends.cuda.memory import CudaMemories, CudaMemory
from paceline.backends.errors import DeviceError
from tests.unit.backends.cuda.fake_driver import HANDLE, Driver


def read(memory: CudaMemory, size: int, offset: int = 0) -> bytes:
    target = np.empty(size, np.uint8)
    memory.read(target.ctypes.data, size, offset)
    return target.tobytes()


def test_opened_memory_is_read_and_written_in_the_primary_context_which_is_popped_again() -> None:
    driver = Driver(begin=10)
    memory = CudaMemories(driver.load).open(HANDLE, 0)
    assert memory.byte_size == 90
    sent = np.arange(5, dtype=np.uint8)
    memory.write(sent.ctypes.data, 5, 20)
    assert driver.memory.raw[30:35] == sent.tobytes()
    assert read(memory, 5, 20) == sent.tobytes()
    assert driver.current == []


def test_dropped_memory_is_closed_and_its_context_stays_for_the_next() -> None:
    driver = Driver()
    memories = CudaMemories(driver.load)
    memory = memories.open(HANDLE, 0)
    assert (driver.opened, driver.contexts) == (1, 1)
    del memory
    assert (driver.opened, driver.contexts, driver.current) == (0, 1, [])
    kept = [memories.open(HANDLE, 0) for _ in range(2)]
    assert (driver.opened, driver.contexts) == (len(kept), 1)


def test_dropped_memory_raises_nothing_when_the_driver_fails() -> None:
    driver = Driver()
    memory = CudaMemories(driver.load).open(HANDLE, 0)
    driver.codes["push"] = 700
    del memory
    assert driver.current == []


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
        CudaMemories(driver.load).open(HANDLE, 0)
    assert (driver.opened, driver.current) == (0, [])


def test_open_on_a_missing_gpu_is_an_error() -> None:
    with pytest.raises(DeviceError, match="cuDeviceGet returned 101"):
        CudaMemories(Driver().load).open(HANDLE, 3)


@pytest.mark.parametrize("size", [0, 63, 65])
def test_open_handle_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(DeviceError, match=f"expected a handle of 64 bytes, got {size}"):
        CudaMemories(Driver().load).open(b"x" * size, 0)


def test_open_without_a_driver_is_an_error() -> None:
    def load(name: str) -> Any:
        return ctypes.CDLL("libno-such-library.so.9")

    with pytest.raises(DeviceError, match=r"the NVIDIA driver failed: libcuda.so.1 can't be loaded"):
        CudaMemories(load).open(HANDLE, 0)


def test_failed_copies_are_errors_and_leave_no_context_current() -> None:
    driver = Driver()
    memory = CudaMemories(driver.load).open(HANDLE, 0)
    driver.codes["copy"] = 700
    with pytest.raises(DeviceError, match="cuMemcpyDtoH returned 700"):
        read(memory, 1)
    with pytest.raises(DeviceError, match="cuMemcpyHtoD returned 700"):
        memory.write(driver.base, 1, 0)
    driver.codes = {"wait": 700}
    with pytest.raises(DeviceError, match="cuStreamSynchronize returned 700"):
        memory.write(driver.base, 1, 0)
    assert driver.current == []
