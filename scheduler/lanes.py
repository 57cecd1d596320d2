"""Waiting requests in lanes, one for each shape key: the order in which they are served, which lanes may be served now,
which of those first, and when waiting alone makes another one ready.

Lives here: the order, the walk that looks for a batch worth releasing, and the heaps of ready and of due lanes, updated
with every arrival and departure. Must not: deadlines, limits, instances, or a batch's size.

The order is one number, `Request.order`: priority level first, then whether the queue timeout has passed, then arrival.
So "before" means the same within a lane and between the first requests of two lanes. A section is all requests of the
same level for which the timeout has passed, or all for which it hasn't. A lane relies on this: the last to arrive has
the highest order of its section. So a request's order changes only while it is in no lane: `remove` finds it by its
order. It then goes back with its new order, by `add` if that makes it the last of its section, else by `put_back`,
which sorts it in.

A lane is *ready* when its first request may leave with an idle instance: a preferred prefix has formed, or a request in
it has waited long enough. Ready lanes compete by the order of their first requests: priority, then age. Every lane that
isn't ready has an item in `due`, the heap of moments when waiting alone makes it ready. Without a delay every lane is
ready, and needs no walk until it goes next.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Generic

from paceline.scheduler.policy import BatchPolicy
from paceline.scheduler.request import RequestT
from paceline.scheduler.waiting import LazyHeap

_SECTION_BITS = 64
"""The low bits of an order hold the arrival number. Above them is a bit for demoted requests, then the level."""


def order_of(level: int, arrived: int, *, demoted: bool = False) -> int:
    """The order of the request that arrived as number `arrived`; `demoted`: after the others of its level."""
    return (2 * level + demoted << _SECTION_BITS) + arrived


class _Section(OrderedDict[int, RequestT], Generic[RequestT]):
    """Requests of one level, all demoted or none, by order; `rows` is how many rows they have together."""

    __slots__ = ("rows",)

    def __init__(self, *requests: RequestT) -> None:
        super().__init__((request.order, request) for request in requests)
        self.rows = sum(request.rows for request in requests)


@dataclass(slots=True, eq=False)
class Lane(Generic[RequestT]):
    """Requests of one shape key by ascending order.

    They are kept in sections, in each of which new requests go to the end. add and remove are O(1) plus the bisection
    for a section's first request. A request that found the lane empty is kept as `only`, without a section: where
    shapes are many, most lanes never see a second one.

    The walk adds requests from the front while their rows stay within the largest preferred size. `prefix` counts the
    requests that may leave at once (0: none yet); `closed` says that further requests at the end can't change that.

    `ready_token` and `due_token`, if not 0, identify the lane's live item in the heap of ready lanes and of due ones.
    In the former it is filed by `filed_order`, the order of its first request.
    """

    key: Hashable
    rows: int = 0
    requests: int = 0
    only: RequestT | None = None
    sections: dict[int, _Section[RequestT]] = field(default_factory=dict)
    sections_order: list[int] = field(default_factory=list)
    ready_token: int = 0
    due_token: int = 0
    filed_order: int = 0
    walked: int = 0
    walked_rows: int = 0
    walked_order: int = -1
    prefix: int = 0
    oldest_ns: int = 0
    closed: bool = False

    def __iter__(self) -> Iterator[RequestT]:
        if self.only is not None:
            return iter((self.only,))
        return chain.from_iterable(self.sections[section].values() for section in self.sections_order)

    def rows_before(self, level: int) -> int:
        """Rows served before a request of `level` that arrives now; demoted ones of its own level come after it."""
        last = order_of(level, 0) >> _SECTION_BITS
        if self.only is not None:
            return self.rows if self.only.order >> _SECTION_BITS <= last else 0
        return sum(section.rows for number, section in self.sections.items() if number <= last)

    # hot path
    def add(self, group: Sequence[RequestT]) -> None:
        """Add requests of equal level and rows that arrived one after the other."""
        first, requests = group[0], len(group)
        rows = requests * first.rows
        if not self.requests and requests == 1:
            self.only = first
        else:
            if self.only is not None:
                self._append((self.only,), self.only.rows)
                self.only = None
            self._append(group, rows)
        self.requests += requests
        self.rows += rows

    def put_back(self, requests: Sequence[RequestT]) -> None:
        """Add requests that were here before; whatever their order, they are likely to belong at the front."""
        for request in reversed(requests):
            self.add((request,))
            if self.only is None:
                number = request.order >> _SECTION_BITS
                section = self.sections[number]
                section.move_to_end(request.order, last=False)
                if any(order < request.order for order in islice(section, 1, 2)):
                    self.sections[number] = _Section(*(section[order] for order in sorted(section)))

    def remove(self, request: RequestT) -> None:
        if request is self.only:
            self.only = None
        else:
            number = request.order >> _SECTION_BITS
            section = self.sections[number]
            del section[request.order]
            section.rows -= request.rows
            if not section:
                del self.sections[number]
                self.sections_order.remove(number)
        self.requests -= 1
        self.rows -= request.rows

    # hot path
    def _append(self, group: Sequence[RequestT], rows: int) -> None:
        """Add `group`, of `rows` rows together, to the end of its section."""
        number = group[0].order >> _SECTION_BITS
        section = self.sections.get(number)
        if section is None:
            section = self.sections[number] = _Section()
            insort(self.sections_order, number)
        for request in group:
            section[request.order] = request
        section.rows += rows

    def restart(self) -> None:
        """Forget what the walk found: the first requests have changed."""
        self.ready_token = self.due_token = self.filed_order = 0
        self.walked = self.walked_rows = self.prefix = self.oldest_ns = 0
        self.walked_order = -1
        self.closed = False

    def walk(self, preferred: frozenset[int], max_preferred: int, max_requests: int) -> None:
        """Walk from the front until the lane is closed or its requests end."""
        self.restart()
        for request in self:
            self.walk_over(request, preferred, max_preferred, max_requests)
            if self.closed:
                break

    def walk_over(self, request: RequestT, preferred: frozenset[int], max_preferred: int, max_requests: int) -> None:
        """Extend the walk by one request. Triton's rule: the largest preferred prefix within reach is taken; if the
        next request would overshoot the largest preferred size before any was met, what precedes it goes without it."""
        rows = self.walked_rows + request.rows
        self.walked_order = request.order
        if self.walked and rows > max_preferred:
            self.closed = True
            self.prefix = self.prefix or self.walked
            return
        if not self.walked or request.arrived_ns < self.oldest_ns:
            self.oldest_ns = request.arrived_ns
        self.walked += 1
        self.walked_rows = rows
        if rows in preferred:
            self.prefix = self.walked
        if rows >= max_preferred or self.walked == max_requests:
            self.closed = True
            self.prefix = self.walked


class Lanes(Generic[RequestT]):
    """One lane for each shape key that has requests waiting. `due` lets others see when the first lane is due."""

    def __init__(self, policy: BatchPolicy) -> None:
        self._policy = policy
        self._max_requests = policy.max_batch_requests
        self._delay_ns = policy.max_queue_delay_ns
        self._by_key: dict[Hashable, Lane[RequestT]] = {}
        # Lanes to be walked again before the next one is chosen.
        self._stale: dict[Lane[RequestT], None] = {}
        self._ready: LazyHeap[Lane[RequestT]] = LazyHeap(lambda lane, token: lane.ready_token == token)
        self.due: LazyHeap[Lane[RequestT]] = LazyHeap(lambda lane, token: lane.due_token == token)
        self._tokens = 0
        self.prefer(policy.max_batch_rows)

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[RequestT]:
        """All waiting requests, lane by lane."""
        return chain.from_iterable(self._by_key.values())

    def rows_before(self, key: Hashable, level: int) -> int:
        """Rows that wait in the key's lane and are served before a request of `level` that arrives now."""
        lane = self._by_key.get(key)
        return lane.rows_before(level) if lane is not None else 0

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
            self.make_ready(lane)

    # hot path
    def add(self, group: Sequence[RequestT]) -> None:
        """Add requests of one key and level that arrived one after the other, or go back after all of their level."""
        lane = self._enter(group)
        if not self._delay_ns:
            lane.add(group)
            # A lane stays filed by its first request; only one that overtakes that changes its rank. The group's first
            # has the lowest order of them.
            if not lane.ready_token or group[0].order < lane.filed_order:
                self.make_ready(lane)
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
            self.make_ready(lane)

    def _enter(self, group: Sequence[RequestT]) -> Lane[RequestT]:
        """The lane of `group`, whose requests wait from now on; they are still to be added to it."""
        for request in group:
            request.waits = True
        key = group[0].key
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
                self.make_ready(lane)
        elif request.order <= lane.walked_order:
            self._walk_later(lane)

    # hot path
    def next_ready(self, now_ns: int) -> Lane[RequestT] | None:
        """The ready lane to be served first, if any. It is no longer ready until filed again, below or by requests."""
        if self._stale:
            for lane in self._stale:
                self._walk(lane)
            self._stale.clear()
        due, ready = self.due, self._ready
        while due.items and (first_ns := due.first_rank()) is not None and first_ns <= now_ns:
            lane = due.pop()  # a request in it has waited long enough
            lane.due_token = 0
            if not lane.ready_token:
                self.make_ready(lane)
        first = ready.pop_living() if ready.items else None
        if first is not None:
            first.ready_token = 0
        return first

    # hot path
    def take(self, lane: Lane[RequestT], requests: Sequence[RequestT]) -> None:
        """Remove some of the lane's requests; what is left competes again."""
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
            self.make_ready(lane)

    # hot path
    def make_ready(self, lane: Lane[RequestT]) -> None:
        """Have the lane compete, by the order of its first request, and wait for nothing more."""
        lane.due_token = 0
        lane.ready_token = self._tokens = self._tokens + 1
        first = lane.only or next(iter(lane.sections[lane.sections_order[0]].values()))
        lane.filed_order = first.order
        self._ready.push(lane.filed_order, lane.ready_token, lane)

    def make_due(self, lane: Lane[RequestT], due_ns: int) -> None:
        """The lane isn't ready before `due_ns`, unless requests come or go."""
        lane.due_token = self._tokens = self._tokens + 1
        self.due.push(due_ns, lane.due_token, lane)

    def releasable(self, lane: Lane[RequestT], now_ns: int) -> int:
        """How many of the lane's first requests leave with an instance that has room for them: all once one has waited
        for the whole delay, else the preferred prefix, else all."""
        if not self._delay_ns:
            if not self._policy.preferred_batch_rows:
                return lane.requests  # the largest batch is preferred, which is whatever fits into it
            lane.walk(self._preferred, self._max_preferred, self._max_requests)
            return lane.prefix or lane.requests
        if lane.prefix and lane.oldest_ns + self._delay_ns > now_ns:
            return lane.prefix
        return lane.requests

    def _drop(self, lane: Lane[RequestT]) -> None:
        """Drop an empty lane. It may stay in the heaps for a whole delay, where it mustn't keep tensors alive."""
        lane.ready_token = lane.due_token = 0
        lane.only = None
        lane.sections.clear()
        del self._by_key[lane.key]
        if self._stale:
            self._stale.pop(lane, None)

    def _walk_later(self, lane: Lane[RequestT]) -> None:
        lane.restart()
        self._stale[lane] = None

    def _walk(self, lane: Lane[RequestT]) -> None:
        lane.walk(self._preferred, self._max_preferred, self._max_requests)
        self._file_walked(lane)

    def _file_walked(self, lane: Lane[RequestT]) -> None:
        if not lane.prefix:
            if not lane.due_token:
                self.make_due(lane, lane.oldest_ns + self._delay_ns)
        elif not lane.ready_token:
            self.make_ready(lane)
