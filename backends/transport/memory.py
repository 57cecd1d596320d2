"""Memory that two processes share: one owns it and writes, the other reads.

Lives here: the region, mapped. Must not: messages. The rule: only the owner allocates and frees; the reader's arrays
keep a place taken, and the last of them to go reports it.

The region has no name, so that nothing is left behind however the processes end. It is backed by memory only where it
was written, and what is free again beyond `_KEPT_BYTES` is given back to the system, so its size is a bound, not a
cost.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.backends.transport.arena import Arena

__all__ = ["SharedRegion", "Window", "new_region"]

_KEPT_BYTES = 64 * 2**20
"""Giving pages back and getting new ones costs about as much as writing them."""

_UINT8 = np.dtype(np.uint8)


def new_region(size_bytes: int) -> int:
    """The descriptor of a new region of `size_bytes`, rounded up to whole pages. Raises OSError."""
    descriptor = _nameless_file()
    try:
        os.ftruncate(descriptor, -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class SharedRegion:
    """The owner's side of a region, with nothing taken yet."""

    def __init__(self, descriptor: int) -> None:
        """Takes `descriptor` over, and closes it."""
        self._map = _mapped(descriptor, mmap.ACCESS_WRITE)
        self._arena = Arena(len(self._map))

    @property
    def size_bytes(self) -> int:
        return self._arena.size_bytes

    @property
    def used_bytes(self) -> int:
        """What is allocated, with each place rounded up."""
        return self._arena.used_bytes

    def allocate(self, size_bytes: int) -> int | None:
        """The start of a place; None if there is no room."""
        return self._arena.allocate(size_bytes)

    def array(self, start: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        """An array at `start` to write to; it must lie in an allocated place."""
        return np.ndarray(shape, dtype, self._map, start)

    def free(self, start: int) -> None:
        """Free a place. KeyError if it isn't taken."""
        high = start + self._arena.size_of(start) > _KEPT_BYTES
        begin, end = self._arena.free(start)
        if high:
            # Whole free pages, including those that neighbours freed earlier had a part of.
            begin = max(_KEPT_BYTES, -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE)
            end = end // mmap.PAGESIZE * mmap.PAGESIZE
            _give_back(self._map, begin, end)


class Window:
    """The reader's side of a region. `gone` gets start and size of each place whose last array was dropped, on
    whichever thread that happens."""

    def __init__(self, descriptor: int, gone: Callable[[int, int], None]) -> None:
        """Takes `descriptor` over, and closes it."""
        self._map = _mapped(descriptor, mmap.ACCESS_READ)
        self._gone = gone

    # hot path: 0.5 us
    def place(self, start: int, size_bytes: int) -> NDArray[np.uint8]:
        """The bytes at `start`, read-only. Make arrays with it as their buffer, not by slicing it."""
        place = _Place((size_bytes,), _UINT8, self._map, start)
        place._start, place._gone = start, self._gone
        return place

    def forget(self) -> None:
        """Stop reporting, and drop the reference to `gone`."""
        self._gone = _ignore


class _Place(np.ndarray[Any, np.dtype[np.uint8]]):
    """Bytes in a window. Arrays made from its buffer have it as their base, and views of those have them as theirs:
    numpy shortens a chain of bases only between arrays of one class."""

    __slots__ = ("_gone", "_start")
    _start: int
    _gone: Callable[[int, int], None]

    def __del__(self) -> None:
        self._gone(self._start, self.size)


def _ignore(start: int, size_bytes: int) -> None:
    pass


def _mapped(descriptor: int, access: int) -> mmap.mmap:
    try:
        return mmap.mmap(descriptor, os.fstat(descriptor).st_size, access=access)
    finally:
        os.close(descriptor)


def _nameless_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("paceline-tensors")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _give_back(region: mmap.mmap, begin: int, end: int) -> None:
    """Unlike MADV_DONTNEED, MADV_REMOVE frees shared pages. Only Linux has it."""
    if begin < end and hasattr(mmap, "MADV_REMOVE"):
        region.madvise(mmap.MADV_REMOVE, begin, end - begin)
