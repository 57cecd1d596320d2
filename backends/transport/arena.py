"""Places in a region of fixed size: which are taken, and where the next one goes.

Lives here: pure bookkeeping with integers. Must not: memory. The rule: places never overlap, and adjacent free ranges
are merged.

First fit, so that what is used stays at the low end: those pages are backed and in caches, and the rest can be given
back to the system.
"""

from __future__ import annotations

from bisect import bisect_left

__all__ = ["ALIGNMENT", "Arena"]

ALIGNMENT = 64
"""Of every place, in bytes: a cache line, and the most that any vector instruction needs."""


class Arena:
    """Places in a region of `size_bytes`, all of it free at first."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes // ALIGNMENT * ALIGNMENT
        # Free ranges: their starts, in order, and the size of each in bytes.
        self._starts = [0] if self._size_bytes else []
        self._free = {0: self._size_bytes} if self._size_bytes else {}
        self._taken: dict[int, int] = {}
        self.used_bytes = 0

    @property
    def size_bytes(self) -> int:
        """The whole region, in full units of `ALIGNMENT`."""
        return self._size_bytes

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
