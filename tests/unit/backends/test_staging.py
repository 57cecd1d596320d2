"""The pool of memory for outputs, which the slots of an instance share."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from paceline.backends.cuda.accelerator import Buffer, HostMemory
from paceline.backends.staging import OutputPool
from tests.host_accelerator import HostAccelerator

BYTE = np.dtype(np.uint8)


class Size(int):
    """A number of bytes; `on_compare` is called when it is compared with another."""

    on_compare: Callable[[], None]

    def __lt__(self, other: int) -> bool:
        self.on_compare()
        return super().__lt__(other)


class Block:
    """Host memory. `on_look` is called when its size is read."""

    def __init__(self, size_bytes: int, on_look: Callable[[], None]) -> None:
        self._memory = HostAccelerator().host_memory(size_bytes)
        self.address, self.buffer = self._memory.address, self._memory.buffer
        self._on_look = on_look

    address: int
    buffer: Buffer

    @property
    def size_bytes(self) -> int:
        self._on_look()
        return self._memory.size_bytes


def test_lease_is_large_enough_while_a_smaller_one_grows() -> None:
    has_read, has_grown, other_is_done = (threading.Event() for _ in range(3))

    def on_look() -> None:
        """The larger lease has grown the pool, and finds that the free memory is too small."""
        if has_read.is_set():
            has_grown.set()
            assert other_is_done.wait(30)

    def allocate(size_bytes: int) -> HostMemory:
        return Block(size_bytes, on_look)

    def on_compare() -> None:
        """The smaller lease has read how large the pool is."""
        has_read.set()
        assert has_grown.wait(30)

    def lease_smaller() -> None:
        size = Size(500)
        size.on_compare = on_compare
        pool._taken(size)
        other_is_done.set()

    pool = OutputPool(allocate)
    pool.lease(BYTE, (1,))
    smaller = threading.Thread(target=lease_smaller, daemon=True)
    smaller.start()
    assert has_read.wait(30)
    array, _ = pool.lease(BYTE, (4000,))
    assert array.nbytes == 4000
    smaller.join(30)
