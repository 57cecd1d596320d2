"""Memory that two processes share: one owns it and writes, the other reads.

Lives here: the region, mapped, and the places in it. Must not: messages. The rules: only the owner allocates and frees;
places never overlap, and adjacent free ranges are merged; the reader's arrays keep a place taken, and the last of them
to go reports it.

The region has no name, so that nothing is left behind however the processes end. It is backed by memory only where it
was written, and what is free again beyond `_KEPT_BYTES` is given back to the system, so its size is a bound, not a
cost. Places are the first that fit, so that what is used stays at the low end: those pages are backed and in caches.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

ALIGNMENT = 64
"""Of every place, in bytes: a cache line, and the most that any vector instruction needs."""


class Arena:
    """Places in a region of `size_bytes`, all of it free at first."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes // ALIGNMENT * ALIGNMENT
        """The whole region, in full units of `ALIGNMENT`."""
        # Free ranges: their starts, in order, and the size of each in bytes.
        self._starts = [0] if self.size_bytes else []
        self._free = {0: self.size_bytes} if self.size_bytes else {}
        self._taken: dict[int, int] = {}
        self.used_bytes = 0

    # hot path: about 1 us while there are few free ranges
    def allocate(self, size_bytes: int) -> int | None:
        """The start of `size_bytes` bytes (1 or more) that are the caller's until `free`; None if there is no room."""
        size_bytes = -(-size_bytes // ALIGNMENT) * ALIGNMENT
        free = self._free
        for number, start in enumerate(self._starts):
            left = free[start] - size_bytes
            if left < 0:
                continue
            del free[start]
            if left:
                free[start + size_bytes] = left
                self._starts[number] = start + size_bytes
            else:
                del self._starts[number]
            self._taken[start] = size_bytes
            self.used_bytes += size_bytes
            return start
        return None

    def size_of(self, start: int) -> int:
        """The bytes of the place at `start`; KeyError if nothing was allocated there."""
        return self._taken[start]

    # hot path
    def free(self, start: int) -> tuple[int, int]:
        """Free the place at `start`. Returns start and end of the free range that it is now part of.

        KeyError if nothing was allocated there.
        """
        size_bytes = self._taken.pop(start)
        self.used_bytes -= size_bytes
        starts, free = self._starts, self._free
        number, end = bisect_left(starts, start), start + size_bytes
        if end in free:
            size_bytes += free.pop(end)
            del starts[number]
        if number and (before := starts[number - 1]) + free[before] == start:
            free[before] += size_bytes
            return before, before + free[before]
        starts.insert(number, start)
        free[start] = size_bytes
        return start, start + size_bytes


_KEPT_BYTES = 64 * 2**20
"""Giving pages back and getting new ones costs about as much as writing them."""

_UINT8 = np.dtype(np.uint8)


def new_region(size_bytes: int) -> int:
    """The descriptor of a new region of `size_bytes`, rounded up to whole pages. Raises OSError."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("paceline-tensors")
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        os.ftruncate(descriptor, -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


class SharedRegion(Arena):
    """The owner's side of a region, with nothing taken yet."""

    def __init__(self, descriptor: int) -> None:
        """Takes `descriptor` over, and closes it."""
        self._map = _mapped(descriptor, mmap.ACCESS_WRITE)
        super().__init__(len(self._map))

    def array(self, start: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        """An array at `start` to write to; it must lie in an allocated place."""
        return np.ndarray(shape, dtype, self._map, start)

    def free(self, start: int) -> tuple[int, int]:
        high = start + self.size_of(start) > _KEPT_BYTES
        begin, end = free = super().free(start)
        if high:
            # Whole free pages, including those that neighbours freed earlier had a part of.
            begin = max(_KEPT_BYTES, -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE)
            end = end // mmap.PAGESIZE * mmap.PAGESIZE
            # Unlike MADV_DONTNEED, MADV_REMOVE frees shared pages. Only Linux has it.
            if begin < end and hasattr(mmap, "MADV_REMOVE"):
                self._map.madvise(mmap.MADV_REMOVE, begin, end - begin)
        return free


class Window:
    """The reader's side of a region. `gone` gets start and size of each place whose last array was dropped, on
    whichever thread that happens."""

    def __init__(self, descriptor: int) -> None:
        """Takes `descriptor` over, and closes it."""
        self._map = _mapped(descriptor, mmap.ACCESS_READ)
        self.gone: Callable[[int, int], None] = _ignore

    # hot path: 0.5 us
    def place(self, start: int, size_bytes: int) -> NDArray[np.uint8]:
        """The bytes at `start`, read-only. Make arrays with it as their buffer, not by slicing it."""
        place = _Place((size_bytes,), _UINT8, self._map, start)
        place._start, place._gone = start, self.gone
        return place

    def forget(self) -> None:
        """Stop reporting, and drop the reference to `gone`."""
        self.gone = _ignore


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
