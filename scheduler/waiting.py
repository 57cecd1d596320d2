"""How much waits, in all and by priority level, whether there is room for more, and what is due when.

Lives here: the queue's counters, its bounds, and heaps of moments. Must not: know in which order anything is served.
The rule: whoever enters or leaves the queue is counted here, at that moment.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from heapq import heapify, heappop, heappush
from operator import attrgetter
from typing import Generic, TypeVar

from paceline.scheduler.errors import QueueFull
from paceline.scheduler.policy import NEVER, BatchPolicy
from paceline.scheduler.request import AnyRequest, RequestT, Timer

T = TypeVar("T")

_MANY = 1 << 62
_SLACK = 64
_ROWS, _SIZE_BYTES = attrgetter("rows"), attrgetter("size_bytes")


class SharedQueueLimits:
    """What waits in several queues of one thread, and how much may: requests and bytes (0: no limit)."""

    def __init__(self, max_requests: int, max_bytes: int) -> None:
        self.max_requests, self.max_bytes = max_requests or _MANY, max_bytes or _MANY
        self.requests = self.size_bytes = 0

    # hot path
    def full(self, requests: int, size_bytes: int) -> QueueFull | None:
        """The limit that so many more would exceed, as an error to raise; None if there is room."""
        if self.requests + requests > self.max_requests:
            return QueueFull(self.max_requests, whose="all models")
        if self.size_bytes + size_bytes > self.max_bytes:
            return QueueFull(self.max_bytes, "bytes", whose="all models")
        return None


class Counts:
    """How many requests there are, with how many rows and bytes; by priority level, too, if it `has_levels`. They count
    in `shared` as well."""

    def __init__(self, shared: SharedQueueLimits | None, has_levels: bool) -> None:
        self.requests = self.rows = self.size_bytes = 0
        self._shared = shared
        self._has_levels = has_levels
        self._of_level: Counter[int] = Counter()

    @property
    def levels(self) -> list[int]:
        """The priority levels that have requests."""
        return sorted(self._of_level)

    def of_level(self, level: int) -> int:
        """Requests of a priority level; of level 0, where there are no levels, all of them."""
        return self._of_level[level] if level else self.requests

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
            self._of_level[request.level] += count

    # hot path
    def remove(self, requests: Sequence[AnyRequest]) -> None:
        """Stop counting `requests`."""
        size_bytes = sum(map(_SIZE_BYTES, requests))
        self.requests -= len(requests)
        self.rows -= sum(map(_ROWS, requests))
        self.size_bytes -= size_bytes
        if (shared := self._shared) is not None:
            shared.requests -= len(requests)
            shared.size_bytes -= size_bytes
        if self._has_levels:
            counts = self._of_level
            for request in requests:
                counts[request.level] -= 1
                if not counts[request.level]:
                    # There may be as many levels as 64-bit numbers, and none may leave its counter behind.
                    del counts[request.level]


class Waiting(Counts):
    """What waits in one queue, which shares `shared_limits` with others. `reserved` are requests that have left the
    queue and may come back: until they no longer may, they take room."""

    def __init__(self, policy: BatchPolicy, shared_limits: SharedQueueLimits | None = None) -> None:
        super().__init__(shared_limits, policy.priority_levels > 0)
        self.reserved = Counts(shared_limits, policy.priority_levels > 0)
        self._max_rows, self._max_bytes = policy.limits.max_rows, policy.limits.max_bytes
        self._is_bounded = bool(self._max_rows or self._max_bytes)

    # hot path
    def full(self, requests: int, rows: int, size_bytes: int, level: int, max_queue_size: int) -> QueueFull | None:
        """The limit that `requests` more, of `rows` and `size_bytes` together, would exceed, as an error to raise; None
        if there is room for all. Their level may hold `max_queue_size` requests (0: any number)."""
        if max_queue_size or self._is_bounded:
            reserved = self.reserved
            if max_queue_size and self.of_level(level) + reserved.of_level(level) + requests > max_queue_size:
                return QueueFull(max_queue_size)
            if self._max_rows and self.rows + reserved.rows + rows > self._max_rows:
                return QueueFull(self._max_rows, "rows")
            if self._max_bytes and self.size_bytes + reserved.size_bytes + size_bytes > self._max_bytes:
                return QueueFull(self._max_bytes, "bytes")
        return self._shared.full(requests, size_bytes) if self._shared is not None else None

    def room(self, level: int, max_queue_size: int) -> int:
        """How many more requests like those that wait have room, of a level that may hold `max_queue_size`."""
        requests, reserved = max(1, self.requests), self.reserved
        bounds = [_MANY]
        if max_queue_size:
            bounds.append(max_queue_size - self.of_level(level) - reserved.of_level(level))
        if self._max_rows:
            bounds.append((self._max_rows - self.rows - reserved.rows) * requests // max(1, self.rows))
        if self._max_bytes:
            left_bytes = self._max_bytes - self.size_bytes - reserved.size_bytes
            bounds.append(left_bytes * requests // max(1, self.size_bytes))
        if (shared := self._shared) is not None:
            bounds.append(shared.max_requests - shared.requests)
            bounds.append((shared.max_bytes - shared.size_bytes) * requests // max(1, self.size_bytes))
        return min(bounds)


class LazyHeap(Generic[T]):
    """Items by ascending `(rank, token)`, which may die inside it: once `alive(item, token)` is false, it stays false.
    Live items have unique tokens; dead ones need none, if items can be compared. `items` lets others see whether there
    are any at all, dead ones included.

    Removing from the middle is linear, so dead items stay until they surface or outnumber the living; O(log n).
    """

    __slots__ = ("_alive", "_limit", "items")

    def __init__(self, alive: Callable[[T, int], bool]) -> None:
        self._alive = alive
        self.items: list[tuple[int, int, T]] = []
        self._limit = _SLACK

    # hot path
    def push(self, rank: int, token: int, item: T) -> None:
        heappush(self.items, (rank, token, item))
        if len(self.items) > self._limit:
            self.items = [one for one in self.items if self._alive(one[2], one[1])]
            heapify(self.items)
            self._limit = 2 * len(self.items) + _SLACK

    # hot path
    def first_rank(self) -> int | None:
        """The lowest rank of a live item; None when there is none."""
        items = self.items
        while items:
            rank, token, item = items[0]
            if self._alive(item, token):
                return rank
            heappop(items)
        return None

    def pop(self) -> T:
        """Remove and return the item whose rank `first_rank` has just returned."""
        return heappop(self.items)[2]

    # hot path
    def pop_living(self) -> T | None:
        """Remove and return the live item of the lowest rank; None when there is none."""
        items = self.items
        while items:
            _, token, item = heappop(items)
            if self._alive(item, token):
                return item
        return None


def earliest(one_ns: int | None, other_ns: int | None) -> int | None:
    """The earlier of two moments, of which None is never."""
    if one_ns is None or other_ns is None:
        return other_ns if one_ns is None else one_ns
    return min(one_ns, other_ns)


class Timers(LazyHeap[Timer[RequestT]]):
    """The moments at which something has to be done about waiting requests."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(lambda timer, token: timer.request is not None)

    # hot path
    def start(self, request: RequestT) -> None:
        """Have the request looked at when it is `act_at_ns`."""
        if request.act_at_ns != NEVER:
            request.timer = timer = Timer(request)
            self.push(request.act_at_ns, request.order, timer)

    # hot path
    def stop(self, requests: Sequence[RequestT]) -> None:
        """Nothing has to be done about `requests` any more."""
        for request in requests:
            if (timer := request.timer) is not None:
                timer.request = request.timer = None

    def first(self) -> RequestT | None:
        """The request whose moment comes first."""
        return self.items[0][2].request if self.first_rank() is not None else None
