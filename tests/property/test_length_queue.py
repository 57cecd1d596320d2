"""The queue of requests that differ in length: who leaves together, and that nobody is lost, doubled or overtaken by
their like; and, on a made-up clock, what that is worth for models whose executions cost differently."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import count

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from paceline.scheduler.batch_queue import BatchQueue, Decision
from paceline.scheduler.policy import NEVER, BatchPolicy
from paceline.scheduler.request import AnyRequest, Batch, Request

MS = 1_000_000


def own(size: int) -> int:
    return size


def in_fours(size: int) -> int:
    return -(-size // 4) * 4


class Lengths(RuleBasedStateMachine):
    @initialize(
        lengths=st.sampled_from([(own,), (in_fours,), (own, in_fours)]),
        max_rows=st.integers(1, 6),
        elements=st.sampled_from([0, 20, 60]),
        preferred=st.booleans(),
        delay_ms=st.sampled_from([0, 0, 5]),
        stops=st.booleans(),
        levels=st.sampled_from([0, 2]),
        base_ms=st.sampled_from([0, 3, 40]),
    )
    def start(
        self,
        lengths: tuple[Callable[[int], int], ...],
        max_rows: int,
        elements: int,
        preferred: bool,
        delay_ms: int,
        stops: bool,
        levels: int,
        base_ms: int,
    ) -> None:
        self.policy = BatchPolicy(
            max_batch_rows=max_rows,
            preferred_batch_rows=(max(1, max_rows // 2),) if preferred else (),
            max_queue_delay_ns=delay_ms * MS,
            priority_levels=levels,
            default_priority_level=min(levels, 1),
            lengths=lengths,
            max_batch_elements=elements,
            grows_always=not stops,
        )
        self.queue: BatchQueue[AnyRequest] = BatchQueue(self.policy)
        self.now_ns, self.base_ms = 1, base_ms
        self.waiting: list[AnyRequest] = []
        self.executing: list[Batch[AnyRequest]] = []

    @rule(
        sizes=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=5),
        rows=st.integers(1, 2),
        key=st.sampled_from("ab"),
        priority=st.integers(1, 2),
        patience_ms=st.sampled_from([0, 0, 30, 400]),
    )
    def arrive(self, sizes: list[tuple[int, int]], rows: int, key: str, priority: int, patience_ms: int) -> None:
        deadline_ns = self.now_ns + patience_ms * MS if patience_ms else NEVER
        for two in sizes:
            one: AnyRequest = Request(None, rows, key, self.now_ns, sizes=two[: len(self.policy.lengths)])
            one.priority, one.deadline_ns = priority, deadline_ns
            if not any(self.queue.push([one])):
                self.waiting.append(one)

    @rule(by_ms=st.integers(1, 20))
    def wait(self, by_ms: int) -> None:
        self.now_ns += by_ms * MS

    @precondition(lambda self: not self.executing)
    @rule()
    def poll(self) -> None:
        decision = self.queue.poll(self.now_ns, idle=1)
        self.leave(decision)
        for batch in decision.batches:
            self.check(batch)
            self.executing.append(batch)
        if not (decision.batches or self.policy.max_queue_delay_ns):
            assert not self.waiting

    def leave(self, decision: Decision[AnyRequest]) -> None:
        for one in decision.expired:
            assert one.deadline_ns <= self.now_ns
            self.waiting.remove(one)
        for late in decision.unreachable:
            assert late.request.deadline_ns < self.now_ns + late.needed_ns
            self.waiting.remove(late.request)

    def check(self, batch: Batch[AnyRequest]) -> None:
        lane = sorted((one for one in self.waiting if one.key == batch.key), key=lambda one: one.order)
        if all(one.deadline_ns == NEVER for one in lane):
            assert batch.requests[0] is lane[0], "the first one has to leave"
        padded = [max(one.sizes[at] for one in batch.requests) for at in range(len(batch.sizes))]
        assert batch.sizes == tuple(rule(size) for rule, size in zip(self.policy.lengths, padded, strict=True))
        assert batch.rows == sum(one.rows for one in batch.requests) > 0
        assert batch.elements == sum(one.rows * math.prod(one.sizes) for one in batch.requests)
        if len(batch.requests) > 1:
            assert batch.rows <= self.policy.max_batch_rows
            assert batch.rows * math.prod(batch.sizes) <= (self.policy.max_batch_elements or NEVER)
        orders = [one.order for one in batch.requests]
        assert orders == sorted(orders)
        for one in batch.requests:
            assert one.deadline_ns > self.now_ns
            self.waiting.remove(one)
        for one in self.waiting:
            later = [each for each in batch.requests if each.order > one.order]
            like = [each for each in later if (each.key, each.sizes, each.rows) == (one.key, one.sizes, one.rows)]
            assert not like or one.deadline_ns < NEVER, "overtaken by one that is like it"

    @precondition(lambda self: self.executing)
    @rule()
    def finish(self) -> None:
        batch = self.executing.pop()
        took_ns = self.base_ms * MS + batch.rows * math.prod(batch.sizes) * MS // 10
        self.now_ns += took_ns
        self.queue.done(batch, self.now_ns, took_ns)

    @precondition(lambda self: self.waiting)
    @rule(which=st.integers(0, 20))
    def cancel(self, which: int) -> None:
        one = self.waiting.pop(which % len(self.waiting))
        assert self.queue.cancel(one)

    @invariant()
    def counters_equal_sums(self) -> None:
        assert self.queue.waiting.requests == len(self.waiting)
        assert self.queue.waiting.rows == sum(one.rows for one in self.waiting)


TestLengths = Lengths.TestCase
TestLengths.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)

_ELEMENT_NS = 30_000


def texts(seed: int) -> Callable[[], int]:
    """Log-normal lengths: median 40, from 5 to 256."""
    dice = random.Random(seed)
    return lambda: min(256, max(5, round(40 * math.exp(dice.gauss(0, 0.8)))))


def served_per_s(cost: Callable[[int, int], float], *, pads: bool, seconds: int = 20) -> float:
    """Requests per second of 64 callers, each of whom asks again when answered."""
    queue: BatchQueue[AnyRequest] = BatchQueue(
        BatchPolicy(max_batch_rows=32, lengths=(own,) if pads else (), grows_always=False)
    )
    length, now_ns, numbers, answered = texts(1), 1, count(), 0

    def ask() -> None:
        size = length()
        queue.push([Request(next(numbers), 1, "k" if pads else size, now_ns, sizes=(size,) if pads else (), tag=size)])

    for _ in range(64):
        ask()
    while now_ns < seconds * 1_000 * MS:
        (batch,) = queue.poll(now_ns, idle=1).batches
        took_ns = round(cost(batch.rows, max(one.tag for one in batch.requests)))
        now_ns += took_ns
        queue.done(batch, now_ns, took_ns)
        answered += len(batch.requests)
        for _ in batch.requests:
            ask()
    return answered / seconds


def packed_per_s(cost: Callable[[int, int], float]) -> float:
    """The best that could be had if all texts were known: sorted by length, in batches of the best size."""
    length = texts(2)
    sizes = sorted(length() for _ in range(4096))
    took_ns = [
        sum(cost(len(sizes[at : at + rows]), sizes[min(at + rows, 4096) - 1]) for at in range(0, 4096, rows))
        for rows in (1, 2, 4, 8, 16, 32)
    ]
    return 4096 / min(took_ns) * 1_000 * MS


def fixed(rows: int, size: int) -> float:
    """An execution costs as much as twenty rows of median length, whatever is in it."""
    return (20 * 40 + rows * size) * _ELEMENT_NS


def small(rows: int, size: int) -> float:
    """An execution costs little of itself, and elements more once they exceed a cache."""
    octaves = max(0.0, min(3.0, math.log2(rows * size) - 9))
    return 1.5 * MS + rows * size * _ELEMENT_NS * (1 + 0.12 * octaves)


def proportional(rows: int, size: int) -> float:
    return rows * size * _ELEMENT_NS


def test_sharing_triples_what_a_fixed_cost_allows() -> None:
    assert served_per_s(fixed, pads=True) >= 3 * served_per_s(fixed, pads=False)


@pytest.mark.parametrize("cost", [small, proportional])
def test_sharing_is_never_a_loss(cost: Callable[[int, int], float]) -> None:
    served = served_per_s(cost, pads=True)
    assert served >= 0.97 * served_per_s(cost, pads=False)
    assert served >= 0.85 * packed_per_s(cost)
