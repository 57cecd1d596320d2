"""The batcher's brain: which waiting requests leave together, and when.

Lives here: every decision. Must not: a clock, lock, await, log or callback; time comes in as `now_ns`, decisions go out
as a `Step`. The rule that keeps it so: this module imports nothing but data structures and the policy.

Requests wait in lanes, one per shape key. A lane is *ready* when its head may leave with an idle instance: a preferred
prefix has formed, or somebody in it has waited long enough. Ready lanes compete by the order of their heads: priority,
then age. Every lane that isn't ready has an item in `_due`, the heap of moments when waiting alone makes it ready.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Generic, NamedTuple, TypeVar

from scheduler.errors import DeadlineUnreachable, RequestTooLarge
from scheduler.lane import DELAYED, LEVEL, Entry, Lane, Watch
from scheduler.latency import LatencyModel
from scheduler.lazy_heap import LazyHeap
from scheduler.policy import NEVER, BatchPolicy, TimeoutAction
from scheduler.returns import Returns
from scheduler.sizing import Cut, Sizing, Unreachable
from scheduler.waiting import Room, Waiting

__all__ = ["Batch", "BatchQueue", "Entry", "Step", "Unreachable"]

T = TypeVar("T")


class Batch(NamedTuple, Generic[T]):
    """Requests that execute together; all of one `key`, in the order of service. `padded_rows` is what the model sees:
    `rows`, or more where only some sizes are allowed. `number` counts the batches of the queue, from 1."""

    number: int
    key: Hashable
    rows: int
    padded_rows: int
    entries: tuple[Entry[T], ...]


class Step(NamedTuple, Generic[T]):
    """What `poll` decided: batches to execute now, requests that have waited too long, requests that could only be
    answered too late, and when to poll again at the latest if nothing else happens (None: nothing is due by time)."""

    batches: tuple[Batch[T], ...] = ()
    expired: tuple[Entry[T], ...] = ()
    unreachable: tuple[Unreachable[T], ...] = ()
    wake_ns: int | None = None


def _is_watched(watch: Watch[T], token: int) -> bool:
    return watch.entry is not None


def _is_ready(lane: Lane[T], token: int) -> bool:
    return lane.ready_token == token


def _is_due(lane: Lane[T], token: int) -> bool:
    return lane.due_token == token


class BatchQueue(Generic[T]):
    """Requests wait here until they leave exactly once: in a batch, cancelled, expired or given up.

    Not thread-safe. `now_ns` must not decrease from call to call. push, cancel and poll are O(log n), amortised, in
    the number of waiting requests and lanes; a poll adds what it takes to build its batches and, where there is a
    delay, to walk the first batch of a lane anew from which something was cancelled.
    """

    def __init__(self, policy: BatchPolicy, instances: int = 1, room: Room | None = None) -> None:
        self.policy = policy
        self._waiting = Waiting(policy, room)
        self.latency = LatencyModel(policy.max_batch_rows)
        self._returns = Returns()
        configured = policy.max_queue_delay_ns or policy.preferred_batch_rows or policy.max_batch_requests
        self._holds = policy.await_returns and not configured and policy.max_batch_rows > 1
        self._sizing = Sizing(policy, self.latency)
        self._allowance = self._sizing.allowance
        self._instances = instances
        self._max_rows = policy.max_batch_rows
        self._has_levels = policy.priority_levels > 0
        self._queue_policy, self._queue_policies = policy.queue, policy.priority_queue
        self._pads = bool(policy.batch_sizes)
        self._delay_ns = policy.max_queue_delay_ns
        self._seq = self._tokens = self._batches = 0
        self._lanes: dict[Hashable, Lane[T]] = {}
        self._stale: dict[Lane[T], None] = {}
        self._ready: LazyHeap[Lane[T]] = LazyHeap(_is_ready)
        self._due: LazyHeap[Lane[T]] = LazyHeap(_is_due)
        self._deadlines: LazyHeap[Watch[T]] = LazyHeap(_is_watched)
        self._running: dict[int, tuple[Batch[T], int]] = {}
        self._prefer()

    @property
    def requests(self) -> int:
        """How many requests wait."""
        return self._waiting.requests

    @property
    def held(self) -> int:
        """How many requests have left and may come back."""
        return self._waiting.held

    @property
    def rows(self) -> int:
        """How many rows they have."""
        return self._waiting.rows

    @property
    def size_bytes(self) -> int:
        """How many bytes they have said to be."""
        return self._waiting.size_bytes

    @property
    def levels(self) -> list[int]:
        """The priority levels of which requests wait."""
        return self._waiting.levels

    def requests_of_level(self, level: int) -> int:
        """How many requests of a priority level wait; of level 0, where there are no levels, all."""
        return self._waiting.requests_of_level(level)

    @property
    def allowed_rows(self) -> int:
        """How many rows a batch may have by now: the policy's, or fewer while memory is short."""
        return self._allowance.rows

    @property
    def lanes(self) -> int:
        """How many shape keys have requests waiting."""
        return len(self._lanes)

    # hot path: push, poll and the finish of one request together take 2 to 4 us in one lane, and 4.5 to 7 us where each
    # request is a lane and a batch of its own; see bench/micro.py
    def push(
        self,
        payload: T,
        rows: int,
        key: Hashable,
        now_ns: int,
        *,
        size_bytes: int = 0,
        priority: int = 0,
        timeout_ns: int = 0,
        rpc_deadline_ns: int = NEVER,
    ) -> Entry[T]:
        """Let a request of `rows` rows and `size_bytes` bytes wait.

        `timeout_ns` is its own queue timeout (0: none). Raises RequestTooLarge, QueueFull or DeadlineUnreachable, and
        then nothing has changed.
        """
        level, queue = 0, self._queue_policy
        if self._has_levels:
            level = self.policy.level_of(priority)
            queue = self._queue_policies.get(level, queue)
        if not 0 < rows <= self._max_rows:
            raise RequestTooLarge(rows, self._max_rows)
        if queue.max_queue_size or self._waiting.is_bounded:
            self._waiting.refuse_if_full(rows, size_bytes, level, queue.max_queue_size)
        deadline_ns = rpc_deadline_ns
        if deadline_ns - now_ns < (self._waiting.requests + 2) * self.latency.longest_ns and self.policy.deadline_aware:
            self._refuse_unreachable(rows, key, level, now_ns, deadline_ns)
        if timeout_ns or queue.default_timeout_ns:
            deadline_ns = min(deadline_ns, queue.timeout_at_ns(now_ns, timeout_ns))
        lane = self._lanes.get(key)
        if lane is None:
            lane = self._lanes[key] = Lane(key)
        self._seq += 1
        order = level * LEVEL + self._seq
        entry = Entry(payload, rows, size_bytes, level, order, now_ns, deadline_ns, rpc_deadline_ns, lane)
        self._waiting.count(entry, 1)
        if deadline_ns != NEVER:
            self._watch_deadline(entry)
        if self._holds:
            self._returns.arrived(key, rows, now_ns)
        self._add(lane, entry)
        return entry

    def cancel(self, entry: Entry[T]) -> bool:
        """Take a request out. False if it has left already; then nothing changes."""
        if entry.lane is None:
            return False
        self._remove(entry)
        return True

    def take_all(self) -> list[Entry[T]]:
        """Everything that waits leaves, in order of arrival within each lane, without executing."""
        entries = [entry for lane in self._lanes.values() for entry in lane]
        for entry in entries:
            self._remove(entry)
        return entries

    def poll(self, now_ns: int, idle: int, ahead: int = 0, starts_ns: int = 0) -> Step[T]:
        """Decide for this moment, with `idle` instances free: at most that many batches leave, and up to `ahead` more
        that can't become any larger, for instances that still execute others. They start at once, or at `starts_ns` if
        that is later: the instances are about to be free."""
        if self._allowance.due_ns <= now_ns:
            self._allowance.grow(now_ns)
            self._prefer()
        deadlines = self._deadlines.items
        expired = self._expire(now_ns) if deadlines and deadlines[0][0] <= now_ns else ()
        if self._stale:
            self._settle()
        batches: list[Batch[T]] = []
        unreachable: list[Unreachable[T]] = []
        starts_ns = max(now_ns, starts_ns)
        while len(batches) < idle + ahead:
            if len(batches) >= idle:
                if not self._may_be_full():
                    break
                starts_ns = max(now_ns, self._first_end_ns(now_ns))
            if self._due.items:
                self._awake(now_ns)
            lane = self._ready.pop_living()
            if lane is None:
                break
            lane.ready_token = 0
            if len(batches) >= idle and not self._is_full(lane):
                # Nor may a full lane overtake it, or it could wait for ever.
                self._make_ready_anew(lane)
                break
            if self._holds and self._hold(lane, now_ns):
                continue
            if lane.requests == 1 and not self._may_be_late(starts_ns):
                batches.append(self._take_only(lane, starts_ns))
            elif (batch := self._take(lane, now_ns, starts_ns, unreachable)) is not None:
                batches.append(batch)
        wake_ns = None
        if self._deadlines.items or self._due.items:
            wake_ns = self._wake_ns(may_start=len(batches) < idle)
        return Step(tuple(batches), expired, tuple(unreachable), wake_ns)

    def done(self, batch: Batch[T], now_ns: int, duration_ns: int | None) -> None:
        """Learn that a batch has ended, having executed for `duration_ns`; None if it failed."""
        self._running.pop(batch.number, None)
        if duration_ns is not None:
            self.latency.observe(batch.key, batch.padded_rows, duration_ns, now_ns)
            if self._holds:
                self._returns.answered(batch.key, batch.rows, self.latency.base_ns(batch.key), now_ns)

    def hold(self, batch: Batch[T]) -> None:
        """The batch hasn't begun, and may be put back: until `release` it takes as much room as if it waited."""
        for entry in batch.entries:
            self._waiting.hold(entry, 1)

    def release(self, batch: Batch[T]) -> None:
        """It has begun, or is about to be put back."""
        for entry in batch.entries:
            self._waiting.hold(entry, -1)

    def put_back(self, batch: Batch[T], entries: Sequence[Entry[T]]) -> None:
        """A batch won't execute. Those of its `entries` that still want to wait where they did before, as if it hadn't
        left."""
        self._running.pop(batch.number, None)
        if not entries:
            return
        lane = self._lanes.get(batch.key)
        if lane is None:
            lane = self._lanes[batch.key] = Lane(batch.key)
        for entry in entries:
            entry.lane = lane
            self._waiting.count(entry, 1)
            if entry.deadline_ns != NEVER:
                self._watch_deadline(entry)
        lane.put_back(entries)
        if self._delay_ns:
            lane.restart()
            self._stale[lane] = None
        else:
            self._file_anew(lane)

    def exhausted(self, rows: int, now_ns: int) -> None:
        """Learn that memory wasn't enough for an execution of `rows` rows: for a while batches have fewer."""
        self._allowance.exhausted(rows, now_ns)
        self._prefer()

    def again(self, key: Hashable, entries: Sequence[Entry[T]], now_ns: int) -> tuple[Batch[T], Sequence[Entry[T]]]:
        """A batch of entries that have left in an earlier one, which failed; it starts now. And those of them for which
        it has no room: since then less may have been allowed."""
        fitting, rows = self._sizing.fitting(entries, len(entries))
        return self._start(key, fitting, rows, self._sizing.padded(rows), now_ns), entries[len(fitting) :]

    def flush(self) -> None:
        """From now on nothing waits for company: whatever is queued leaves as soon as an instance is idle."""
        self._delay_ns = 0
        self._holds = False
        self._stale.clear()
        for lane in self._lanes.values():
            self._file_anew(lane)

    def _prefer(self) -> None:
        """Prefer what the policy does, as far as it is allowed for now; else the most that is allowed."""
        allowed = self._allowance.rows
        self._preferred = frozenset(rows for rows in self.policy.preferred if rows <= allowed) or frozenset((allowed,))
        self._max_preferred = max(self._preferred)
        if self._delay_ns:
            for lane in self._lanes.values():
                lane.restart()
                self._stale[lane] = None

    def _refuse_unreachable(self, rows: int, key: Hashable, level: int, now_ns: int, rpc_deadline_ns: int) -> None:
        """Refuse what is certain to be late: even if only full batches are ahead of it and it executes alone."""
        alone_ns = self.latency.proven_ns(key, self._sizing.padded(rows), now_ns)
        if not alone_ns:
            return
        needed_ns = self._wait_ns(key, level, now_ns) + alone_ns
        if now_ns + needed_ns > rpc_deadline_ns:
            raise DeadlineUnreachable(rpc_deadline_ns - now_ns, needed_ns)

    def _wait_ns(self, key: Hashable, level: int, now_ns: int) -> int:
        """How long a request of `level` that arrives now will wait at least, going by measured executions: until an
        instance is free, and for the full batches ahead of it in its own lane. What other lanes hold may take turns."""
        lane = self._lanes.get(key)
        full_batches = self._rows_ahead(lane, level) // self._max_rows if lane is not None else 0
        wait_ns = full_batches * self.latency.proven_ns(key, self._max_rows, now_ns) // self._instances
        if len(self._running) >= self._instances:
            wait_ns += max(0, self._first_end_ns(now_ns) - now_ns)
        return wait_ns

    def _first_end_ns(self, now_ns: int) -> int:
        """When the first of the batches that execute is likely to end; `now_ns` if none does."""
        return min((self._end_ns(*running, now_ns) for running in self._running.values()), default=now_ns)

    def _may_be_full(self) -> bool:
        """Whether some lane may hold a batch that can't become any larger; a cheap look before the exact one."""
        waiting, most = self._waiting, self.policy.max_batch_requests
        return waiting.rows >= self._allowance.rows or 0 < most <= waiting.requests

    def _is_full(self, lane: Lane[T]) -> bool:
        return lane.rows >= self._allowance.rows or 0 < self.policy.max_batch_requests <= lane.requests

    def _end_ns(self, batch: Batch[T], started_ns: int, now_ns: int) -> int:
        """When a batch that executes is likely to end."""
        return started_ns + self.latency.proven_ns(batch.key, batch.padded_rows, now_ns)

    def _rows_ahead(self, lane: Lane[T], level: int) -> int:
        if not self._has_levels:
            return lane.rows
        if len(self._lanes) > 1:
            return 0  # not counted by lane and level
        return self._waiting.rows_up_to(level)

    def _watch_deadline(self, entry: Entry[T]) -> None:
        self._tokens += 1
        entry.watch = Watch(entry)
        self._deadlines.push(entry.deadline_ns, self._tokens, entry.watch)

    def _add(self, lane: Lane[T], entry: Entry[T]) -> None:
        lane.add(entry)
        if not self._delay_ns:
            if not lane.ready_token or entry.order < lane.filed_order:
                self._file_anew(lane)
        elif entry.order < lane.walked_order:
            lane.restart()
            self._stale[lane] = None
        elif not lane.closed and lane not in self._stale:
            lane.walk_over(entry, self._preferred, self._max_preferred, self.policy.max_batch_requests)
            if lane.prefix:
                self._make_ready(lane)
            else:
                self._make_due(lane)

    def _expire(self, now_ns: int) -> tuple[Entry[T], ...]:
        expired: list[Entry[T]] = []
        deadlines = self._deadlines
        while (first := deadlines.first_rank()) is not None and first <= now_ns:
            entry = deadlines.pop().entry
            assert entry is not None
            if self._may_be_delayed(entry, now_ns):
                self._delay(entry)
            else:
                self._remove(entry)
                expired.append(entry)
        return tuple(expired)

    def _may_be_delayed(self, entry: Entry[T], now_ns: int) -> bool:
        action = self.policy.queue_policy(entry.level).timeout_action
        return action is TimeoutAction.DELAY and entry.rpc_deadline_ns > now_ns

    def _delay(self, entry: Entry[T]) -> None:
        """Let the entry wait on behind all others of its level, bound by its RPC's deadline alone."""
        lane = entry.lane
        assert lane is not None
        self._take_out(lane, entry)
        self._seq += 1
        entry.order = entry.level * LEVEL + DELAYED + self._seq
        entry.deadline_ns = entry.rpc_deadline_ns
        entry.unwatch()
        if entry.deadline_ns != NEVER:
            self._watch_deadline(entry)
        self._add(lane, entry)

    def _remove(self, entry: Entry[T]) -> None:
        """Take one entry out for good, wherever it stands."""
        lane = entry.lane
        assert lane is not None
        self._take_out(lane, entry)
        self._leave(entry)
        if not lane.requests:
            self._drop(lane)

    def _take_out(self, lane: Lane[T], entry: Entry[T]) -> None:
        """Out of the lane; if the walk had passed it, it is walked anew at the next poll."""
        lane.remove(entry)
        if not self._delay_ns:
            if entry.order == lane.filed_order:
                self._file_anew(lane)
        elif entry.order <= lane.walked_order:
            lane.restart()
            self._stale[lane] = None

    def _leave(self, entry: Entry[T]) -> None:
        entry.lane = None
        entry.unwatch()
        self._waiting.count(entry, -1)

    def _drop(self, lane: Lane[T]) -> None:
        lane.ready_token = lane.due_token = 0
        del self._lanes[lane.key]
        if self._stale:
            self._stale.pop(lane, None)

    def _settle(self) -> None:
        for lane in self._stale:
            self._walk(lane)
        self._stale.clear()

    def _walk(self, lane: Lane[T]) -> None:
        lane.walk(self._preferred, self._max_preferred, self.policy.max_batch_requests)
        if lane.prefix:
            self._make_ready(lane)
        else:
            self._make_due(lane)

    def _file_anew(self, lane: Lane[T]) -> None:
        """Where nobody waits for company every lane is ready, and no walk is needed until it is its turn."""
        lane.due_token = 0
        if lane.requests:
            self._make_ready_anew(lane)
        else:
            lane.ready_token = 0

    def _make_due(self, lane: Lane[T]) -> None:
        if not lane.due_token:
            lane.due_token = self._tokens = self._tokens + 1
            self._due.push(lane.oldest_ns + self._delay_ns, lane.due_token, lane)

    def _make_ready(self, lane: Lane[T]) -> None:
        if not lane.ready_token:
            self._make_ready_anew(lane)

    def _make_ready_anew(self, lane: Lane[T]) -> None:
        lane.ready_token = self._tokens = self._tokens + 1
        lane.filed_order = lane.head.order
        self._ready.push(lane.filed_order, lane.ready_token, lane)

    def _awake(self, now_ns: int) -> None:
        """Lanes in which somebody has waited long enough become ready."""
        due = self._due
        while (first := due.first_rank()) is not None and first <= now_ns:
            lane = due.pop()
            lane.due_token = 0
            self._make_ready(lane)

    def _hold(self, lane: Lane[T], now_ns: int) -> bool:
        """Keep the lane waiting if those who were just answered will soon make its batch worth more; until then."""
        if lane.rows >= self._allowance.rows:
            return False
        until_ns = self._returns.hold_until_ns(lane.key, lane.rows, now_ns)
        first_ns = self._deadlines.first_rank()
        if first_ns is not None:
            until_ns = min(until_ns, first_ns - self.latency.longest_ns)
        if until_ns <= now_ns:
            return False
        lane.due_token = self._tokens = self._tokens + 1
        self._due.push(until_ns, lane.due_token, lane)
        return True

    def _take(self, lane: Lane[T], now_ns: int, starts_ns: int, unreachable: list[Unreachable[T]]) -> Batch[T] | None:
        """Let the lane's next batch leave: all that fits once somebody is overdue, else the preferred prefix, else all.

        None if requests had to be given up instead, which changes what is ready.
        """
        key = lane.key
        cut = self._cut(lane, now_ns)
        late: list[Unreachable[T]] = []
        if self._may_be_late(starts_ns):
            cut, late = self._sizing.most_in_time(key, lane, cut, starts_ns)
        for entry in [one.entry for one in late] if late else cut.entries:
            lane.remove(entry)
            self._leave(entry)
        if not lane.requests:
            self._drop(lane)
        elif self._delay_ns:
            self._walk(lane)
        else:
            self._file_anew(lane)
        if late:
            unreachable += late
            return None
        return self._start(key, cut.entries, cut.rows, cut.padded_rows, starts_ns)

    def _take_only(self, lane: Lane[T], now_ns: int) -> Batch[T]:
        """What `_take` comes to for one request with time to spare, which needs no thought: all that is in the lane."""
        entry, key = lane.head, lane.key
        lane.remove(entry)
        self._leave(entry)
        self._drop(lane)
        rows = entry.rows
        return self._start(key, (entry,), rows, self._sizing.padded(rows) if self._pads else rows, now_ns)

    def _cut(self, lane: Lane[T], now_ns: int) -> Cut[T]:
        limit = lane.requests
        if not self._delay_ns:
            limit = self._preferred_prefix(lane) or limit
        elif lane.prefix and lane.oldest_ns + self._delay_ns > now_ns:
            limit = lane.prefix
        return self._sizing.cut(lane.key, lane, min(limit, self.policy.max_batch_requests or limit))

    def _preferred_prefix(self, lane: Lane[T]) -> int:
        """How many requests make up the preferred prefix of a lane that wasn't walked so far. Where the largest batch
        is preferred that is whatever fits into it."""
        if not self.policy.preferred_batch_rows:
            return 0
        lane.walk(self._preferred, self._max_preferred, self.policy.max_batch_requests)
        return lane.prefix

    def _may_be_late(self, now_ns: int) -> bool:
        """Whether some deadline is so near that an execution could miss it; a cheap look before the exact one."""
        deadlines = self._deadlines.items
        return bool(deadlines) and deadlines[0][0] < now_ns + self.latency.longest_ns and self.policy.deadline_aware

    def _start(self, key: Hashable, entries: Sequence[Entry[T]], rows: int, padded_rows: int, now_ns: int) -> Batch[T]:
        self._batches += 1
        batch = Batch(self._batches, key, rows, padded_rows, tuple(entries))
        self._running[self._batches] = (batch, now_ns)
        return batch

    def _wake_ns(self, *, may_start: bool) -> int | None:
        deadline = self._deadlines.first_rank() if self._deadlines.items else None
        due = self._due.first_rank() if may_start and self._due.items else None
        if deadline is None or due is None:
            return due if deadline is None else deadline
        return min(deadline, due)
