"""The product's own queue in virtual time: what comes in, what leaves, and when, without a clock or a thread.

Lives here: a discrete-event loop around `scheduler.batch_queue.BatchQueue`, which makes every decision except the one
under study, when an idle instance may start. Must not: sleep, or draw random numbers; equal arguments give equal
outcomes. Everything that happens at one moment happens before the queue is asked what to do.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from statistics import fmean

from bench.batching.arrivals import Arrival, Source
from bench.batching.costs import Cost
from bench.batching.release import Greedy, Rule, Waiting
from bench.stats import percentile
from paceline.scheduler.batch_queue import BatchQueue
from paceline.scheduler.errors import DeadlineUnreachable
from paceline.scheduler.policy import BatchPolicy
from paceline.scheduler.request import Batch, Request

__all__ = ["Outcome", "Simulation", "simulate"]

_Request = Request[Arrival, None]


@dataclass(slots=True)
class Outcome:
    """What became of the requests that arrived after the warm-up, and of the batches that ended after it.

    Every request is counted once: answered (`in_time` or `late`), `refused` on arrival, `expired` or `given_up` in the
    queue, or `left` waiting or executing at the end.
    """

    offered: int = 0
    in_time: int = 0
    late: int = 0
    refused: int = 0
    expired: int = 0
    given_up: int = 0
    left: int = 0
    latencies_ns: list[int] = field(default_factory=list)
    batches: int = 0
    rows: int = 0
    padded_rows: int = 0
    busy_ns: int = 0
    elapsed_ns: int = 0

    @property
    def answers_per_s(self) -> float:
        return self.rows * 1e9 / self.elapsed_ns

    @property
    def batches_per_s(self) -> float:
        return self.batches * 1e9 / self.elapsed_ns

    @property
    def rows_per_batch(self) -> float:
        return self.rows / max(1, self.batches)

    @property
    def padding(self) -> float:
        """The share of padding among the rows that the model saw."""
        return 1 - self.rows / max(1, self.padded_rows)

    @property
    def mean_ms(self) -> float:
        return fmean(self.latencies_ns) / 1e6

    def percentile_ms(self, percent: float) -> float:
        return percentile(sorted(self.latencies_ns), percent) / 1e6


@dataclass(slots=True)
class _Running:
    batch: Batch[_Request]
    started_ns: int


class Simulation:
    """One run; see `simulate`."""

    def __init__(
        self,
        policy: BatchPolicy,
        cost: Cost,
        source: Source,
        *,
        rule: Rule | None = None,
        instances: int = 1,
        warmup_ns: int = 0,
        learns: bool = True,
    ) -> None:
        self._queue: BatchQueue[_Request] = BatchQueue(policy, instances)
        self._max_rows = policy.max_batch_rows
        self._cost = cost
        self._source = source
        self._rule: Rule = rule or Greedy()
        self._is_greedy = isinstance(self._rule, Greedy)
        self._idle = instances
        self._warmup_ns = warmup_ns
        self._learns = learns
        self._numbers = 0
        self._events: list[tuple[int, int, Arrival | _Running | None]] = []
        self._waiting: dict[_Request, None] = {}
        self._idle_since_ns = -1
        self._now_ns = 0
        self._wakes: set[int] = set()
        self.outcome = Outcome()

    def run(self, until_ns: int) -> Outcome:
        coming = self._source.arrivals()
        self._schedule_next(coming)
        while self._events and self._events[0][0] <= until_ns:
            self._now_ns = self._events[0][0]
            while self._events and self._events[0][0] == self._now_ns:
                self._handle(heapq.heappop(self._events)[2], coming)
            self._decide()
        outcome = self.outcome
        outcome.elapsed_ns = until_ns - self._warmup_ns
        running = (event for _, _, event in self._events if isinstance(event, _Running))
        left = [*self._waiting, *(entry for one in running for entry in one.batch.requests)]
        outcome.left = sum(entry.payload.at_ns >= self._warmup_ns for entry in left)
        return outcome

    def _schedule(self, at_ns: int, event: Arrival | _Running | None) -> None:
        self._numbers += 1
        heapq.heappush(self._events, (at_ns, self._numbers, event))

    def _schedule_next(self, coming: Iterator[Arrival]) -> None:
        arrival = next(coming, None)
        if arrival is not None:
            self._schedule(arrival.at_ns, arrival)

    def _handle(self, event: Arrival | _Running | None, coming: Iterator[Arrival]) -> None:
        if isinstance(event, Arrival):
            self._schedule_next(coming)
            self._arrive(event)
        elif event is not None:
            self._end(event)
        else:
            self._wakes.discard(self._now_ns)

    def _arrive(self, arrival: Arrival) -> None:
        counts = self._counts(arrival)
        self.outcome.offered += counts
        self._rule.arrived(self._now_ns, arrival.rows)
        request: _Request = Request(arrival, arrival.rows, arrival.key, self._now_ns, deadline_ns=arrival.deadline_ns)
        refusals = self._queue.push((request,))
        if not refusals:
            self._waiting[request] = None
        elif isinstance(refusals[0], DeadlineUnreachable):
            self.outcome.refused += counts
            self._follow(arrival)
        else:
            raise AssertionError("nothing but time is scarce here") from refusals[0]

    def _end(self, running: _Running) -> None:
        self._idle += 1
        self._rule.answered(self._now_ns, running.batch.rows)
        batch, outcome, duration_ns = running.batch, self.outcome, self._now_ns - running.started_ns
        self._queue.done(batch, self._now_ns, duration_ns if self._learns else None)
        if self._now_ns >= self._warmup_ns:
            outcome.batches += 1
            outcome.rows += batch.rows
            outcome.padded_rows += batch.padded_rows
            outcome.busy_ns += duration_ns
        for entry in batch.requests:
            if self._counts(entry.payload):
                in_time = self._now_ns <= entry.payload.deadline_ns
                outcome.in_time += in_time
                outcome.late += not in_time
                outcome.latencies_ns.append(self._now_ns - entry.payload.at_ns)
            self._follow(entry.payload)

    def _decide(self) -> None:
        idle = 0 if self._is_held() else self._idle
        decision = self._queue.poll(self._now_ns, idle)
        for entry in decision.expired:
            self.outcome.expired += self._leave(entry)
        for late in decision.unreachable:
            self.outcome.given_up += self._leave(late.request)
        for batch in decision.batches:
            self._start(batch)
        if decision.wake_ns is not None:
            self._wake_at(decision.wake_ns)

    def _start(self, batch: Batch[_Request]) -> None:
        self._idle -= 1
        self._idle_since_ns = -1
        for entry in batch.requests:
            del self._waiting[entry]
        self._schedule(self._now_ns + self._cost(batch.padded_rows), _Running(batch, self._now_ns))

    def _is_held(self) -> bool:
        """Whether the rule holds an idle instance back from what waits."""
        queue = self._queue
        if self._is_greedy or not self._idle or not queue.waiting.requests or queue.waiting.rows >= self._max_rows:
            return False
        if self._idle_since_ns < 0:
            self._idle_since_ns = self._now_ns
        oldest_ns = next(iter(self._waiting)).arrived_ns
        deadline_ns = min(entry.deadline_ns for entry in self._waiting)
        waiting = Waiting(self._now_ns, queue.waiting.rows, oldest_ns, deadline_ns, self._idle_since_ns)
        until_ns = self._rule.hold_until_ns(waiting)
        if until_ns > self._now_ns:
            self._wake_at(until_ns)
        return until_ns > self._now_ns

    def _wake_at(self, at_ns: int) -> None:
        if at_ns not in self._wakes:
            self._wakes.add(at_ns)
            self._schedule(at_ns, None)

    def _leave(self, request: _Request) -> bool:
        """Take the request from those that wait; returns whether it counts."""
        del self._waiting[request]
        self._follow(request.payload)
        return self._counts(request.payload)

    def _follow(self, arrival: Arrival) -> None:
        following = self._source.following(arrival, self._now_ns)
        if following is not None:
            self._schedule(following.at_ns, following)

    def _counts(self, arrival: Arrival) -> bool:
        return arrival.at_ns >= self._warmup_ns


def simulate(
    policy: BatchPolicy,
    cost: Cost,
    source: Source,
    until_ns: int,
    *,
    rule: Rule | None = None,
    instances: int = 1,
    warmup_ns: int = 0,
    learns: bool = True,
) -> Outcome:
    """Run `source` against a queue with `policy` until `until_ns`; each of `instances` takes `cost(rows)` for a batch.

    `rule` may hold idle instances back (default: never). Without `learns`, the queue isn't told execution times.
    """
    run = Simulation(policy, cost, source, rule=rule, instances=instances, warmup_ns=warmup_ns, learns=learns)
    return run.run(until_ns)
