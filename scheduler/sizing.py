"""How many of a lane's first requests make the next batch, once it is decided that one leaves.

Lives here: sizes, padding and what deadlines do to them, by measured execution times. Must not: lanes, heaps, state
of its own. Entries come in the order of service, and a batch is always some of the first ones.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Hashable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

from scheduler.lane import Entry
from scheduler.latency import LatencyModel
from scheduler.policy import BatchPolicy

__all__ = ["Cut", "Sizing", "Unreachable"]

T = TypeVar("T")


class Unreachable(NamedTuple, Generic[T]):
    """A request that could only be answered too late: its batch would have taken `needed_ns`."""

    entry: Entry[T]
    needed_ns: int


class Cut(NamedTuple, Generic[T]):
    """The first requests of a lane: these, with so many rows, as so many rows of the model."""

    entries: Sequence[Entry[T]]
    rows: int
    padded_rows: int


class Sizing:
    """Decides sizes by `policy` and what `latency` has learned."""

    def __init__(self, policy: BatchPolicy, latency: LatencyModel) -> None:
        self._policy = policy
        self._latency = latency

    def padded(self, rows: int) -> int:
        """The smallest size that a batch of `rows` rows may have."""
        sizes = self._policy.batch_sizes
        return sizes[bisect_left(sizes, rows)] if sizes else rows

    def cut(self, key: Hashable, entries: Iterable[Entry[T]], max_requests: int) -> Cut[T]:
        """As many of the first entries as fit into a batch, or into a smaller allowed size if that costs less a row.

        The cost is measured execution time; as long as none is known, padding up wins.
        """
        fitting, rows = _fitting(entries, self._policy.max_batch_rows, max_requests)
        return self._to_allowed_size(key, fitting, rows) if self._policy.batch_sizes else Cut(fitting, rows, rows)

    def most_in_time(self, key: Hashable, cut: Cut[T], now_ns: int) -> tuple[Cut[T], list[Unreachable[T]]]:
        """Cut further, by halves, if that answers more requests in time per time spent.

        Returns the batch, and who has to be given up for it. Giving one up so that many are answered beats a small
        batch for its sake; a small batch beats a full one that is too late for everybody. Where no batch is in time
        for anybody, those are given up that even a batch of their own would be too late for.
        """
        best, best_late, best_in_time, best_ns = cut, list[Unreachable[T]](), -1, 1
        while True:
            duration_ns = self._latency.proven_ns(key, cut.padded_rows, now_ns)
            end_ns = now_ns + duration_ns
            late = [Unreachable(one, duration_ns) for one in cut.entries if one.rpc_deadline_ns < end_ns]
            in_time = len(cut.entries) - len(late)
            if in_time * best_ns > best_in_time * max(1, duration_ns):
                best, best_late, best_in_time, best_ns = cut, late, in_time, max(1, duration_ns)
            if not late or len(cut.entries) == 1:
                break
            cut = self._half(key, cut)
        if not best_in_time:
            best_late = self._too_late_alone(key, best.entries, now_ns)
        return best, best_late

    def _half(self, key: Hashable, cut: Cut[T]) -> Cut[T]:
        limit = max(cut.rows // 2, cut.entries[0].rows)
        fitting, rows = _fitting(cut.entries, limit, len(cut.entries) - 1)
        return self._to_allowed_size(key, fitting, rows) if self._policy.batch_sizes else Cut(fitting, rows, rows)

    def _too_late_alone(self, key: Hashable, entries: Sequence[Entry[T]], now_ns: int) -> list[Unreachable[T]]:
        alone = [(one, self._latency.proven_ns(key, self.padded(one.rows), now_ns)) for one in entries]
        return [Unreachable(one, needed_ns) for one, needed_ns in alone if one.rpc_deadline_ns < now_ns + needed_ns]

    def _to_allowed_size(self, key: Hashable, entries: Sequence[Entry[T]], rows: int) -> Cut[T]:
        """Pad up to the next allowed size, or leave some requests for the next batch where that costs less a row."""
        sizes = self._policy.batch_sizes
        place = bisect_left(sizes, rows)
        above = sizes[place]
        if above == rows or not place:
            return Cut(entries, rows, above)
        below = sizes[place - 1]
        fewer, fewer_rows = _fitting(entries, below, len(entries))
        padded_ns, cut_ns = self._latency.expected_ns(key, above), self._latency.expected_ns(key, below)
        if fewer and cut_ns and cut_ns * rows < padded_ns * fewer_rows:
            return Cut(fewer, fewer_rows, below)
        return Cut(entries, rows, above)


def _fitting(entries: Iterable[Entry[T]], max_rows: int, max_requests: int) -> tuple[list[Entry[T]], int]:
    """The first entries, up to `max_requests` of them, whose rows fit into `max_rows`; and their rows."""
    fitting: list[Entry[T]] = []
    rows = 0
    for entry in entries:
        if len(fitting) == max_requests or rows + entry.rows > max_rows:
            break
        rows += entry.rows
        fitting.append(entry)
    return fitting, rows
