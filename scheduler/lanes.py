"""The lanes of a queue: which may be served now, which of those first, and when waiting alone makes another one ready.

Lives here: the heaps of ready and of due lanes, updated with every arrival and departure. Must not: deadlines,
instances, or a batch's size.

A lane is *ready* when its head may leave with an idle instance: a preferred prefix has formed, or a request in it has
waited long enough. Ready lanes compete by the order of their heads: priority, then age. Every lane that isn't ready has
an item in `due`, the heap of moments when waiting alone makes it ready. Without a delay every lane is ready, and needs
no walk until its turn.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from typing import Generic

from paceline.scheduler.lane import Lane
from paceline.scheduler.lazy_heap import LazyHeap
from paceline.scheduler.policy import BatchPolicy
from paceline.scheduler.request import RequestT

__all__ = ["Lanes"]


def _is_ready(lane: Lane[RequestT], token: int) -> bool:
    return lane.ready_token == token


def _is_due(lane: Lane[RequestT], token: int) -> bool:
    return lane.due_token == token


class Lanes(Generic[RequestT]):
    """One lane for each shape key that has requests waiting. `due` lets others see when the first lane is due."""

    def __init__(self, policy: BatchPolicy) -> None:
        self._policy = policy
        self._max_requests = policy.max_batch_requests
        self._delay_ns = policy.max_queue_delay_ns
        self._by_key: dict[Hashable, Lane[RequestT]] = {}
        # Lanes to be walked again before the next one is chosen.
        self._stale: dict[Lane[RequestT], None] = {}
        self._ready: LazyHeap[Lane[RequestT]] = LazyHeap(_is_ready)
        self.due: LazyHeap[Lane[RequestT]] = LazyHeap(_is_due)
        self._tokens = 0
        self.prefer(policy.max_batch_rows)

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[RequestT]:
        """All waiting requests, lane by lane."""
        for lane in self._by_key.values():
            yield from lane

    def get(self, key: Hashable) -> Lane[RequestT] | None:
        return self._by_key.get(key)

    def prefer(self, allowed_rows: int) -> None:
        """Prefer the policy's sizes up to `allowed_rows`; if there are none, prefer `allowed_rows`."""
        preferred = (rows for rows in self._policy.preferred if rows <= allowed_rows)
        self._preferred = frozenset(preferred) or frozenset((allowed_rows,))
        self._max_preferred = max(self._preferred)
        if self._delay_ns:
            for lane in self._by_key.values():
                self._walk_later(lane)

    def flush(self) -> None:
        """From now on, nothing waits for more requests."""
        self._delay_ns = 0
        self._stale.clear()
        for lane in self._by_key.values():
            self._file(lane)

    # hot path
    def add(self, group: Sequence[RequestT]) -> None:
        """Add requests of one key and level that arrived one after the other, or go back after all of their level."""
        lane = self._enter(group)
        if not self._delay_ns:
            lane.add(group)
            # The first one has the lowest order of them.
            if not lane.ready_token or group[0].order < lane.filed_order:
                self._file(lane)
            return
        for request in group:
            lane.add((request,))
            if request.order < lane.walked_order:
                self._walk_later(lane)
            elif not lane.closed and lane not in self._stale:
                lane.walk_over(request, self._preferred, self._max_preferred, self._max_requests)
                self._file_walked(lane)

    def put_back(self, group: Sequence[RequestT]) -> None:
        """Return requests that have left in a batch to where they waited before."""
        lane = self._enter(group)
        lane.put_back(group)
        if self._delay_ns:
            self._walk_later(lane)
        else:
            self._file(lane)

    def _enter(self, group: Sequence[RequestT]) -> Lane[RequestT]:
        """The lane of `group`, whose requests wait from now on; they are still to be added to it."""
        for request in group:
            request.waits = True
        return self._lane_of(group[0].key)

    def _lane_of(self, key: Hashable) -> Lane[RequestT]:
        lane = self._by_key.get(key)
        if lane is None:
            lane = self._by_key[key] = Lane(key)
        return lane

    def remove(self, request: RequestT) -> None:
        """Remove a request from wherever it is in its lane."""
        lane = self._by_key[request.key]
        lane.remove(request)
        request.waits = False
        if not lane.requests:
            self._drop(lane)
        elif not self._delay_ns:
            if request.order == lane.filed_order:
                self._file(lane)
        elif request.order <= lane.walked_order:
            self._walk_later(lane)

    # hot path
    def next_ready(self, now_ns: int) -> Lane[RequestT] | None:
        """The ready lane to be served first, if there is one. It no longer counts as ready until it is filed again, by
        one of the methods below or when requests come and go."""
        if self._stale:
            for lane in self._stale:
                self._walk(lane)
            self._stale.clear()
        if self.due.items:
            self._awake(now_ns)
        if not self._ready.items:
            return None
        first = self._ready.pop_living()
        if first is not None:
            first.ready_token = 0
        return first

    # hot path
    def take(self, lane: Lane[RequestT], requests: Sequence[RequestT]) -> None:
        """Remove some of the lane's requests; then the others have their turn."""
        emptied = len(requests) == lane.requests
        for request in requests:
            request.waits = False
            if not emptied:
                lane.remove(request)
        if emptied:
            self._drop(lane)
        elif self._delay_ns:
            self._walk(lane)
        else:
            self._file(lane)

    # hot path
    def take_only(self, lane: Lane[RequestT]) -> RequestT:
        """Like `take`, for a lane's only request."""
        request = lane.only or lane.head
        request.waits = False
        self._drop(lane)
        return request

    def pass_over(self, lane: Lane[RequestT]) -> None:
        """Leave the lane as ready as it was."""
        self._make_ready(lane)

    def postpone(self, lane: Lane[RequestT], until_ns: int) -> None:
        """The lane isn't ready before `until_ns`, unless requests come or go."""
        self._make_due(lane, until_ns)

    def releasable(self, lane: Lane[RequestT], now_ns: int) -> int:
        """How many of the lane's first requests leave with an instance that has room for them: all once one has waited
        for the whole delay, else the preferred prefix, else all."""
        if not self._delay_ns:
            return self._preferred_prefix(lane) or lane.requests
        if lane.prefix and lane.oldest_ns + self._delay_ns > now_ns:
            return lane.prefix
        return lane.requests

    def _preferred_prefix(self, lane: Lane[RequestT]) -> int:
        """The preferred prefix of a lane that hasn't been walked. 0 if no sizes are configured: the largest batch is
        preferred then, which is whatever fits into it."""
        if not self._policy.preferred_batch_rows:
            return 0
        lane.walk(self._preferred, self._max_preferred, self._max_requests)
        return lane.prefix

    def _drop(self, lane: Lane[RequestT]) -> None:
        """Drop a lane that has become empty. It may stay in the heaps for a whole delay, and mustn't keep any tensors
        alive there."""
        lane.ready_token = lane.due_token = 0
        lane.only = None
        lane.sections.clear()
        del self._by_key[lane.key]
        if self._stale:
            self._stale.pop(lane, None)

    def _awake(self, now_ns: int) -> None:
        """Make lanes ready in which a request has waited long enough."""
        due = self.due
        while (first := due.first_rank()) is not None and first <= now_ns:
            lane = due.pop()
            lane.due_token = 0
            if not lane.ready_token:
                self._make_ready(lane)

    def _walk_later(self, lane: Lane[RequestT]) -> None:
        lane.restart()
        self._stale[lane] = None

    def _walk(self, lane: Lane[RequestT]) -> None:
        lane.walk(self._preferred, self._max_preferred, self._max_requests)
        self._file_walked(lane)

    def _file_walked(self, lane: Lane[RequestT]) -> None:
        if not lane.prefix:
            if not lane.due_token:
                self._make_due(lane, lane.oldest_ns + self._delay_ns)
        elif not lane.ready_token:
            self._make_ready(lane)

    def _file(self, lane: Lane[RequestT]) -> None:
        """Make the lane ready, where nothing waits for more requests."""
        lane.due_token = 0
        self._make_ready(lane)

    def _make_due(self, lane: Lane[RequestT], due_ns: int) -> None:
        lane.due_token = self._tokens = self._tokens + 1
        self.due.push(due_ns, lane.due_token, lane)

    def _make_ready(self, lane: Lane[RequestT]) -> None:
        lane.ready_token = self._tokens = self._tokens + 1
        lane.filed_order = lane.head.order
        self._ready.push(lane.filed_order, lane.ready_token, lane)
