"""A load that is simulated: its requests meet what they would meet at the batcher that serves, and each leaves once."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.clients.load.arrivals import Constant, Poisson, Recorded
from paceline.clients.load.histogram import Histogram
from paceline.scheduler.batcher import Batcher
from paceline.scheduler.policy import BatchPolicy, QueueLimits, QueuePolicy
from paceline.scheduler.request import Request
from paceline.scheduler.runner import Done
from paceline.scheduler.testing import ManualClock, RecordingObserver, StepRunner
from paceline.server.tune.costs import Costs
from paceline.server.tune.simulation import Closed, Contents, Cost, Open, Served, Simulated, simulate
from tests.lengths import LONG

US, MS = 1_000, 1_000_000

delays = st.sampled_from([0, 200 * US, 3 * MS])


@st.composite
def policies(draw: st.DrawFn) -> BatchPolicy:
    most = draw(st.integers(1, 8))
    return BatchPolicy(
        max_batch_rows=most,
        preferred_batch_rows=tuple(draw(st.sets(st.integers(1, most), max_size=2))),
        max_queue_delay_ns=draw(delays),
        grows_always=draw(st.booleans()),
        await_returns=draw(st.booleans()),
        queue=QueuePolicy(draw(st.sampled_from([0, 3])), draw(st.sampled_from([0, 5 * MS]))),
        limits=QueueLimits(max_rows=draw(st.sampled_from([0, 16]))),
    )


def line(base_ns: int, row_ns: int) -> Cost:
    return lambda rows, size, _: base_ns + row_ns * rows * size


costs = st.builds(line, st.integers(1, 4 * MS), st.integers(0, MS))
loads = st.one_of(
    st.builds(Open, st.builds(Poisson, st.floats(50, 5_000), st.integers(0, 9))),
    st.builds(Closed, st.integers(1, 20)),
)


def run(served: Served, load: Open | Closed, requests: int, warmup: float = 0.1) -> Simulated:
    return asyncio.run(simulate(served, load, requests=requests, warmup=warmup))


@given(
    policies(), st.integers(1, 3), costs, loads, st.integers(1, 100), st.sampled_from([0, 50 * US]), st.integers(0, 2)
)
def test_every_request_leaves_the_simulation_once(
    policy: BatchPolicy, instances: int, cost: Cost, load: Open | Closed, requests: int, ns: int, waits: int
) -> None:
    found = run(Served(policy, instances, cost, [Costs(ns, ns / 2, waits)]), load, requests)
    assert found.latencies.count + found.refused == requests - requests // 10
    assert all(0 < rows <= policy.max_batch_rows for rows in found.batches)
    assert 0 <= found.busy <= 1


@given(st.integers(1, 10), st.integers(1, 5_000))
def test_latency_is_the_delay_if_executions_cost_nothing(delay_ms: int, more_us: int) -> None:
    # The next request comes once the one before has left, so each waits for others in vain.
    policy = BatchPolicy(max_batch_rows=8, max_queue_delay_ns=delay_ms * MS)
    far = Open(Constant(1e9 / (delay_ms * MS + more_us * US)))
    found = run(Served(policy, 1, line(0, 0)), far, 50)
    assert found.latencies.percentile_ns(0) == found.latencies.longest_ns == delay_ms * MS


@given(st.integers(0, MS // 2), st.integers(0, MS // 2), st.integers(1, 3))
def test_lone_client_waits_for_all_that_its_request_costs(loop: int, sender: int, slowdown: int) -> None:
    costs = [Costs(2 * loop, 2 * sender, slowdown=slowdown), Costs(requests=8.0)]
    found = run(Served(BatchPolicy(), 1, line(10 * MS, 0), costs), Closed(1), 20)
    assert found.latencies.percentile_ns(50) == pytest.approx(10 * MS * slowdown + 2 * (loop + sender), rel=2e-3)


def test_event_loop_that_waits_answers_less() -> None:
    # It is all that counts: there are more clients than it can answer, and executions cost nothing.
    found = run(Served(BatchPolicy(max_batch_rows=8), 1, line(0, 0), [Costs(loop_ns=MS, waits=3.0)]), Closed(16), 4_000)
    assert found.throughput == pytest.approx(1_000 / 4, rel=0.05)


@settings(max_examples=100 if LONG else 20)
@given(st.integers(1, 8), st.integers(1, 3), st.integers(0, 9))
def test_overload_is_answered_as_fast_as_instances_are(rows: int, instances: int, seed: int) -> None:
    # Full batches of 10 ms, of which as many requests are asked for as would keep thrice as many instances busy.
    full_per_s = 100 * instances * rows
    load = Open(Poisson(3.0 * full_per_s, seed))
    found = run(Served(BatchPolicy(max_batch_rows=rows), instances, line(10 * MS, 0)), load, 200 * rows)
    assert full_per_s * 0.85 <= found.throughput <= full_per_s * 1.05


class Quiet(ManualClock):
    """Knows when its next alarm rings. The event loop costs nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Any] = []

    def busy_ns(self) -> int:
        return 0

    def alarm(self, ring: Callable[[], None]) -> Any:
        self.made.append(super().alarm(ring))
        return self.made[-1]

    @property
    def rings_ns(self) -> list[int]:
        return [one.at_ns for one in self.made if one.at_ns is not None]


