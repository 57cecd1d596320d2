"""Blocks of a device's memory: used again by size, freed only when memory lacks or the pool is closed."""

from __future__ import annotations

import weakref
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from paceline.backends.base import DeviceTensor
from paceline.backends.device_blocks import Block, BlockPool
from paceline.backends.errors import DeviceError, DeviceLost, InstanceError, OutOfMemory
from tests.host_accelerator import HostAccelerator

FULL = "the NVIDIA driver failed: cuMemAlloc_v2 returned 2 (CUDA_ERROR_OUT_OF_MEMORY)"
GONE = "the NVIDIA driver failed: cuMemAlloc_v2 returned 719 (CUDA_ERROR_LAUNCH_FAILED)"


class Device(HostAccelerator):
    """A device whose memory is `made`, as long as it exists, and which refuses allocations of more than `most` bytes in
    all with `error`."""

    def __init__(self, most: int = 2**30, error: str = FULL) -> None:
        super().__init__()
        self.most, self.error = most, error
        self.made: weakref.WeakSet[Any] = weakref.WeakSet()

    def device_memory(self, size_bytes: int) -> Any:
        if sum(one.size_bytes for one in self.made) + size_bytes > self.most:
            raise DeviceError(self.error)
        memory = super().host_memory(size_bytes)
        self.made.add(memory)
        return memory


def test_blocks_in_use_never_overlap() -> None:
    pool = BlockPool(Device())  # type: ignore[arg-type]
    blocks = sorted([pool.lease(size) for size in [1, 255, 256, 257, 5000] * 50], key=lambda one: one.address)
    assert all(one.address + one.size_bytes <= two.address for one, two in pairwise(blocks))


def test_block_is_used_again_for_its_size() -> None:
    device = Device()
    pool = BlockPool(device)  # type: ignore[arg-type]
    first = pool.lease(1000)
    address = first.address
    assert (first.size_bytes, first.gpu, first.is_lost) == (1024, 0, False)
    del first
    assert pool.lease(1020).address == address
    assert device.allocations == 1
    pool.lease(10)
    assert device.allocations == 2


def test_lack_of_memory_frees_what_nobody_holds() -> None:
    device = Device(most=2**21)
    pool = BlockPool(device)  # type: ignore[arg-type]
    pool.lease(2**18)
    assert pool.lease(2**21).size_bytes == 2**21
    assert [one.size_bytes for one in device.made] == [2**21]


def test_lack_of_memory_beside_blocks_in_use_is_told() -> None:
    pool = BlockPool(Device(most=2**21))  # type: ignore[arg-type]
    held = [pool.lease(2**20)]
    with pytest.raises(OutOfMemory, match="OUT_OF_MEMORY"):
        pool.lease(2**21)
    held.append(pool.lease(2**20))
    assert not pool.is_lost


def test_closed_pool_leaves_blocks_to_their_holders() -> None:
    device = Device()
    pool = BlockPool(device)  # type: ignore[arg-type]
    held: list[Block] = [pool.lease(100), pool.lease(100), pool.lease(2**20)]
    pool.close()
    assert len(device.made) == 2
    held.clear()
    assert not device.made


def test_what_was_on_a_lost_device_is_not_read() -> None:
    pool = BlockPool(Device(most=2**20, error=GONE))  # type: ignore[arg-type]
    block = pool.lease(2**20)
    tensor = DeviceTensor(block, block.address, np.dtype(np.float32), (2, 3))
    assert block.read(tensor).shape == (2, 3)
    with pytest.raises(DeviceLost):
        pool.lease(2**20)
    assert block.is_lost
    with pytest.raises(InstanceError, match="GPU 0 was lost"):
        block.read(tensor)
