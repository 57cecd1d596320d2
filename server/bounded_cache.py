"""A cache that can't outgrow its bounds.

Lives here: the bounds, and what happens at them. Must not: know what is cached.
"""

from __future__ import annotations

from typing import TypeVar

K = TypeVar("K")
T = TypeVar("T")

_MAX_ENTRIES = 1_000
_MAX_BYTES = 2**20
"""Callers choose what is cached, and an entry may take a hundred times the bytes that it is counted as."""


class BoundedCache(dict[K, T]):
    """A dict that empties itself before it would have too many entries, or entries of too many bytes."""

    def __init__(self) -> None:
        super().__init__()
        self._size_bytes = 0

    def remember(self, key: K, value: T, size_bytes: int = 0) -> None:
        """Have `get` return `value` for `key` from now on, until the cache is full. `size_bytes` counts towards the
        bound on bytes."""
        if len(self) >= _MAX_ENTRIES or self._size_bytes + size_bytes > _MAX_BYTES:
            self.clear()
            self._size_bytes = 0
        self._size_bytes += size_bytes
        self[key] = value
