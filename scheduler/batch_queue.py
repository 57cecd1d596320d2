"""The batcher's brain: which waiting requests leave together, and when.

Lives here: every decision. Must not: a clock, lock, await, log or callback; time comes in as `now_ns`, decisions go
out as a `Step`. The rule that keeps it so: this module imports nothing but data structures and the policy.

Requests wait in *lanes*, one per shape key, in order of arrival. A lane is *ready* when its head may leave with an idle
instance: a preferred prefix has formed, or the head has waited long enough. Ready lanes compete by the age of their
heads. Every lane that isn't ready has an item in `_due`, the heap of moments when waiting alone makes it ready.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Generic, TypeVar

from scheduler.errors import QueueFull, RequestTooLarge
from scheduler.lazy_heap import LazyHeap
from scheduler.policy import NEVER, BatchPolicy

__all__ = ["Batch", "BatchQueue", "Entry", "Step"]

T = TypeVar("T")


class Entry(Generic[T]):
    """One waiting request. `lane` is None once it has left; `seq` counts arrivals."""

    __slots__ = ("deadline_ns", "enqueued_ns", "lane", "payload", "rows", "seq")

    def __init__(self, payload: T, rows: int, seq: int, enqueued_ns: int, deadline_ns: int, lane: Lane[T]) -> None:
        self.payload = payload
        self.rows = rows
        self.seq = seq
        self.enqueued_ns = enqueued_ns
        self.deadline_ns = deadline_ns
        self.lane: Lane[T] | None = lane


class Lane(Generic[T]):
    """The waiting requests of one shape key, oldest first, and how far the search for a preferred prefix has come.

    The walk adds entries while their rows stay within the largest preferred size. `prefix` counts the entries that may
    leave at once (0: none yet); `closed` says that further arrivals can't change that. A token other than 0 names the
    lane's living item in the heap of ready lanes or of due ones.
    """

    __slots__ = (
        "closed", "due_token", "entries", "key", "prefix", "ready_token", "walked", "walked_rows", "walked_seq",
    )  # fmt: skip

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.entries: OrderedDict[int, Entry[T]] = OrderedDict()
        self.restart()

    def restart(self) -> None:
        """Forget what was found out about the entries: the first ones have changed."""
        self.ready_token = self.due_token = 0
        self.walked = self.walked_rows = self.prefix = 0
        self.walked_seq = -1
        self.closed = False

    @property
    def head(self) -> Entry[T]:
        return next(iter(self.entries.values()))


@dataclass(frozen=True, slots=True)
class Batch(Generic[T]):
    """Requests that execute together; all of one `key`, in order of arrival."""

    key: Hashable
    rows: int
    entries: tuple[Entry[T], ...]


@dataclass(frozen=True, slots=True)
class Step(Generic[T]):
    """What `poll` decided: batches to execute now, requests whose deadline passed, and when to poll again at the latest
    if nothing else happens (None: nothing is due by time alone)."""

    batches: tuple[Batch[T], ...]
    expired: tuple[Entry[T], ...]
    wake_ns: int | None


def _is_queued(entry: Entry[T], token: int) -> bool:
    return entry.lane is not None


def _is_ready(lane: Lane[T], token: int) -> bool:
    return lane.ready_token == token


def _is_due(lane: Lane[T], token: int) -> bool:
    return lane.due_token == token


class BatchQueue(Generic[T]):
    """Requests wait here until they leave exactly once: in a batch, cancelled or expired.

    Not thread-safe. `now_ns` must not decrease from call to call. push, cancel and poll are O(log n), amortised, in
    the number of waiting requests and lanes; a poll adds what it takes to build its batches.
    """

    def __init__(self, policy: BatchPolicy) -> None:
        self.policy = policy
        self.requests = 0
        self.rows = 0
        self._preferred = policy.preferred
        self._max_preferred = max(policy.preferred)
        self._delay_ns = policy.max_queue_delay_ns
        self._seq = 0
        self._tokens = 0
        self._lanes: dict[Hashable, Lane[T]] = {}
        self._stale: dict[Lane[T], None] = {}
        self._ready: LazyHeap[Lane[T]] = LazyHeap(_is_ready)
        self._due: LazyHeap[Lane[T]] = LazyHeap(_is_due)
        self._deadlines: LazyHeap[Entry[T]] = LazyHeap(_is_queued)

    @property
    def lanes(self) -> int:
        """How many shape keys have requests waiting."""
        return len(self._lanes)

    # hot path: push, poll and the finish of one request together stay within 5 us, see bench/micro.py
    def push(self, payload: T, rows: int, key: Hashable, now_ns: int, deadline_ns: int = NEVER) -> Entry[T]:
        """Let a request of `rows` rows wait. Raises RequestTooLarge or QueueFull, and then nothing has changed."""
        if not 0 < rows <= self.policy.max_batch_rows:
            raise RequestTooLarge(rows, self.policy.max_batch_rows)
        limit = self.policy.queue.max_queue_size
        if limit and self.requests >= limit:
            raise QueueFull(limit)
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = Lane(key)
        seq = self._seq = self._seq + 1
        entry = Entry(payload, rows, seq, now_ns, deadline_ns, lane)
        lane.entries[seq] = entry
        self.requests += 1
        self.rows += rows
        if deadline_ns != NEVER:
            self._deadlines.push(deadline_ns, seq, entry)
        if not lane.closed and lane not in self._stale:
            self._walk_over(lane, entry)
            self._file(lane)
        return entry

    def cancel(self, entry: Entry[T]) -> bool:
        """Take a request out. False if it has left already; then nothing changes."""
        if entry.lane is None:
            return False
        self._remove(entry)
        return True

    def poll(self, now_ns: int, idle: int) -> Step[T]:
        """Decide for this moment, with `idle` instances free: at most that many batches leave."""
        expired = self._expire(now_ns)
        if self._stale:
            self._settle()
        batches: list[Batch[T]] = []
        while len(batches) < idle and self._has_ready(now_ns):
            batches.append(self._take(self._ready.pop(), now_ns))
        return Step(tuple(batches), expired, self._wake_ns(may_start=len(batches) < idle))

    def flush(self) -> None:
        """From now on nothing waits for company: whatever is queued leaves as soon as an instance is idle."""
        self._delay_ns = 0
        for lane in self._lanes.values():
            self._file(lane)

    def _expire(self, now_ns: int) -> tuple[Entry[T], ...]:
        expired: list[Entry[T]] = []
        deadlines = self._deadlines
        while (first := deadlines.first_rank()) is not None and first <= now_ns:
            entry = deadlines.pop()
            self._remove(entry)
            expired.append(entry)
        return tuple(expired)

    def _remove(self, entry: Entry[T]) -> None:
        """Take one entry out of its lane, wherever it stands; the walk over it is redone at the next poll."""
        lane = entry.lane
        assert lane is not None
        del lane.entries[entry.seq]
        self._leave(entry)
        if not lane.entries:
            self._drop(lane)
        elif entry.seq <= lane.walked_seq:
            lane.restart()
            self._stale[lane] = None

    def _leave(self, entry: Entry[T]) -> None:
        entry.lane = None
        self.requests -= 1
        self.rows -= entry.rows

    def _drop(self, lane: Lane[T]) -> None:
        lane.restart()
        del self._lanes[lane.key]
        self._stale.pop(lane, None)

    def _settle(self) -> None:
        for lane in self._stale:
            self._walk(lane)
        self._stale.clear()

    def _walk(self, lane: Lane[T]) -> None:
        lane.restart()
        for entry in lane.entries.values():
            self._walk_over(lane, entry)
            if lane.closed:
                break
        self._file(lane)

    def _walk_over(self, lane: Lane[T], entry: Entry[T]) -> None:
        """Extend the walk by one entry. Triton's rule: the largest preferred prefix within reach is taken; if the next
        request would overshoot the largest preferred size before any was met, what precedes it goes without it."""
        rows = lane.walked_rows + entry.rows
        lane.walked_seq = entry.seq
        if lane.walked and rows > self._max_preferred:
            lane.closed = True
            lane.prefix = lane.prefix or lane.walked
            return
        lane.walked += 1
        lane.walked_rows = rows
        if rows in self._preferred:
            lane.prefix = lane.walked
        if rows >= self._max_preferred or lane.walked == self.policy.max_batch_requests:
            lane.closed = True
            lane.prefix = lane.walked

    def _file(self, lane: Lane[T]) -> None:
        """Put the lane where polls will find it, unless it is there already."""
        if lane.prefix or not self._delay_ns:
            self._make_ready(lane)
        elif not lane.due_token:
            lane.due_token = self._tokens = self._tokens + 1
            self._due.push(lane.head.enqueued_ns + self._delay_ns, lane.due_token, lane)

    def _make_ready(self, lane: Lane[T]) -> None:
        if not lane.ready_token:
            lane.ready_token = self._tokens = self._tokens + 1
            self._ready.push(lane.head.seq, lane.ready_token, lane)

    def _has_ready(self, now_ns: int) -> bool:
        """Whether some lane is ready; those whose heads have waited long enough become so."""
        due = self._due
        while (first := due.first_rank()) is not None and first <= now_ns:
            lane = due.pop()
            lane.due_token = 0
            self._make_ready(lane)
        return self._ready.first_rank() is not None

    def _take(self, lane: Lane[T], now_ns: int) -> Batch[T]:
        """Let the lane's next batch leave: all that fits once the head is overdue, else the preferred prefix, else
        all."""
        overdue = self._delay_ns and lane.head.enqueued_ns + self._delay_ns <= now_ns
        limit = lane.prefix if lane.prefix and not overdue else len(lane.entries)
        entries, rows = self._pop_while_fits(lane, min(limit, self.policy.max_batch_requests or limit))
        if lane.entries:
            self._walk(lane)
        else:
            self._drop(lane)
        return Batch(lane.key, rows, entries)

    def _pop_while_fits(self, lane: Lane[T], limit: int) -> tuple[tuple[Entry[T], ...], int]:
        taken: list[Entry[T]] = []
        rows = 0
        waiting = lane.entries
        while waiting and len(taken) < limit:
            entry = next(iter(waiting.values()))
            if rows + entry.rows > self.policy.max_batch_rows:
                break
            del waiting[entry.seq]
            self._leave(entry)
            rows += entry.rows
            taken.append(entry)
        return tuple(taken), rows

    def _wake_ns(self, *, may_start: bool) -> int | None:
        deadline = self._deadlines.first_rank()
        due = self._due.first_rank() if may_start else None
        if deadline is None or due is None:
            return due if deadline is None else deadline
        return min(deadline, due)
