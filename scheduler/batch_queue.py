"""Decides which waiting requests leave together, and when.

Lives here: every decision. Must not: a clock, lock, await, log or callback; time comes in as `now_ns`, decisions go out
as a `Decision`. The rule that ensures this: this module imports nothing but data structures and the policy.

Requests wait in `lanes`, one per shape key, which decide who goes next. `sizing` decides how many of them leave. This
module decides whether requests are admitted and how long they may stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple

from paceline.scheduler.errors import DeadlineUnreachable, QueueFull, RequestTooLarge
from paceline.scheduler.lanes import Lane, Lanes, order_of
from paceline.scheduler.latency import Executing, LatencyModel, cost_size
from paceline.scheduler.lengths import common_sizes
from paceline.scheduler.policy import NEVER, BatchPolicy, TimeoutAction
from paceline.scheduler.request import Batch, RequestT
from paceline.scheduler.returning_callers import ReturningCallers
from paceline.scheduler.sizing import Allowed, Sizing, Unreachable
from paceline.scheduler.waiting import SharedQueueLimits, Timers, Waiting, earliest

Refusal = RequestTooLarge | QueueFull | DeadlineUnreachable


class Decision(NamedTuple, Generic[RequestT]):
    """What `poll` decided: batches to execute now, requests that have waited too long, requests that could only be
    answered too late, and when to poll again at the latest if nothing else happens (None: nothing is due by time)."""

    batches: tuple[Batch[RequestT], ...] = ()
    expired: tuple[RequestT, ...] = ()
    unreachable: tuple[Unreachable[RequestT], ...] = ()
    wake_ns: int | None = None


class BatchQueue(Generic[RequestT]):
    """Requests wait here until they leave, each exactly once: in a batch, cancelled, expired or given up. `waiting`
    lets others see how many wait.

    Not thread-safe. `now_ns` must not decrease from call to call. push, cancel and poll are O(log n), amortised, in the
    number of waiting requests and lanes. A poll also takes the time to build its batches and, if there is a delay, to
    walk again the first batch of a lane from which something was cancelled.
    """

    def __init__(self, policy: BatchPolicy, instances: int = 1, shared_limits: SharedQueueLimits | None = None) -> None:
        self.policy = policy
        self.waiting = Waiting(policy, shared_limits)
        self.latency = LatencyModel(policy.max_batch_rows)
        self._returns = ReturningCallers()
        configured = policy.max_queue_delay_ns or policy.preferred_batch_rows or policy.max_batch_requests
        self._awaits_returns = policy.await_returns and not configured and policy.max_batch_rows > 1
        self._may_keep_idle = True
        self._enough_rows = min(policy.preferred)
        self.sizing = Sizing(policy, self.latency)
        self._allowance = self.sizing.allowance
        self._executing = Executing(self.latency, instances, policy.max_batch_rows)
        self._max_rows = policy.max_batch_rows
        self._has_levels = policy.priority_levels > 0
        self._pads = bool(policy.batch_sizes)
        self._lengths = policy.lengths
        self._arrived = 0
        self._lanes: Lanes[RequestT] = Lanes(policy)
        self._timers: Timers[RequestT] = Timers()

    def worth_waiting_for(self, announced: int) -> int:
        """How many more requests, besides `announced` ones, an idle instance may be kept waiting for, if they are like
        those that wait: there is room for them, and no full batch or preferred size without them."""
        waiting = self.waiting
        missing_rows = min(self._enough_rows, self._allowance.rows) - waiting.rows - announced
        if not self._may_keep_idle or missing_rows <= 0:
            return 0
        policy = self.policy
        room = min([waiting.room(one, policy.queue_policy(one).max_queue_size) for one in waiting.levels or (0,)])
        if most := policy.max_batch_requests:
            room = min(room, most - waiting.requests)
        fitting = -(-missing_rows * max(1, waiting.requests) // max(1, waiting.rows))
        return max(0, min(fitting, room - announced))

    @property
    def spare_until_ns(self) -> int:
        """Until when the waiting requests may be kept waiting: the one whose deadline or timeout comes first may use
        half of the time that it had beyond an execution's. The rest is for whatever may take longer than expected."""
        first = self._timers.first()
        if first is None:
            return NEVER
        return first.arrived_ns + (first.act_at_ns - self.latency.longest_ns - first.arrived_ns) // 2

    @property
    def allowed_rows(self) -> int:
        """How many rows a batch may have now: as many as the policy says, or fewer while memory is short."""
        return self._allowance.rows

    @property
    def lanes(self) -> int:
        """How many shape keys have requests waiting."""
        return len(self._lanes)

    # hot path: push, poll and the finish of one request together take 2 to 4 us in one lane, and 4.5 to 7 us where each
    # request is a lane and a batch of its own; see bench/micro.py
    def push(self, group: Sequence[RequestT]) -> Sequence[Refusal | None]:
        """Add requests that arrived one after the other, and have equal rows, key, bytes, priority and queue timeout.

        Returns why requests are refused, and nothing changes for these; None for others; nothing at all if none is.
        """
        first, requests = group[0], len(group)
        rows, waiting, level, queue = first.rows, self.waiting, 0, self.policy.queue
        if self._has_levels:
            level = self.policy.level_of(first.priority)
            queue = self.policy.queue_policy(level)
        if not 0 < rows <= self._max_rows:
            return [RequestTooLarge(rows, self._max_rows) for _ in group]
        refusal: Refusal | None = waiting.full(
            requests, requests * rows, requests * first.size_bytes, level, queue.max_queue_size
        )
        if refusal is None and self.policy.deadline_aware:
            deadline_ns = first.deadline_ns if requests == 1 else min([one.deadline_ns for one in group])
            left_ns = deadline_ns - group[-1].arrived_ns
            # A cheap check before the exact one.
            if left_ns < (waiting.requests + requests + 1) * self.latency.longest_ns:
                refusal = self._unreachable(group, level, left_ns)
        if refusal is not None:
            if requests == 1:
                return [refusal]
            # What is too much for all of them may not be for each.
            refusals = [one for each in group for one in self.push([each]) or (None,)]
            return refusals if any(refusals) else ()
        if self._lengths:
            sizes = common_sizes(self._lengths, group)
            self.latency.expect(cost_size(self._max_rows, sizes))
        order = order_of(level, self._arrived) if level else self._arrived
        self._arrived += requests
        for request in group:
            order += 1
            request.level, request.order = level, order
            act_at_ns = request.deadline_ns
            if request.timeout_ns or queue.default_timeout_ns:
                act_at_ns = min(act_at_ns, queue.timeout_at_ns(request.arrived_ns, request.timeout_ns))
            request.act_at_ns = act_at_ns
            if act_at_ns != NEVER:
                self._timers.start(request)
            if self._awaits_returns:
                self._returns.arrived(request.key, rows, request.arrived_ns)
        waiting.add(first, requests)
        self._lanes.add(group)
        return ()

    def cancel(self, request: RequestT) -> bool:
        """Take a request out. False if it has left already; then nothing changes."""
        if not request.waits:
            return False
        self._remove(request)
        return True

    def take_all(self) -> list[RequestT]:
        """Remove and return everything that waits, in order of service within each lane, without executing it."""
        requests = list(self._lanes)
        for request in requests:
            self._remove(request)
        return requests

    def poll(self, now_ns: int, idle: int, spare: int = 0, starts_ns: int = 0) -> Decision[RequestT]:
        """Decide what happens now, with `idle` instances free. At most that many batches leave, and up to `spare` more
        that can't become any larger, for instances that still execute others. They start at once, or at `starts_ns` if
        that is later: the instances are about to be free."""
        if self._allowance.due_ns <= now_ns:
            self._allowance.grow(now_ns)
            self._lanes.prefer(self._allowance.rows)
        timers = self._timers.items
        expired = self._expire(now_ns) if timers and timers[0][0] <= now_ns else ()
        batches: list[Batch[RequestT]] = []
        unreachable: list[Unreachable[RequestT]] = []
        starts_ns = max(now_ns, starts_ns)
        # Here nothing waits that is too late. Each pass takes one lane's batch; a lane that was given up, taken from or
        # postponed has been filed again, so the next pass sees who is first now.
        while len(batches) < idle + spare:
            if len(batches) >= idle:
                # Only spare slots are left: what could still grow waits until an instance has ended its execution. This
                # is a cheap check before the exact one.
                if not self._is_full(self.waiting):
                    break
                starts_ns = max(now_ns, self._executing.first_end_ns(now_ns))
            lane = self._lanes.next_ready(now_ns)
            if lane is None:
                break
            if len(batches) >= idle and not self._is_full(lane):
                # A full lane mustn't overtake it either, or it could wait for ever.
                self._lanes.make_ready(lane)
                break
            if self._awaits_returns and self._postpone(lane, now_ns):
                continue
            if (batch := self._take(lane, now_ns, starts_ns, unreachable)) is not None:
                batches.append(batch)
        wake_ns = self._timers.first_rank() if self._timers.items else None
        if len(batches) < idle and self._lanes.due.items:
            wake_ns = earliest(wake_ns, self._lanes.due.first_rank())
        return Decision(tuple(batches), expired, tuple(unreachable), wake_ns)

    def done(self, batch: Batch[RequestT], now_ns: int, duration_ns: int | None) -> None:
        """Learn that a batch has ended, having executed for `duration_ns`; None if it failed, or nothing ran."""
        self._executing.end(batch)
        if duration_ns is not None:
            size = batch.padded_rows
            if batch.sizes:
                size = cost_size(size, batch.sizes)
            self.latency.observe(batch.key, size, duration_ns, now_ns)
            if self.sizing.stops:
                self.sizing.growth.observe(batch.key, size, duration_ns, now_ns)
            if self._awaits_returns:
                self._returns.answered(batch.key, batch.rows, self.latency.of(batch.key).base_ns(), now_ns)

    def reserve(self, batch: Batch[RequestT]) -> None:
        """Count a batch that hasn't begun, and may be put back, as if it still waited, until `release`."""
        for request in batch.requests:
            self.waiting.reserved.add(request)

    def release(self, batch: Batch[RequestT]) -> None:
        """End `reserve`: the batch has begun, or is about to be put back."""
        self.waiting.reserved.remove(batch.requests)

    def put_back(self, batch: Batch[RequestT], requests: Sequence[RequestT]) -> None:
        """Put back a batch that won't execute: `requests`, those still wanted, wait where they did before."""
        self._executing.end(batch)
        if not requests:
            return
        for request in requests:
            self.waiting.add(request)
            self._timers.start(request)
        self._lanes.put_back(requests)

    def exhausted(self, rows: int, now_ns: int) -> Allowed:
        """Learn that memory wasn't enough for an execution of `rows` rows: for a while, batches have fewer. Returns
        what was allowed before, for `forgive`."""
        before = self._allowance.exhausted(rows, now_ns)
        self._lanes.prefer(self._allowance.rows)
        return before

    def forgive(self, before: Allowed) -> None:
        """Learn that the batch's size wasn't at fault for a shortage: allow what was allowed `before`."""
        self._allowance.forgive(before)
        self._lanes.prefer(self._allowance.rows)

    def again(
        self, requests: Sequence[RequestT], now_ns: int, most_rows: int
    ) -> tuple[Batch[RequestT], Sequence[RequestT]]:
        """Begin a batch, now, of requests whose earlier batch failed. Returns it, and the requests that don't fit: it
        may have `most_rows` rows (0: any number), or fewer if less is allowed by now."""
        cut = self.sizing.of(*self.sizing.fitting(requests, len(requests), most_rows))
        batch = self._executing.begin(cut.requests, cut.rows, cut.padded_rows, now_ns, cut.sizes)
        return batch, requests[len(cut.requests) :]

    def flush(self) -> None:
        """From now on, nothing waits for more requests: whatever is queued leaves as soon as an instance is idle."""
        self._awaits_returns = self._may_keep_idle = False
        self._lanes.flush()

    def _unreachable(self, group: Sequence[RequestT], level: int, left_ns: int) -> DeadlineUnreachable | None:
        """The error of a request, with `left_ns` until its deadline, that is certain to be late: even if only full
        batches go before it and it executes alone. Of several, any that may be."""
        first, now_ns = group[0], group[-1].arrived_ns
        alone = self.sizing.of([first], first.rows)
        alone_ns = self.latency.of(first.key).proven_ns(cost_size(alone.padded_rows, alone.sizes), now_ns)
        if not alone_ns and len(group) == 1:
            return None
        rows_before = self._lanes.rows_before(first.key, level)
        needed_ns = self._executing.least_wait_ns(first.key, rows_before, now_ns) + alone_ns
        if len(group) == 1 and needed_ns <= left_ns:
            return None
        return DeadlineUnreachable(left_ns, needed_ns)

    def _expire(self, now_ns: int) -> tuple[RequestT, ...]:
        expired: list[RequestT] = []
        timers = self._timers
        while (first := timers.first_rank()) is not None and first <= now_ns:
            request = timers.pop().request
            assert request is not None
            action = self.policy.queue_policy(request.level).timeout_action
            if action is TimeoutAction.DELAY and request.deadline_ns > now_ns:
                # Behind all others of its level; from now on, only its RPC's deadline bounds its wait.
                self._lanes.remove(request)
                self._arrived += 1
                request.order = order_of(request.level, self._arrived, demoted=True)
                request.act_at_ns = request.deadline_ns
                timers.stop((request,))
                timers.start(request)
                self._lanes.add((request,))
            else:
                self._remove(request)
                expired.append(request)
        return tuple(expired)

    def _remove(self, request: RequestT) -> None:
        """Take one request out for good, wherever it stands."""
        self._lanes.remove(request)
        self._timers.stop((request,))
        self.waiting.remove((request,))

    def _is_full(self, waiting: Lane[RequestT] | Waiting) -> bool:
        """Whether more requests could make the next batch of those `waiting` no larger."""
        return waiting.rows >= self._allowance.rows or 0 < self.policy.max_batch_requests <= waiting.requests

    def _postpone(self, lane: Lane[RequestT], now_ns: int) -> bool:
        """Whether the lane is postponed, as callers that were just answered will soon make its batch worth more."""
        if self._is_full(lane):
            return False
        until_ns = self._returns.hold_until_ns(lane.key, lane.rows, now_ns)
        first_ns = self._timers.first_rank()
        if first_ns is not None:
            until_ns = min(until_ns, first_ns - self.latency.longest_ns)
        if until_ns <= now_ns:
            return False
        self._lanes.make_due(lane, until_ns)
        return True

    # hot path
    def _take(
        self, lane: Lane[RequestT], now_ns: int, starts_ns: int, unreachable: list[Unreachable[RequestT]]
    ) -> Batch[RequestT] | None:
        """Take the lane's next batch.

        None if requests had to be given up instead, which changes what is ready.
        """
        timers = self._timers.items
        late: list[Unreachable[RequestT]] = []
        # Whether some deadline is so near that an execution could miss it; a cheap check before the exact one.
        may_be_late = bool(timers) and timers[0][0] < starts_ns + self.latency.longest_ns and self.policy.deadline_aware
        leaving: Sequence[RequestT]
        # A lone request with time to spare is its own batch. Otherwise the lane says how many may leave, the sizing how
        # many of these do, and deadlines may change which: then some are given up, and the rest is looked at again.
        sizes: tuple[int, ...] = ()
        if lane.only is not None and not may_be_late and not self._lengths:
            leaving, rows = (lane.only,), lane.rows
            padded_rows = self.sizing.padded(rows) if self._pads else rows
        else:
            cut = self.sizing.cut(lane, self._lanes.releasable(lane, now_ns), now_ns)
            if may_be_late:
                cut, late = self.sizing.most_in_time(lane.key, lane, cut, starts_ns)
            leaving, rows, padded_rows, sizes = cut
            if late:
                leaving = [one.request for one in late]
        self._lanes.take(lane, leaving)
        if timers:  # else none runs
            self._timers.stop(leaving)
        self.waiting.remove(leaving)
        if late:
            unreachable += late
            return None
        return self._executing.begin(leaving, rows, padded_rows, starts_ns, sizes)
