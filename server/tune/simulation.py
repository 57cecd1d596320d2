"""What a load would meet if a model were batched by some policy: the product's own batcher, in a time of its own.

Lives here: instances that take as long as they are said to, and a load that comes as it is said to. Must not: decide
anything about batches; `Batcher` and its queue do, the very ones that serve. The rule: equal arguments give equal
results, on any machine.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import groupby, islice
from random import Random
from typing import NamedTuple

from paceline.clients.load.arrivals import Arrival, Arrivals
from paceline.clients.load.histogram import Histogram
from paceline.scheduler.batcher import Batcher
from paceline.scheduler.observer import BatchReport, Drop
from paceline.scheduler.policy import BatchPolicy
from paceline.scheduler.request import Request
from paceline.scheduler.runner import AnyRunner, Done, Outcome
from paceline.scheduler.waiting import SharedQueueLimits
from paceline.server.tune.clock import ARRIVAL, END, SENDING, SimulatedClock
from paceline.server.tune.costs import Costs, costs_at

__all__ = ["Closed", "Contents", "Cost", "Open", "Served", "Simulated", "rows_per_batch", "simulate"]

Cost = Callable[[int, int, float], int]
"""How many nanoseconds an execution of so many rows of a size takes; of all that it may take, the one below which the
given share of them (from 0 to 1) lies."""

_USUAL_WEIGHT = 0.1


@dataclass(frozen=True, slots=True)
class Contents:
    """What a request has, as far as batching goes: rows, key and sizes as `Request` has them. A row's size is
    `row_size` times its `sizes`, or those that they are filled up to."""

    rows: int = 1
    key: Hashable = ""
    sizes: tuple[int, ...] = ()
    row_size: int = 1

    def size(self, sizes: tuple[int, ...]) -> int:
        """Of each row, filled up to `sizes`."""
        return self.row_size * math.prod(sizes)


@dataclass(frozen=True, slots=True)
class Open:
    """Requests come whether or not others have been answered."""

    arrivals: Arrivals


@dataclass(frozen=True, slots=True)
class Closed:
    """So many clients, each of which asks again as soon as it has its answer."""

    clients: int


@dataclass(frozen=True, slots=True)
class Served:
    """What serves: so many `instances`, batches by `policy`, of executions that take what `cost` says, and besides what
    `costs` say, which ascend by their numbers of requests: of each request, by what batches lately had. Instances have
    `slots`, of which one computes at a time; of what an execution takes, the share `prepared` comes before that."""

    policy: BatchPolicy
    instances: int
    cost: Cost
    costs: Sequence[Costs] = (Costs(),)
    slots: int = 1
    prepared: float = 0.0


@dataclass(frozen=True, slots=True)
class Simulated:
    """What became of the requests that count. `latencies`: of those that were answered, from when they were due.
    `refused`: the others. `batches`: how many had so many rows. `busy`: the share of the instances' time in which they
    computed. `offered`: how many came a second; `throughput`: how many were answered meanwhile, fewer if that is too
    much."""

    offered: float
    throughput: float
    latencies: Histogram
    refused: int
    batches: Mapping[int, int]
    busy: float

    @property
    def rows_per_batch(self) -> float:
        return rows_per_batch(self.batches)


def rows_per_batch(batches: Mapping[int, int]) -> float:
    """The mean, of so many batches by their rows; 0 without one."""
    return sum(rows * number for rows, number in batches.items()) / max(1, sum(batches.values()))


async def simulate(
    served: Served,
    load: Open | Closed,
    *,
    requests: int,
    contents: Sequence[Contents] = (Contents(),),
    seed: int = 0,
    warmup: float = 0.1,
) -> Simulated:
    """Let `requests` requests come and wait until the last has left. Arrivals say which of `contents` each has; clients
    send them in turn. The first requests, a share of `warmup`, don't count: the batcher learns from them how long
    executions take. An open load has to have so many."""
    return await _World(served, load, requests, contents, seed, int(requests * warmup)).run()


class _Executed(NamedTuple):
    results: Sequence[None]
    waited_ns: int


class _Payload(NamedTuple):
    number: int
    contents: Contents


_Handed = tuple[Sequence[_Payload], int, Done[None]]
"""Requests, rows that the model sees, and who is told of the end."""


@dataclass(slots=True)
class _Instance:
    """Has computed for so long, and does until then."""

    computed_ns: int = 0
    until_ns: int = 0


class _Slot:
    """Executes for as long as `cost` says, on a thread that needs the event loop only to tell of the end."""

    def __init__(
        self,
        clock: SimulatedClock,
        served: Served,
        random: Random,
        on_begin: Callable[[int], Costs],
        instance: _Instance,
    ) -> None:
        self._clock, self._random, self._on_begin, self._instance = clock, random, on_begin, instance
        self._cost, self._lengths, self._prepared = served.cost, served.policy.lengths, served.prepared
        self.stages = served.slots == 1
        self._next: _Handed | None = None
        self._executes, self._ends_ns = False, 0

    def start(self) -> None:
        pass

    stop = call_off = start

    def run(self, payloads: Sequence[_Payload], padded_rows: int, done: Done[None]) -> None:
        self._next = payloads, padded_rows, done
        if not self._executes:
            self._begin_next(self._clock.now_ns())

    def take_back(self) -> bool:
        # The thread has taken the next one already, though the loop hasn't heard of the end.
        if self._ends_ns <= self._clock.now_ns():
            return False
        self._next = None
        return True

    def _begin_next(self, now_ns: int) -> None:
        """If there is one."""
        self._executes = self._next is not None
        if self._next is None:
            return
        (payloads, rows, done), self._next = self._next, None
        columns = zip(*[one.contents.sizes for one in payloads], strict=True)
        sizes = tuple([padded(max(column)) for padded, column in zip(self._lengths, columns, strict=True)])
        # All of a batch have the same key, and so the same size apart from these.
        alone_ns = self._cost(rows, payloads[0].contents.size(sizes), self._random.random())
        duration_ns = round(alone_ns * self._on_begin(len(payloads)).slowdown)
        prepared_ns = round(duration_ns * self._prepared)
        # Another slot of the instance may still compute.
        waited_ns = max(0, self._instance.until_ns - now_ns - prepared_ns)
        self._ends_ns = self._instance.until_ns = now_ns + waited_ns + duration_ns
        self._instance.computed_ns += duration_ns - prepared_ns
        outcome = Outcome(now_ns, self._ends_ns, executed=_Executed([None] * len(payloads), waited_ns))
        self._clock.at(self._ends_ns, END, partial(self._on_end, done, outcome))

    def _on_end(self, done: Done[None], outcome: Outcome[None], at_ns: int) -> None:
        self._begin_next(at_ns)
        done(outcome)


class _World:
    """One load on one model."""

    def __init__(
        self, served: Served, load: Open | Closed, requests: int, contents: Sequence[Contents], seed: int, first: int
    ) -> None:
        self._served, self._load = served, load
        self._clock = SimulatedClock(Random(f"{seed} waits"))
        self._costs_of = cache(partial(costs_at, served.costs))
        # What was met with batches of so many requests on average had smaller and larger ones, too.
        self._usual_requests, self._begun = 1.0, 0
        self._costs = self._costs_of(1)
        self._made = self._left = self._refused = 0
        self._requests, self._contents, self._first = requests, contents, first
        self._due_ns: list[int] = []
        self._numbers: list[int] = []
        # When whoever sends has time again.
        self._sender_ns = 0
        self._arrivals: Iterator[Arrival] = iter(())
        self._instances = [_Instance() for _ in range(served.instances)]
        slots: dict[AnyRunner, int] = {
            _Slot(self._clock, served, Random(f"{seed} {place} {slot}"), self._on_begin, instance): place
            for place, instance in enumerate(self._instances)
            for slot in range(served.slots)
        }
        self._batcher: Batcher[_Payload, None] = Batcher(
            served.policy, [*slots], clock=self._clock, observer=self, shared_limits=SharedQueueLimits(0, 0),
            instance_of=slots.__getitem__,
        )  # fmt: skip
        self._latencies_ns: list[int] = []
        self._answered_ns: list[int] = []
        self._batches: Counter[int] = Counter()

    async def run(self) -> Simulated:
        self._batcher.start()
        if isinstance(self._load, Open):
            self._arrivals = self._load.arrivals.times()
            self._expect(islice(self._arrivals, 1))
        else:
            self._expect((0, number) for number in range(self._load.clients))
        busy_ns = began_ns = 0
        while self._left < self._requests:
            if self._made <= self._first:
                busy_ns, began_ns = self._computed_ns(), self._clock.now_ns()
            await self._clock.go_on()
        self._batcher.close()
        ended_ns = self._clock.now_ns()
        # Until the last came: what then still waits isn't answered at the rate of a load that goes on.
        first_ns, last_ns = self._due_ns[self._first], self._due_ns[-1]
        counted = sum(first_ns < at_ns <= last_ns for at_ns in self._answered_ns)
        per_s = 1e9 / (last_ns - first_ns) if last_ns > first_ns else 0.0
        return Simulated(
            offered=per_s * (self._requests - self._first - 1),
            throughput=per_s * counted,
            latencies=Histogram.of(self._latencies_ns),
            refused=self._refused,
            batches=dict(sorted(self._batches.items())),
            busy=(self._computed_ns() - busy_ns) / max(1, (ended_ns - began_ns) * len(self._instances)),
        )

    def on_drop(self, drop: Drop) -> None:
        """Whoever submits counts those that are refused, and `_on_answers` the others."""

    def on_batch(self, report: BatchReport) -> None:
        if report.requests[0].payload.number >= self._first:
            self._batches[report.rows] += 1

    def _on_begin(self, requests: int) -> Costs:
        self._begun += 1
        self._usual_requests += max(_USUAL_WEIGHT, 1 / self._begun) * (requests - self._usual_requests)
        self._costs = self._costs_of(round(self._usual_requests, 1))
        return self._costs

    def _computed_ns(self) -> int:
        return sum(one.computed_ns for one in self._instances)

    def _expect(self, arrivals: Iterable[Arrival]) -> None:
        """All of `arrivals`, up to the last request. Of an open load there is one, and each brings about the next."""
        for at_ns, number in arrivals:
            if len(self._due_ns) < self._requests:
                self._due_ns.append(at_ns)
                self._numbers.append(number)
                self._clock.at(at_ns, SENDING, self._on_sending)

    def _on_sending(self, at_ns: int) -> None:
        """A request is due. Those that are due at the same time are sent one after the other."""
        self._sender_ns = max(self._sender_ns, at_ns) + round(self._costs.sender_ns / 2)

        def arrive(_: int) -> None:
            self._on_arrival(at_ns)

        self._clock.at(self._sender_ns, ARRIVAL, arrive)
        self._expect(islice(self._arrivals, 1))

    def _on_arrival(self, due_ns: int) -> None:
        number, self._made = self._made, self._made + 1
        contents = self._contents[self._numbers[number] % len(self._contents)]
        request: Request[_Payload, None] = Request(
            _Payload(number, contents), contents.rows, contents.key, self._clock.now_ns(),
            sizes=contents.sizes, tag=due_ns,
        )  # fmt: skip
        request.on_answers = self._on_answers
        self._clock.spend(self._costs.loop_ns / 2, self._costs.waits)
        self._batcher.announce(self._submit, request)

    def _submit(self, requests: list[Request[_Payload, None]]) -> None:
        # What is submitted together has the same rows and key.
        for _, alike in groupby(requests, lambda one: (one.rows, one.key)):
            group = list(alike)
            refusals = self._batcher.submit(group) or [None] * len(group)
            self._leave([one for one, why in zip(group, refusals, strict=True) if why is not None], answered=False)

    def _on_answers(self, requests: list[Request[_Payload, None]]) -> None:
        for one in requests:
            self._leave([one], answered=one.answered)

    def _leave(self, requests: Sequence[Request[_Payload, None]], *, answered: bool) -> None:
        costs = self._costs
        for one in requests:
            self._clock.spend(costs.loop_ns / 2, costs.waits)
            self._left += 1
            # The sender takes answers one after the other, too.
            self._sender_ns = max(self._sender_ns, self._clock.now_ns()) + round(costs.sender_ns / 2)
            ended_ns = self._sender_ns
            if answered:
                self._answered_ns.append(ended_ns)
            if one.payload.number >= self._first and answered:
                self._latencies_ns.append(ended_ns - one.tag)
            elif one.payload.number >= self._first:
                self._refused += 1
            if isinstance(self._load, Closed):
                self._expect([(ended_ns, len(self._due_ns))])
