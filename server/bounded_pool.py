"""Values of several owners within one number of bytes: the one used least recently goes first.

Lives here: the order and the bound, pure. Must not: know what is kept, or how large it is. The rule: `used_bytes` is
the sum of what the values there were counted as, and never above `max_bytes`.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T")

_Key = tuple[Hashable, bytes]


class BoundedPool(Generic[T]):
    """Values by owner and key. `max_bytes` bounds all of them together."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.used_bytes = 0
        # The value used least recently comes first.
        self._values: OrderedDict[_Key, tuple[T, int]] = OrderedDict()
        self._keys_of: defaultdict[Hashable, set[bytes]] = defaultdict(set)

    def __len__(self) -> int:
        return len(self._values)

    # hot path
    def find(self, owner: Hashable, key: bytes) -> T | None:
        """The value, which is now the one used last."""
        there = self._values.get((owner, key))
        if there is None:
            return None
        self._values.move_to_end((owner, key))
        return there[0]

    def keep(self, owner: Hashable, key: bytes, value: T, size_bytes: int) -> None:
        """Have `find` return `value`, in place of others if there is no room. One too large for the whole pool is not
        kept."""
        if size_bytes > self.max_bytes:
            return
        self._drop(owner, key)
        while self.used_bytes + size_bytes > self.max_bytes:
            self._drop(*next(iter(self._values)))
        self._values[owner, key] = value, size_bytes
        self._keys_of[owner].add(key)
        self.used_bytes += size_bytes

    def forget(self, owner: Hashable) -> None:
        """Keep nothing of `owner` any longer."""
        for key in [*self._keys_of.get(owner, ())]:
            self._drop(owner, key)

    def _drop(self, owner: Hashable, key: bytes) -> None:
        there = self._values.pop((owner, key), None)
        if there is None:
            return
        self.used_bytes -= there[1]
        keys = self._keys_of[owner]
        keys.remove(key)
        if not keys:
            del self._keys_of[owner]
