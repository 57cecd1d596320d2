"""The queue against a naive model that recomputes everything from a plain list, step by step, with a manual clock."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.scheduler.batch_queue import BatchQueue
from paceline.scheduler.errors import QueueFull, RequestTooLarge
from paceline.scheduler.policy import NEVER, BatchPolicy, QueueLimits, QueuePolicy, TimeoutAction
from paceline.scheduler.request import Batch, Request
from paceline.scheduler.sizing import LONGEST_PAUSE_NS, PAUSE_NS
from tests.lengths import LONG

Queued = Request[int, None]


@dataclass
class Waiting:
    number: int
    key: str
    rows: int
    size_bytes: int
    arrived_ns: int
    timeout_at_ns: int
    deadline_ns: int
    level: int
    delayed: int = 0

    @property
    def order(self) -> tuple[int, int, int]:
        """Priority level; in each, the undelayed by arrival, then the delayed in the order of their delays."""
        return (self.level, self.delayed, self.number)

    @property
    def act_at_ns(self) -> int:
        return self.deadline_ns if self.delayed else min(self.timeout_at_ns, self.deadline_ns)


@dataclass
class NaiveQueue:
    """Triton's dynamic batching per key, the first ready head first; quadratic and obvious."""

    policy: BatchPolicy
    flushing: bool = False
    delays: int = 0
    waiting: list[Waiting] = field(default_factory=list)
    shortages: list[tuple[int, int]] = field(default_factory=list)

    def allowed(self, now_ns: int) -> int:
        """The rows that a batch may have, from all shortages of memory: (moment, rows of the execution)."""
        most = self.policy.max_batch_rows
        sizes = self.policy.batch_sizes or range(1, most + 1)
        rows, pause_ns, quiet_since_ns, is_attempt = most, PAUSE_NS, NEVER, False
        for at_ns, failed_rows in [*self.shortages, (now_ns, 0)]:
            while quiet_since_ns + pause_ns <= at_ns:
                quiet_since_ns += pause_ns
                if rows == most:
                    pause_ns, quiet_since_ns, is_attempt = PAUSE_NS, NEVER, False
                    break
                larger = [size for size in sizes if size > rows]
                rows, is_attempt = max([larger[0], *(size for size in larger if size <= 2 * rows)]), True
            if failed_rows:
                pause_ns = min(2 * pause_ns, LONGEST_PAUSE_NS) if is_attempt else pause_ns
                half = max([sizes[0], *(size for size in sizes if size <= failed_rows // 2)])
                rows, quiet_since_ns, is_attempt = min(rows, half), at_ns, False
        return rows

    def preferred(self, now_ns: int) -> set[int]:
        allowed = self.allowed(now_ns)
        return {rows for rows in self.policy.preferred if rows <= allowed} or {allowed}

    def poll(self, now_ns: int, idle: int, spare: int) -> tuple[list[list[int]], list[int]]:
        expired = self.expire(now_ns)
        batches = []
        while candidates := [b for key in self.lane_keys() if (b := self.batch(key, now_ns))]:
            batch = min(candidates, key=lambda b: b[0].order)
            if len(batches) >= (idle + spare if self.is_enough(batch[0].key, now_ns) else idle):
                break
            self.waiting = [one for one in self.waiting if one not in batch]
            batches.append([one.number for one in batch])
        return batches, [one.number for one in expired]

    def is_enough(self, key: str, now_ns: int) -> bool:
        """Whether more requests could make the lane's next batch no larger."""
        lane = [one for one in self.waiting if one.key == key]
        most = self.policy.max_batch_requests
        return sum(one.rows for one in lane) >= self.allowed(now_ns) or 0 < most <= len(lane)

    def expire(self, now_ns: int) -> list[Waiting]:
        """Refuse requests whose time is up, in order of deadline; delay those that may wait on behind the others."""
        gone = []
        due = sorted((one for one in self.waiting if one.act_at_ns <= now_ns), key=lambda one: one.act_at_ns)
        for one in due:
            action = self.policy.queue_policy(one.level).timeout_action
            if action is TimeoutAction.DELAY and one.deadline_ns > now_ns:
                self.delays += 1
                one.delayed = self.delays
            else:
                gone.append(one)
        self.waiting = sorted((one for one in self.waiting if one not in gone), key=lambda one: one.order)
        return gone

    def lane_keys(self) -> set[str]:
        return {one.key for one in self.waiting}

    def batch(self, key: str, now_ns: int) -> list[Waiting]:
        """What may leave this lane now; empty if it has to wait. A head too large for what is allowed goes alone."""
        lane = [one for one in self.waiting if one.key == key]
        delay_ns = 0 if self.flushing else self.policy.max_queue_delay_ns
        preferred = self.preferred(now_ns)
        largest = max(preferred)
        reach = self.fitting(lane, largest)
        if delay_ns and min(one.arrived_ns for one in reach) + delay_ns <= now_ns:
            return self.fitting(lane, self.allowed(now_ns))
        sums = [sum(one.rows for one in reach[: n + 1]) for n in range(len(reach))]
        hits = [n + 1 for n, rows in enumerate(sums) if rows in preferred]
        overshoots = len(reach) < len(lane) or sums[-1] > largest
        if len(reach) == self.policy.max_batch_requests or (overshoots and not hits):
            return reach
        return lane[: hits[-1]] if hits else ([] if delay_ns else reach)

    def rows_before(self, key: str, level: int) -> int:
        """Rows of the lane that are served before a request that arrives now."""
        lane = [one for one in self.waiting if one.key == key]
        return sum(one.rows for one in lane if (one.level, one.delayed > 0) <= (level, False))

    def fitting(self, lane: list[Waiting], limit_rows: int) -> list[Waiting]:
        taken = lane[:1]
        for one in lane[1 : self.policy.max_batch_requests or None]:
            if sum(each.rows for each in taken) + one.rows > limit_rows:
                break
            taken.append(one)
        return taken

    def is_full(self, level: int, rows: int, size_bytes: int) -> bool:
        """Whether there is no room for a request of that size."""
        limits, bound = self.policy.limits, self.policy.queue_policy(level).max_queue_size
        return bool(
            (bound and sum(one.level == level for one in self.waiting) >= bound)
            or (limits.max_rows and sum(one.rows for one in self.waiting) + rows > limits.max_rows)
            or (limits.max_bytes and sum(one.size_bytes for one in self.waiting) + size_bytes > limits.max_bytes)
        )


@st.composite
def queue_policies(draw: st.DrawFn) -> QueuePolicy:
    return QueuePolicy(
        max_queue_size=draw(st.sampled_from([0, 0, 3])),
        default_timeout_ns=draw(st.sampled_from([0, 30])),
        allow_timeout_override=draw(st.booleans()),
        timeout_action=draw(st.sampled_from(TimeoutAction)),
    )


def requests() -> st.SearchStrategy[tuple[int, str, int, int, int, int]]:
    """Rows, key, patience, timeout, priority, bytes."""
    return st.tuples(
        st.sampled_from([1, 1, 1, 2, 3, 5, 9]),
        st.sampled_from("aabbc"),
        st.sampled_from([NEVER, NEVER, NEVER, 0, 7, 40]),
        st.sampled_from([0, 0, 9]),
        st.sampled_from([0, 1, 2, 3, 9]),
        st.sampled_from([0, 8, 30]),
    )


@st.composite
def policies(draw: st.DrawFn) -> BatchPolicy:
    max_rows = draw(st.sampled_from([1, 4, 8, 8, 12]))
    preferred = draw(st.lists(st.integers(1, min(6, max_rows)), max_size=3, unique=True))
    levels = draw(st.sampled_from([0, 1, 3, 3]))
    return BatchPolicy(
        max_batch_rows=max_rows,
        preferred_batch_rows=tuple(preferred),
        max_queue_delay_ns=draw(st.sampled_from([0, 20, 20])),
        max_batch_requests=draw(st.sampled_from([0, 0, 0, 1, 2, 3])),
        priority_levels=levels,
        default_priority_level=min(2, levels),
        queue=draw(queue_policies()),
        priority_queue=draw(st.dictionaries(st.integers(1, levels), queue_policies())) if levels else {},
        batch_sizes=draw(st.sampled_from([(), (), (), (1, max_rows), (max_rows // 2, max_rows)]))
        if max_rows > 2
        else (),
        limits=QueueLimits(max_rows=draw(st.sampled_from([0, 0, 20])), max_bytes=draw(st.sampled_from([0, 0, 70]))),
    )


class QueueAgainstNaive(RuleBasedStateMachine):
    @initialize(policy=policies())
    def begin(self, policy: BatchPolicy) -> None:
        self.policy = policy
        self.queue: BatchQueue[Queued] = BatchQueue(policy)
        self.naive = NaiveQueue(policy)
        self.queued: dict[int, Queued] = {}
        self.now_ns = 1_000
        self.pushed = self.left = 0
        self.out: list[tuple[Batch[Queued], list[Waiting]]] = []

    @rule(requests=st.lists(requests(), min_size=1, max_size=6))
    def push(self, requests: list[tuple[int, str, int, int, int, int]]) -> None:
        """Several between two polls: otherwise orders that only many requests can have would hardly ever occur."""
        for rows, key, patience_ns, timeout_ns, priority, size_bytes in requests:
            self.push_together(rows, key, [self.now_ns], [patience_ns], timeout_ns, priority, size_bytes)

    @rule(
        rows=st.sampled_from([1, 1, 1, 2, 9]),
        key=st.sampled_from("aabbc"),
        ages_ns=st.lists(st.sampled_from([0, 0, 1, 5]), min_size=1, max_size=6).map(sorted),
        patience_ns=st.lists(st.sampled_from([NEVER, NEVER, 7, 40]), min_size=6, max_size=6),
        timeout_ns=st.sampled_from([0, 0, 9]),
        priority=st.sampled_from([0, 1, 3]),
        size_bytes=st.sampled_from([0, 8, 30]),
    )
    def push_group(
        self,
        rows: int,
        key: str,
        ages_ns: list[int],
        patience_ns: list[int],
        timeout_ns: int,
        priority: int,
        size_bytes: int,
    ) -> None:
        arrivals_ns = [self.now_ns + age_ns for age_ns in ages_ns]
        self.now_ns = arrivals_ns[-1]
        self.push_together(rows, key, arrivals_ns, patience_ns[: len(ages_ns)], timeout_ns, priority, size_bytes)

    def push_together(
        self,
        rows: int,
        key: str,
        arrivals_ns: list[int],
        patience_ns: list[int],
        timeout_ns: int,
        priority: int,
        size_bytes: int,
    ) -> None:
        """Requests end up where they would one after the other, and are refused if they would be."""
        level = self.policy.level_of(priority)
        assert self.queue._lanes.rows_before(key, level) == self.naive.rows_before(key, level), "what is served before"
        group = [Queued(0, rows, key, arrived_ns, priority=priority) for arrived_ns in arrivals_ns]
        for one, patience in zip(group, patience_ns, strict=True):
            one.size_bytes, one.timeout_ns = size_bytes, timeout_ns
            one.deadline_ns = NEVER if patience == NEVER else self.now_ns + patience
        refusals = self.queue.push(group)
        assert len(refusals) == (len(group) if any(refusals) else 0)
        for one, refusal in zip(group, refusals or [None] * len(group), strict=True):
            full = self.naive.is_full(level, rows, size_bytes)
            assert isinstance(refusal, RequestTooLarge) == (rows > self.policy.max_batch_rows)
            assert isinstance(refusal, QueueFull) == (full and rows <= self.policy.max_batch_rows)
            assert one.waits == (refusal is None)
            if one.waits:
                self.note(one, level)

    def note(self, entry: Queued, level: int) -> None:
        self.pushed += 1
        entry.payload = number = self.pushed
        self.queued[number] = entry
        timeout_at_ns = self.policy.queue_policy(level).timeout_at_ns(entry.arrived_ns, entry.timeout_ns)
        bounds_ns = timeout_at_ns, entry.deadline_ns
        new = Waiting(number, str(entry.key), entry.rows, entry.size_bytes, entry.arrived_ns, *bounds_ns, level)
        self.naive.waiting = sorted([*self.naive.waiting, new], key=lambda one: one.order)

    @precondition(lambda self: self.pushed)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        number = data.draw(st.integers(1, self.pushed))
        was_waiting = any(one.number == number for one in self.naive.waiting)
        assert self.queue.cancel(self.queued[number]) == was_waiting
        self.naive.waiting = [one for one in self.naive.waiting if one.number != number]
        self.left += was_waiting

    @rule(idle=st.sampled_from([0, 1, 1, 1, 2]), spare=st.sampled_from([0, 0, 0, 1]))
    def poll(self, idle: int, spare: int) -> None:
        deadlines = {one.number: one.deadline_ns for one in self.naive.waiting}
        before = {one.number: one for one in self.naive.waiting}
        decision = self.queue.poll(self.now_ns, idle, spare)
        batches, expired = self.naive.poll(self.now_ns, idle, spare)
        left = [[entry.payload for entry in batch.requests] for batch in decision.batches]
        assert left == batches, "which requests leave, together with whom, and in which order"
        assert sorted(entry.payload for entry in decision.expired) == sorted(expired), "which have waited too long"
        assert not decision.unreachable
        for batch in decision.batches:
            assert 0 < batch.rows == sum(entry.rows for entry in batch.requests) <= self.policy.max_batch_rows
            assert batch.rows <= self.queue.allowed_rows or len(batch.requests) == 1
            assert all(deadlines[entry.payload] > self.now_ns for entry in batch.requests)
            self.out.append((batch, [before[entry.payload] for entry in batch.requests]))
        assert self.queue.allowed_rows == self.naive.allowed(self.now_ns)
        self.left += len(expired) + sum(map(len, batches))
        self.check_wake(decision.wake_ns, may_start=len(batches) < idle)

    @precondition(lambda self: self.out)
    @rule(data=st.data(), executes=st.booleans())
    def end(self, data: st.DataObject, executes: bool) -> None:
        """A batch has ended; or it won't execute, and its requests that weren't cancelled meanwhile wait on."""
        batch, members = self.out.pop(data.draw(st.integers(0, len(self.out) - 1)))
        if executes:
            self.queue.done(batch, self.now_ns, None)
            return
        keep = data.draw(st.lists(st.booleans(), min_size=len(members), max_size=len(members)))
        self.queue.put_back(batch, [entry for entry, stays in zip(batch.requests, keep, strict=True) if stays])
        stay = [one for one, stays in zip(members, keep, strict=True) if stays]
        self.naive.waiting = sorted([*self.naive.waiting, *stay], key=lambda one: one.order)
        self.left -= len(stay)

    def check_wake(self, wake_ns: int | None, *, may_start: bool) -> None:
        """The wake-up is the first moment at which the naive model would decide something new, and lies ahead."""
        moments = [one.act_at_ns for one in self.naive.waiting if one.act_at_ns != NEVER]
        if may_start:
            moments += [self.oldest_ns(key) + self.policy.max_queue_delay_ns for key in self.naive.lane_keys()]
        assert wake_ns == (min(moments) if moments else None), "when the queue has to be polled next"
        assert wake_ns is None or wake_ns > self.now_ns

    def oldest_ns(self, key: str) -> int:
        return min(one.arrived_ns for one in self.naive.waiting if one.key == key)

    @rule(rows=st.sampled_from([1, 2, 3, 5, 8, 12]))
    def run_out_of_memory(self, rows: int) -> None:
        self.naive.shortages.append((self.now_ns, rows))
        self.queue.exhausted(rows, self.now_ns)

    @rule(by_ns=st.sampled_from([1, 7, 20, 40, PAUSE_NS]))
    def advance(self, by_ns: int) -> None:
        self.now_ns += by_ns

    @precondition(lambda self: self.pushed > 20)
    @rule()
    def flush(self) -> None:
        self.queue.flush()
        self.naive.flushing = True

    @invariant()
    def counters_equal_sums(self) -> None:
        if not hasattr(self, "queue"):
            return
        waiting = self.naive.waiting
        assert self.queue.waiting.requests == len(waiting) == self.pushed - self.left
        assert self.queue.waiting.rows == sum(one.rows for one in waiting)
        assert self.queue.waiting.size_bytes == sum(one.size_bytes for one in waiting)
        assert self.queue.lanes == len(self.naive.lane_keys())
        for level in range(1, 4) if self.policy.priority_levels else [0]:
            assert self.queue.waiting.of_level(level) == sum(one.level == level for one in waiting)

    def teardown(self) -> None:
        """Every request leaves: those that still wait go in batches once there are plenty of instances."""
        if not hasattr(self, "queue"):
            return
        self.flush()
        self.poll(idle=10_000, spare=0)
        left = self.queue.waiting
        assert left.requests == left.rows == left.size_bytes == self.queue.lanes == 0


QueueAgainstNaive.TestCase.settings = settings(
    max_examples=1000 if LONG else 120,
    stateful_step_count=60,
    deadline=None,
    report_multiple_bugs=False,
    suppress_health_check=[HealthCheck.too_slow],
)


@pytest.mark.timeout(600)  # after a failure, a short sequence of calls that shows it is searched for, for minutes
class TestQueueAgainstNaive(QueueAgainstNaive.TestCase):  # type: ignore[name-defined]
    pass
