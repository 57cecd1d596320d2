"""How much waits, in all and by priority level, and whether there is room for more.

Lives here: the queue's counters and its bounds. Must not: know who waits, or where. The rule: whoever enters or leaves
the queue is counted here, at that moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from operator import attrgetter

from paceline.scheduler.errors import QueueFull
from paceline.scheduler.policy import BatchPolicy
from paceline.scheduler.request import AnyRequest

__all__ = ["SharedQueueLimits", "Waiting"]

_MANY = 1 << 62
_ROWS, _SIZE_BYTES = attrgetter("rows"), attrgetter("size_bytes")


class SharedQueueLimits:
    """What waits in several queues together, and how much may: requests and bytes (0: no limit). For queues of one
    thread."""

    __slots__ = ("max_bytes", "max_requests", "requests", "size_bytes")

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self.max_requests, self.max_bytes = max_requests or _MANY, max_bytes or _MANY
        self.requests = self.size_bytes = 0

    # hot path
    def full(self, requests: int, size_bytes: int) -> QueueFull | None:
        """The limit that `requests` more, of `size_bytes` together, would exceed, as an error to raise; None if there
        is room."""
        if self.requests + requests > self.max_requests:
            return QueueFull(self.max_requests, whose="all models")
        if self.size_bytes + size_bytes > self.max_bytes:
            return QueueFull(self.max_bytes, "bytes", whose="all models")
        return None


class Waiting:
    """Requests, rows and bytes that wait in one queue, which shares `shared_limits` with others. `reserved` are
    requests that have left the queue and may come back: until they no longer may, they take room."""

    __slots__ = (
        "_has_levels",
        "_is_bounded",
        "_max_bytes",
        "_max_rows",
        "_requests_of_level",
        "_reserved_bytes",
        "_reserved_of_level",
        "_reserved_rows",
        "_shared",
        "requests",
        "reserved",
        "rows",
        "size_bytes",
    )

    def __init__(self, policy: BatchPolicy, shared_limits: SharedQueueLimits | None = None) -> None:
        self.requests = self.rows = self.size_bytes = 0
        self.reserved = self._reserved_rows = self._reserved_bytes = 0
        self._reserved_of_level: Counter[int] = Counter()
        self._max_rows, self._max_bytes = policy.limits.max_rows, policy.limits.max_bytes
        self._shared = shared_limits
        self._is_bounded = bool(self._max_rows or self._max_bytes)
        self._has_levels = policy.priority_levels > 0
        self._requests_of_level: Counter[int] = Counter()

    @property
    def levels(self) -> list[int]:
        """The priority levels that have requests waiting."""
        return sorted(self._requests_of_level)

    def requests_of_level(self, level: int) -> int:
        """Requests of a priority level; of level 0, where there are no levels, all of them."""
        return self._requests_of_level[level] if level else self.requests

    def reserved_of_level(self, level: int) -> int:
        """Requests of a priority level that are `reserved`."""
        return self._reserved_of_level[level]

    # hot path
    def full(self, requests: int, rows: int, size_bytes: int, level: int, max_queue_size: int) -> QueueFull | None:
        """The limit that `requests` more, of `rows` and `size_bytes` together, would exceed, as an error to raise; None
        if there is room for all. Their level may hold `max_queue_size` requests (0: any number)."""
        if max_queue_size or self._is_bounded:
            reserved = self._reserved_of_level[level] if self.reserved else 0
            if max_queue_size and self.requests_of_level(level) + reserved + requests > max_queue_size:
                return QueueFull(max_queue_size)
            if self._max_rows and self.rows + self._reserved_rows + rows > self._max_rows:
                return QueueFull(self._max_rows, "rows")
            if self._max_bytes and self.size_bytes + self._reserved_bytes + size_bytes > self._max_bytes:
                return QueueFull(self._max_bytes, "bytes")
        return self._shared.full(requests, size_bytes) if self._shared is not None else None

    def room(self, level: int, max_queue_size: int) -> int:
        """How many more requests there is room for if they are like those that wait, of a level that may hold
        `max_queue_size`."""
        requests = max(1, self.requests)
        bounds = [_MANY]
        if max_queue_size:
            bounds.append(max_queue_size - self.requests_of_level(level) - self._reserved_of_level[level])
        if self._max_rows:
            bounds.append((self._max_rows - self.rows - self._reserved_rows) * requests // max(1, self.rows))
        if self._max_bytes:
            left_bytes = self._max_bytes - self.size_bytes - self._reserved_bytes
            bounds.append(left_bytes * requests // max(1, self.size_bytes))
        if (shared := self._shared) is not None:
            bounds.append(shared.max_requests - shared.requests)
            bounds.append((shared.max_bytes - shared.size_bytes) * requests // max(1, self.size_bytes))
        return min(bounds)

    # hot path
    def add(self, request: AnyRequest, count: int = 1) -> None:
        """Count `count` more, all like `request`."""
        size_bytes = request.size_bytes * count
        self.requests += count
        self.rows += request.rows * count
        self.size_bytes += size_bytes
        if (shared := self._shared) is not None:
            shared.requests += count
            shared.size_bytes += size_bytes
        if self._has_levels:
            self._requests_of_level[request.level] += count

    # hot path
    def remove(self, requests: Sequence[AnyRequest]) -> None:
        """Stop counting `requests`, which wait no more."""
        size_bytes = sum(map(_SIZE_BYTES, requests))
        self.requests -= len(requests)
        self.rows -= sum(map(_ROWS, requests))
        self.size_bytes -= size_bytes
        if (shared := self._shared) is not None:
            shared.requests -= len(requests)
            shared.size_bytes -= size_bytes
        if self._has_levels:
            counts = self._requests_of_level
            for request in requests:
                counts[request.level] -= 1
                if not counts[request.level]:
                    # There may be as many levels as 64-bit numbers, and none may leave its counter behind.
                    del counts[request.level]

    def reserve(self, request: AnyRequest, sign: int) -> None:
        """Note that a request that has left may come back (`sign` 1), or no longer may (-1)."""
        self.reserved += sign
        self._reserved_rows += sign * request.rows
        self._reserved_bytes += sign * request.size_bytes
        self._reserved_of_level[request.level] += sign
        if not self._reserved_of_level[request.level]:
            del self._reserved_of_level[request.level]
        if (shared := self._shared) is not None:
            shared.requests += sign
            shared.size_bytes += sign * request.size_bytes