class Timed(StepRunner[Contents, None]):
    """Says when its execution ends."""

    def __init__(self, clock: Quiet, cost: Cost, policy: BatchPolicy) -> None:
        super().__init__(clock, stages=True)
        self.clock, self.cost, self.policy, self.ends_ns = clock, cost, policy, 0

    def run(self, payloads: Sequence[Contents], padded_rows: int, done: Done[None]) -> None:
        if not self.busy:
            self.ends_ns = self.end_ns(payloads)
        super().run(payloads, padded_rows, done)

    def end(self) -> None:
        self.ends_ns = self.end_ns(self.batches[-1])  # of the next one, if there is any
        self.finish(lambda _: None)

    def end_ns(self, payloads: Sequence[Contents]) -> int:
        sizes = [length(max(one.sizes[0] for one in payloads)) for length in self.policy.lengths]
        return self.clock.now_ns() + self.cost(len(payloads), payloads[0].size(tuple(sizes)), 0)


async def at_the_batcher(
    policy: BatchPolicy, instances: int, cost: Cost, due_ns: Sequence[int], contents: Sequence[Contents]
) -> tuple[Histogram, Counter[int]]:
    """The latencies of requests that come at `due_ns`, with `contents` in turn, and how many batches have so many
    rows."""
    clock, observer, latencies_ns, left = Quiet(), RecordingObserver(), [], 0
    runners = [Timed(clock, cost, policy) for _ in range(instances)]
    batcher: Batcher[Contents, None] = Batcher(policy, runners, clock=clock, observer=observer)
    batcher.start()

    def on_answers(requests: list[Request[Contents, None]]) -> None:
        nonlocal left
        left += len(requests)
        latencies_ns.extend(clock.now_ns() - one.arrived_ns for one in requests if one.answered)

    def submit(requests: list[Request[Contents, None]]) -> None:
        nonlocal left
        for _, alike in groupby(requests, lambda one: one.key):
            left += len([one for one in batcher.submit([*alike]) if one is not None])

    came = 0
    while left < len(due_ns):
        ends_ns = [one.ends_ns for one in runners if one.busy]
        at_ns = min([*due_ns[came : came + 1], *ends_ns, *clock.rings_ns])
        clock.advance(at_ns - clock.now_ns())
        for one in runners:
            if one.busy and one.ends_ns == at_ns:
                one.end()
        while came < len(due_ns) and due_ns[came] == at_ns:
            one = contents[came % len(contents)]
            request: Request[Contents, None] = Request(one, 1, one.key, at_ns, sizes=one.sizes)
            request.on_answers = on_answers
            batcher.announce(submit, request)
            came += 1
        await asyncio.sleep(0)
    batcher.close()
    return Histogram.of(latencies_ns), Counter(observer.rows)


gaps = st.lists(st.one_of(st.just(0), st.integers(1, 100 * US), st.integers(1, 10 * MS)), min_size=1, max_size=40)


texts = st.lists(st.builds(Contents, key=st.sampled_from("ab"), sizes=st.tuples(st.integers(1, 40))), min_size=1)
alike = st.just([Contents()])


@given(policies(), st.integers(1, 3), costs, gaps, st.one_of(alike, texts))
def test_simulation_decides_as_the_batcher_that_serves(
    policy: BatchPolicy, instances: int, cost: Cost, gaps_ns: list[int], contents: list[Contents]
) -> None:
    if contents[0].sizes:
        policy = replace(policy, lengths=(lambda size: -(-size // 8) * 8,))
    due_ns = [1 + sum(gaps_ns[: number + 1]) for number in range(len(gaps_ns))]
    load = Open(Recorded(tuple(due_ns), tuple(range(len(due_ns)))))
    served = Served(policy, instances, cost)
    found = asyncio.run(simulate(served, load, requests=len(due_ns), contents=contents, warmup=0))
    latencies, batches = asyncio.run(at_the_batcher(policy, instances, cost, due_ns, contents))
    assert found.batches == batches
    assert (found.latencies.sum_ns, found.latencies.longest_ns) == (latencies.sum_ns, latencies.longest_ns)
    assert found.refused == len(due_ns) - latencies.count
