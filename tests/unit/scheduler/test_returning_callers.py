"""Callers who have just been answered and come again: when an idle instance is held back for them, and when not."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.scheduler.batch_queue import BatchQueue
from paceline.scheduler.policy import BatchPolicy
from paceline.scheduler.request import AnyRequest
from paceline.scheduler.returning_callers import ReturningCallers
from paceline.scheduler.runner import Outcome
from paceline.scheduler.testing import Results
from tests.unit.scheduler.workbench import Bench, one_turn, push

MS = 1_000_000
BASE_NS = 64 * MS


def learned(clients: int, policy: BatchPolicy | None = None) -> tuple[BatchQueue[AnyRequest], int]:
    """A queue whose callers all come again 0.01 ms after their answers, and the time at which the last of many batches
    was answered."""
    queue: BatchQueue[AnyRequest] = BatchQueue(policy or BatchPolicy(max_batch_rows=8, await_returns=True))
    queue.latency.observe("k", 1, BASE_NS + MS, 0)
    queue.latency.observe("k", 8, BASE_NS + 8 * MS, 0)
    now_ns = 0
    for _ in range(30):
        for number in range(clients):
            push(queue, number, 1, "k", now_ns + 10_000)
        now_ns += BASE_NS
        for batch in queue.poll(now_ns, idle=clients).batches:
            now_ns += BASE_NS + clients * MS
            queue.done(batch, now_ns, BASE_NS + clients * MS)
    return queue, now_ns


def test_idle_instance_waits_for_returning_callers_and_starts_when_they_are_back() -> None:
    queue, now_ns = learned(clients=4)
    push(queue, 0, 1, "k", now_ns + 10_000)
    decision = queue.poll(now_ns + 10_000, idle=1)
    assert not decision.batches
    assert decision.wake_ns is not None
    assert now_ns < decision.wake_ns <= now_ns + BASE_NS // 4
    for number in range(1, 4):
        push(queue, number, 1, "k", now_ns + 20_000)
    (batch,) = queue.poll(now_ns + 20_000, idle=1).batches
    assert batch.rows == 4


def test_idle_instance_waits_for_a_quarter_of_the_base_time_at_most() -> None:
    queue, now_ns = learned(clients=4)
    push(queue, 0, 1, "k", now_ns + 10_000)
    wake_ns = queue.poll(now_ns + 10_000, idle=1).wake_ns
    assert wake_ns is not None
    while not (decision := queue.poll(wake_ns, idle=1)).batches:
        assert decision.wake_ns is not None
        assert decision.wake_ns > wake_ns
        wake_ns = decision.wake_ns
    assert wake_ns <= now_ns + BASE_NS // 4


def test_idle_instance_does_not_wait_by_default_nor_after_a_flush() -> None:
    unasked, flushed = learned(clients=4, policy=BatchPolicy(max_batch_rows=8)), learned(clients=4)
    flushed[0].flush()
    for queue, now_ns in (unasked, flushed):
        push(queue, 0, 1, "k", now_ns + 10_000)
        assert queue.poll(now_ns + 10_000, idle=1).batches


@pytest.mark.parametrize(
    "configured",
    [{"max_queue_delay_ns": 1}, {"preferred_batch_rows": (8,)}, {"max_batch_requests": 8}],
    ids=lambda fields: next(iter(fields)),
)
def test_idle_instance_does_not_wait_where_a_delay_or_a_size_is_configured(configured: dict[str, Any]) -> None:
    queue, now_ns = learned(clients=4, policy=BatchPolicy(max_batch_rows=8, await_returns=True, **configured))
    push(queue, 0, 1, "k", now_ns + 10_000)
    assert queue.poll(now_ns + 10_001, idle=1).batches


def test_idle_instance_does_not_wait_for_a_single_caller() -> None:
    queue, now_ns = learned(clients=1)
    push(queue, 0, 1, "k", now_ns + 10_000)
    assert queue.poll(now_ns + 10_000, idle=1).batches


def test_idle_instance_does_not_wait_where_a_deadline_leaves_no_time_for_it() -> None:
    queue, now_ns = learned(clients=4)
    now_ns += 10_000
    push(queue, 0, 1, "k", now_ns, deadline_ns=now_ns + queue.latency.longest_ns)
    assert queue.poll(now_ns, idle=1).batches


def test_idle_instance_waits_no_longer_because_a_deadline_is_far_off() -> None:
    queue, now_ns = learned(clients=4)
    now_ns += 10_000
    push(queue, 0, 1, "k", now_ns, deadline_ns=now_ns + 1_000 * BASE_NS)
    wake_ns = queue.poll(now_ns, idle=1).wake_ns
    assert wake_ns is not None
    assert now_ns < wake_ns <= now_ns + BASE_NS // 4


def test_idle_instance_that_would_wait_for_one_shape_serves_another() -> None:
    queue, now_ns = learned(clients=4)
    now_ns += 10_000
    push(queue, 0, 1, "k", now_ns)
    push(queue, 1, 1, "other", now_ns)
    assert [batch.key for batch in queue.poll(now_ns, idle=1).batches] == ["other"]


@pytest.mark.parametrize(("max_rows", "waits"), [(1, False), (2, True)])
def test_idle_instance_waits_for_nobody_where_each_request_has_its_own_batch(max_rows: int, waits: bool) -> None:
    queue, now_ns = learned(clients=2, policy=BatchPolicy(max_batch_rows=max_rows, await_returns=True))
    push(queue, 0, 1, "k", now_ns + 10_000)
    assert bool(queue.poll(now_ns + 10_000, idle=1).batches) == (not waits)


def returned(*arrivals: tuple[int, int], answered: int = 4, times: int = 60) -> ReturningCallers:
    """What is known after `times` batches of `answered` rows, each answered at moment 0 and followed by `arrivals`."""
    returns = ReturningCallers()
    for _ in range(times):
        returns.answered("k", answered, BASE_NS, 0)
        for now_ns, rows in arrivals:
            returns.arrived("k", rows, now_ns)
    returns.answered("k", answered, BASE_NS, 0)
    return returns


@pytest.mark.parametrize(
    ("part", "window"), [(100, 64), (64, 64), (63, 32), (20, 16), (10, 8), (6, 4), (4, 4), (3.9, None)]
)
def test_wait_for_returning_callers_is_as_short_as_they_are_known_to_need(part: float, window: int | None) -> None:
    returns = returned((int(BASE_NS / part), 4))
    assert returns.hold_until_ns("k", 0, 0) == (BASE_NS // window if window else 0)


def test_wait_for_returning_callers_ends_after_the_time_they_are_known_to_need() -> None:
    returns = returned((BASE_NS // 5, 4))
    for now_ns in (1, BASE_NS * 23 // 100, BASE_NS // 4 - 1):
        assert returns.hold_until_ns("k", 0, now_ns) == BASE_NS // 4
    assert returns.hold_until_ns("k", 0, BASE_NS // 4) == 0


@pytest.mark.parametrize(("rows", "waits"), [(0, False), (1, False), (3, True), (4, True)])
def test_no_wait_unless_half_of_the_answered_callers_return(rows: int, waits: bool) -> None:
    assert (returned((1, rows)).hold_until_ns("k", 0, 0) > 0) == waits


def test_requests_that_came_before_the_answers_are_not_returns_though_reported_later() -> None:
    assert returned((-1, 4)).hold_until_ns("k", 0, 0) == 0
    returns = returned((1, 4))
    returns.arrived("k", 4, -1)
    assert returns.hold_until_ns("k", 0, 1) > 0, "nor do they stand for those who will"


@pytest.mark.parametrize(("announced", "waits"), [("before", False), ("after", True)])
async def test_requests_announced_before_the_loop_handles_the_end_are_not_returns(announced: str, waits: bool) -> None:
    bench = Bench(BatchPolicy(max_batch_rows=8, await_returns=True))
    bench.batcher._queue.latency.observe("k", 1, BASE_NS + MS, 0)
    bench.batcher._queue.latency.observe("k", 8, BASE_NS + 8 * MS, 0)

    def submit(arrivals_ns: list[int]) -> None:
        for arrived_ns in arrivals_ns:
            bench.put("a", arrived_ns=arrived_ns)

    def announce() -> None:
        for _ in range(2):
            bench.batcher.announce(submit, bench.clock.now_ns())

    await bench.submit("a", "b")
    for _ in range(30):
        bench.clock.advance(BASE_NS + 2 * MS)
        _, done, started_ns = bench.runner._take()
        outcome = Outcome(started_ns, bench.clock.now_ns(), executed=Results(["A", "B"]))
        bench.clock.advance(1_000)
        if announced == "before":
            announce()
        bench.clock.advance(1_000)
        done(outcome)
        if announced == "after":
            announce()
        await one_turn()
        assert bench.runner.busy
    bench.clock.advance(BASE_NS + 2 * MS)
    bench.runner.finish(str.upper)
    (last,) = await bench.submit("a")
    assert bench.runner.busy != waits
    bench.batcher.close()
    assert last.exception()


def test_no_wait_once_as_many_as_were_answered_are_back_though_more_usually_come() -> None:
    returns = returned((1, 8))
    assert returns.hold_until_ns("k", 0, 0) > 0
    returns.arrived("k", 4, 1)
    assert returns.hold_until_ns("k", 4, 1) == 0


def test_no_wait_where_it_costs_waiting_requests_more_than_it_saves() -> None:
    returns = returned((BASE_NS // 5, 4))
    assert returns.hold_until_ns("k", 15, 0) > 0
    assert returns.hold_until_ns("k", 17, 0) == 0


def test_shapes_first_answered_longest_ago_are_forgotten() -> None:
    returns = returned((1, 4))
    for number in range(2_000):
        returns.answered(number, 4, BASE_NS, 0)
    assert returns.hold_until_ns("k", 0, 0) == 0
    assert len(returns._keys) == 1024
    assert hash(1_999) in returns._keys
