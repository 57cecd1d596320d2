"""How many of a lane's first requests make the next batch, once it is decided that one leaves; if requests differ in
length, which of them.

Lives here: sizes, padding and the effect of deadlines on them, by measured execution times. Must not: lanes, heaps, or
state other than what is currently allowed. Requests come in the order of service, and the first of them is in the
batch, unless it would be late; without lengths or deadlines, a batch is a prefix of them.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Hashable, Iterable, Sequence
from itertools import islice
from typing import Generic, NamedTuple

from paceline.scheduler.growth import Growth
from paceline.scheduler.lanes import Lane
from paceline.scheduler.latency import LatencyModel, cost_size
from paceline.scheduler.lengths import Bounds, common_sizes, sharing
from paceline.scheduler.policy import NEVER, BatchPolicy
from paceline.scheduler.request import RequestT

PAUSE_NS = 10_000_000_000
"""How long memory has to suffice until twice as many rows are tried."""
LONGEST_PAUSE_NS = 600_000_000_000
_WINDOW = 64
"""How many waiting requests are looked at for those of similar lengths, or twice as many as a batch has rows."""
_MAX_BATCHES = 8
"""How many batches deep a lane is searched for requests that can be in time; what is further back comes later."""


class Allowed(NamedTuple):
    """The state of an `Allowance` at some moment."""

    rows: int
    pause_ns: int
    grew: bool
    due_ns: int


class Allowance:
    """`rows` is how many rows a batch may have: `most`, or fewer while memory is short. `sizes` are the only sizes
    there are (empty: any).

    Halved when an execution runs out of memory, and doubled again as time passes without a shortage. If memory runs out
    again right after the number grew, the next attempt waits twice as long, so that a `max_batch_rows` which never fits
    costs one execution every ten minutes, while a neighbour on the device that was large for a moment costs ten seconds
    of smaller batches. If one request alone turns out to need too much, the shortage is forgiven: it says nothing about
    other requests, whose batches would become small because of it.
    """

    def __init__(self, most: int, sizes: Sequence[int] = ()) -> None:
        self._most = most
        self._sizes = sizes
        self._pause_ns = PAUSE_NS
        self._grew = False
        self.rows = most
        self.due_ns = NEVER

    def exhausted(self, rows: int, now_ns: int) -> Allowed:
        """Learn that memory wasn't enough for `rows` rows. An execution that ran at the same time and failed likewise
        is the same shortage: it doesn't halve anything twice. Returns the state from before."""
        self.grow(now_ns)
        before = Allowed(self.rows, self._pause_ns, self._grew, self.due_ns)
        if self._grew:
            self._pause_ns = min(2 * self._pause_ns, LONGEST_PAUSE_NS)
            self._grew = False
        self.rows = min(self.rows, self._allowed(max(1, rows // 2)))
        self.due_ns = now_ns + self._pause_ns
        return before

    def forgive(self, before: Allowed) -> None:
        """Learn that the shortage was none: return to `before`, unless more is allowed by now, as when two at a time
        were none."""
        if before.rows >= self.rows:
            self.rows, self._pause_ns, self._grew, self.due_ns = before

    def grow(self, now_ns: int) -> None:
        """Double `rows` as often as due; forget the shortage once the full size has been allowed for a whole pause."""
        while self.due_ns <= now_ns:
            self.due_ns += self._pause_ns
            if self.rows < self._most:
                self._grew = True
                # At least the next size: they may be further apart than by a factor of two.
                place = bisect_right(self._sizes, self.rows)
                self.rows = self._allowed(max([2 * self.rows, *self._sizes[place : place + 1]]))
            else:
                self._grew = False
                self._pause_ns, self.due_ns = PAUSE_NS, NEVER

    def _allowed(self, rows: int) -> int:
        """The largest size that isn't above `rows`, or the smallest."""
        rows = min(rows, self._most)
        return self._sizes[max(0, bisect_right(self._sizes, rows) - 1)] if self._sizes else rows


class Unreachable(NamedTuple, Generic[RequestT]):
    """A request that could only be answered too late: its batch would have taken `needed_ns`."""

    request: RequestT
    needed_ns: int


class Cut(NamedTuple, Generic[RequestT]):
    """The next requests of a lane, with `rows` rows, executed as `padded_rows` rows and filled up to `sizes`."""

    requests: Sequence[RequestT]
    rows: int
    padded_rows: int
    sizes: tuple[int, ...] = ()


class Sizing:
    """Decides sizes by `policy`, what `latency` has learned and what `allowance` allows. `stops`: batches may stop at
    fewer rows, if `growth` finds that more cost more each."""

    def __init__(self, policy: BatchPolicy, latency: LatencyModel) -> None:
        self._policy = policy
        self._latency = latency
        self._lengths = policy.lengths
        self.stops = policy.max_batch_rows > 1 and not policy.grows_always
        # The only sizes to stop at, if they are in rows at all.
        self._stop_sizes = () if self._lengths else sorted(policy.preferred_batch_rows or policy.batch_sizes)
        self.growth = Growth(self._stop_sizes)
        self.allowance = Allowance(policy.max_batch_rows, policy.batch_sizes)

    def padded(self, rows: int) -> int:
        """The smallest allowed size for a batch of `rows` rows."""
        sizes = self._policy.batch_sizes
        return sizes[bisect_left(sizes, rows)] if sizes else rows

    # hot path
    def cut(self, lane: Lane[RequestT], releasable: int, now_ns: int) -> Cut[RequestT]:
        """As many of the lane's first `releasable` requests as fit into a batch, or into a smaller allowed size if that
        costs less per row, or up to the size from which on rows cost more. If requests differ in length, those that
        the first one shares its batch with.

        The cost is measured execution time; as long as none is known, padding up wins, and only equal lengths share a
        batch. A request that is larger than what is allowed for now is a batch of its own.
        """
        rows, requests = self.allowance.rows, self._policy.max_batch_requests or releasable
        most = self.growth.most(lane.key, now_ns) if self.stops and lane.requests > 1 else 0
        if self._lengths:
            return self._cut_by_length(lane, releasable, most)
        if most and self._stop_sizes:
            most = self._stop_sizes[max(0, bisect_right(self._stop_sizes, most) - 1)]
        rows = min(rows, most or rows)
        if lane.requests <= min(requests, releasable) and lane.rows <= rows:
            fitting, rows = list(lane), lane.rows
        else:
            fitting, rows = self.fitting(lane, min(requests, releasable), rows)
        cut = Cut(fitting, rows, rows)
        return self._to_allowed_size(lane.key, cut) if self._policy.batch_sizes else cut

    def _cut_by_length(self, lane: Lane[RequestT], releasable: int, growth: int) -> Cut[RequestT]:
        policy, rows = self._policy, self.allowance.rows
        waiting = list(islice(lane, max(_WINDOW, 2 * rows)))
        if releasable < lane.requests:
            # A preferred size: so many rows, whichever they are.
            rows = min(rows, sum([request.rows for request in islice(lane, releasable)]))
        elements = min([one for one in (policy.max_batch_elements, growth) if one], default=sys.maxsize)
        bounds = Bounds(rows, policy.max_batch_requests or len(waiting), elements)
        worth = self._latency.of(lane.key).worth()
        cut = self.of(sharing(waiting, self._lengths, bounds, worth))
        least = min(rows, min(policy.preferred_batch_rows, default=0))
        if growth and cut.rows < least:  # below a preferred size, only the policy stops a batch
            bounds = bounds._replace(rows=least, elements=policy.max_batch_elements or sys.maxsize)
            cut = self.of(sharing(waiting, self._lengths, bounds, worth))
        return self._to_allowed_size(lane.key, cut) if policy.batch_sizes else cut

    def of(self, requests: Sequence[RequestT], rows: int = 0) -> Cut[RequestT]:
        """`requests` as they are, which have `rows` rows (0: not counted yet)."""
        rows = rows or sum([request.rows for request in requests])
        sizes = common_sizes(self._lengths, requests) if self._lengths else ()
        return Cut(requests, rows, self.padded(rows), sizes)

    def fitting(
        self, requests: Iterable[RequestT], max_requests: int, most_rows: int = 0
    ) -> tuple[list[RequestT], int]:
        """As many of the first requests as fit into a batch (of `most_rows` rows, if not 0), at least one; and their
        rows."""
        allowed_rows = self.allowance.rows
        fitting, rows = _fitting(requests, min(allowed_rows, most_rows or allowed_rows), max_requests)
        if fitting:
            return fitting, rows
        first = next(iter(requests))
        return [first], first.rows

    def most_in_time(
        self, key: Hashable, requests: Iterable[RequestT], cut: Cut[RequestT], starts_ns: int
    ) -> tuple[Cut[RequestT], list[Unreachable[RequestT]]]:
        """The next batch, which starts at `starts_ns`: `cut`, the first of the lane's `requests`, or, if that would be
        late for some of them, the size that answers the most requests in time per time spent.

        Returns the batch, and the requests that have to be given up for it. Requests that a size is too late for are
        skipped, and those that follow take their place: under overload the oldest requests are those with the least
        time left, and small batches for their sake would make everybody late. If no batch is in time for any request,
        those are given up that even a batch of their own would be too late for.
        """
        end_ns = starts_ns + self._safe_ns(key, cut.padded_rows, cut.sizes, starts_ns)
        if all(one.deadline_ns >= end_ns for one in cut.requests):
            return cut, []
        candidates = list(islice(requests, max(_WINDOW if cut.sizes else 0, _MAX_BATCHES * len(cut.requests))))
        if cut.sizes:
            return self._most_in_time_by_length(key, candidates, cut, starts_ns)
        best, best_late = self._fastest(key, candidates, cut, starts_ns)
        return (best, best_late) if best.requests else (cut, self._too_late(key, cut, starts_ns))

    def _most_in_time_by_length(
        self, key: Hashable, candidates: Sequence[RequestT], cut: Cut[RequestT], starts_ns: int
    ) -> tuple[Cut[RequestT], list[Unreachable[RequestT]]]:
        """As `most_in_time`. The first request's sizes alone, if all others can be in time after it: nobody is to be
        late for the sake of others' lengths. Under overload, that would have everybody wait for small batches; then
        either these or the sizes of `cut`, whichever answer more requests per time."""
        first, columns = cut.requests[0].sizes, [*zip(*[one.sizes for one in cut.requests], strict=True)]
        bounds = [(min(column), max(column)) for column in columns]
        same = [one for one in candidates if one.sizes == first]
        near = [
            one
            for one in candidates
            if all(low <= size <= high for size, (low, high) in zip(one.sizes, bounds, strict=True))
        ]
        own = self.of(self.fitting(same, len(cut.requests), cut.rows)[0])
        mine, mine_late = self._fastest(key, same, own, starts_ns)
        others, others_late = self._fastest(key, near, cut, starts_ns)
        if not mine.requests:
            too_late = self._too_late(key, own, starts_ns)
            return (others, others_late) if others.requests and not too_late else (own, too_late)
        mine_ns, others_ns = (self._safe_ns(key, one.padded_rows, one.sizes, starts_ns) for one in (mine, others))
        if not others.requests or len(mine.requests) * others_ns >= len(others.requests) * mine_ns:
            return mine, mine_late
        taken, after_ns = {id(one) for one in mine.requests}, starts_ns + mine_ns
        waits = [(one, others_ns) for one in others.requests]
        for late in others_late:
            alone = self.of([late.request])
            alone_ns = self._safe_ns(key, alone.padded_rows, alone.sizes, starts_ns)
            if late.request.deadline_ns >= starts_ns + alone_ns:  # else it is late in any case
                waits.append((late.request, alone_ns))
        if any(one.deadline_ns < after_ns + needed_ns for one, needed_ns in waits if id(one) not in taken):
            return others, others_late
        return mine, mine_late

    def _fastest(
        self, key: Hashable, candidates: Sequence[RequestT], cut: Cut[RequestT], starts_ns: int
    ) -> tuple[Cut[RequestT], list[Unreachable[RequestT]]]:
        """The batch of up to the rows of `cut`, and its sizes, that answers the most of `candidates` in time per time
        spent, and those skipped for it; a batch of none if none is in time."""
        limit, best_rate = cut.rows + 1, 0.0
        best, best_late = Cut[RequestT]((), 0, 0, cut.sizes), list[Unreachable[RequestT]]()
        while limit > (smaller := min(cut.rows, max(limit // 2, cut.requests[0].rows))):
            limit = cut.rows if limit > cut.rows else smaller
            one, late = self._in_time(key, candidates, limit, cut, starts_ns)
            took_ns = self._safe_ns(key, one.padded_rows, one.sizes, starts_ns) if one.requests else 0
            rate = len(one.requests) / max(1, took_ns)
            if rate > best_rate:
                best, best_late, best_rate = one, late, rate
        return (self.of(best.requests, best.rows) if best.sizes and best.requests else best), best_late

    def _too_late(self, key: Hashable, cut: Cut[RequestT], starts_ns: int) -> list[Unreachable[RequestT]]:
        """The requests of `cut` that even a batch of their own would be too late for."""
        too_late = []
        for one in cut.requests:
            needed_ns = self._latency.of(key).proven_ns(cost_size(self.padded(one.rows), cut.sizes), starts_ns)
            if one.deadline_ns < starts_ns + needed_ns:
                too_late.append(Unreachable(one, needed_ns))
        return too_late

    def _in_time(
        self, key: Hashable, requests: Sequence[RequestT], max_rows: int, cut: Cut[RequestT], starts_ns: int
    ) -> tuple[Cut[RequestT], list[Unreachable[RequestT]]]:
        """The first requests that a batch of up to `max_rows` rows is in time for, no more of them than `cut` has and
        of its sizes, and those skipped before them."""
        needed_ns = self._safe_ns(key, self.padded(max_rows), cut.sizes, starts_ns)
        fitting: list[RequestT] = []
        late: list[Unreachable[RequestT]] = []
        rows = 0
        for one in requests:
            if len(fitting) == len(cut.requests) or rows + one.rows > max_rows:
                break
            if one.deadline_ns < starts_ns + needed_ns:
                late.append(Unreachable(one, needed_ns))
            else:
                fitting.append(one)
                rows += one.rows
        if late and 0 < rows < max_rows:
            # No request is to be skipped for the sake of a size that isn't reached.
            return self._in_time(key, requests, rows, cut, starts_ns)
        return Cut(fitting, rows, self.padded(rows) if rows else 0, cut.sizes), late

    def _safe_ns(self, key: Hashable, rows: int, sizes: tuple[int, ...], starts_ns: int) -> int:
        size, curve = cost_size(rows, sizes), self._latency.of(key)
        # Where requests differ in length, there are too many sizes for each to be measured all the time.
        known_ns = curve.recent_ns(size, starts_ns) if sizes else curve.proven_ns(size, starts_ns)
        return known_ns + curve.margin_ns(size) if known_ns else 0

    def _to_allowed_size(self, key: Hashable, cut: Cut[RequestT]) -> Cut[RequestT]:
        """Pad up to an allowed size, or leave some for the next batch where that costs less per row, or has to be."""
        sizes, most, rows = self._policy.batch_sizes, self._policy.max_batch_elements, cut.rows
        place = bisect_left(sizes, rows)
        above = sizes[place]
        if above == rows or not place:
            return cut._replace(padded_rows=above)
        below = sizes[place - 1]
        fewer, fewer_rows = _fitting(cut.requests, below, len(cut.requests))
        if fewer:
            smaller = self.of(fewer, fewer_rows)._replace(padded_rows=below)
            curve = self._latency.of(key)
            padded_ns = curve.expected_ns(cost_size(above, cut.sizes))
            cut_ns = curve.expected_ns(cost_size(below, smaller.sizes))
            is_too_much = 0 < most < above * math.prod(cut.sizes)
            if is_too_much or (cut_ns and cut_ns * rows < padded_ns * fewer_rows):
                return smaller
        return cut._replace(padded_rows=above)


def _fitting(requests: Iterable[RequestT], max_rows: int, max_requests: int) -> tuple[list[RequestT], int]:
    """The first requests, up to `max_requests` of them, whose rows fit into `max_rows`; and their rows."""
    fitting: list[RequestT] = []
    rows = 0
    for request in requests:
        if len(fitting) == max_requests or rows + request.rows > max_rows:
            break
        rows += request.rows
        fitting.append(request)
    return fitting, rows
