"""The waiting requests of one shape key, in the order in which they will be served.

Lives here: the order, and the walk that looks for a batch worth releasing. Must not: deadlines, limits, other lanes.

The order is one number, `Request.order`: priority level first, then whether the queue timeout has passed, then arrival.
So "before" means the same within a lane and between the heads of two lanes. A section is all requests of the same level
for which the timeout has passed, or all for which it hasn't. A lane relies on this: the last to arrive has the highest
order of its section.

So a request's order changes only while it is in no lane: `remove` finds it by its order. It then goes back with its new
order, by `add` if that makes it the last of its section, else by `put_back`, which sorts it in.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from itertools import chain, islice
from typing import Generic

from paceline.scheduler.request import RequestT, order_of, section_of

__all__ = ["Lane"]


class _Section(OrderedDict[int, RequestT], Generic[RequestT]):
    """Requests of one level, all demoted or none, by order; `rows` is how many rows they have together."""

    __slots__ = ("rows",)

    def __init__(self, *requests: RequestT) -> None:
        super().__init__((request.order, request) for request in requests)
        self.rows = sum(request.rows for request in requests)


class Lane(Generic[RequestT]):
    """Requests of one shape key by ascending order.

    They are kept in sections, in each of which new requests go to the end. add and remove are O(1) plus the bisection
    for a section's first request. A request that found the lane empty is kept as `only`, without a section: where
    shapes are many, most lanes never see a second one.

    The walk adds requests from the front while their rows stay within the largest preferred size. `prefix` counts the
    requests that may leave at once (0: none yet); `closed` says that further requests at the end can't change that.

    `ready_token` and `due_token`, if not 0, identify the lane's live item in the heap of ready lanes and of due ones.
    In the former it is filed by `filed_order`, the order of its head.
    """

    __slots__ = (
        "closed",
        "due_token",
        "filed_order",
        "key",
        "oldest_ns",
        "only",
        "prefix",
        "ready_token",
        "requests",
        "rows",
        "sections",
        "sections_order",
        "walked",
        "walked_order",
        "walked_rows",
    )

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.rows = self.requests = 0
        self.only: RequestT | None = None
        self.sections: dict[int, _Section[RequestT]] = {}
        self.sections_order: list[int] = []
        self.restart()

    def __iter__(self) -> Iterator[RequestT]:
        if self.only is not None:
            return iter((self.only,))
        return chain.from_iterable(self.sections[section].values() for section in self.sections_order)

    @property
    def head(self) -> RequestT:
        """The request to be served first."""
        if self.only is not None:
            return self.only
        return next(iter(self.sections[self.sections_order[0]].values()))

    def rows_before(self, level: int) -> int:
        """Rows served before a request of `level` that arrives now; the demoted requests of its own level come after
        it."""
        last = section_of(order_of(level, 0))
        if self.only is not None:
            return self.rows if section_of(self.only.order) <= last else 0
        rows = 0
        for section in self.sections_order:
            if section > last:
                break
            rows += self.sections[section].rows
        return rows

    # hot path
    def add(self, group: Sequence[RequestT]) -> None:
        """Add requests of equal level and rows that arrived one after the other."""
        first, requests = group[0], len(group)
        rows = requests * first.rows
        if not self.requests and requests == 1:
            self.only = first
        else:
            if self.only is not None:
                self._file((self.only,), self.only.rows)
                self.only = None
            self._file(group, rows)
        self.requests += requests
        self.rows += rows

    def put_back(self, requests: Sequence[RequestT]) -> None:
        """Add requests that were here before; whatever their order, they are likely to belong at the front."""
        for request in reversed(requests):
            self.add((request,))
            if self.only is None:
                self._sort_in(request)

    def remove(self, request: RequestT) -> None:
        if request is self.only:
            self.only = None
        else:
            self._unfile(request)
        self.requests -= 1
        self.rows -= request.rows

    # hot path
    def _file(self, group: Sequence[RequestT], rows: int) -> None:
        """Add `group`, of `rows` rows together, to the end of its section."""
        section = section_of(group[0].order)
        requests = self.sections.get(section)
        if requests is None:
            requests = self.sections[section] = _Section()
            insort(self.sections_order, section)
        for request in group:
            requests[request.order] = request
        requests.rows += rows

    def _sort_in(self, request: RequestT) -> None:
        """Move the request, the last one of its section, to its place there."""
        section = section_of(request.order)
        requests = self.sections[section]
        requests.move_to_end(request.order, last=False)
        if any(order < request.order for order in islice(requests, 1, 2)):
            self.sections[section] = _Section(*(requests[order] for order in sorted(requests)))

    def _unfile(self, request: RequestT) -> None:
        section = section_of(request.order)
        requests = self.sections[section]
        del requests[request.order]
        requests.rows -= request.rows
        if not requests:
            del self.sections[section]
            self.sections_order.remove(section)

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
