"""Requests that arrive together: they are taken as if one came after the other, also where some are refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.scheduler.batch_queue import BatchQueue
from paceline.scheduler.errors import (
    BatcherClosed,
    DeadlineUnreachable,
    NoInstance,
    QueueFull,
    RequestTooLarge,
    SchedulerError,
)
from paceline.scheduler.observer import Drop
from paceline.scheduler.policy import NEVER, BatchPolicy, QueueLimits, QueuePolicy, TimeoutAction
from paceline.scheduler.request import AnyRequest, Request
from paceline.scheduler.waiting import SharedQueueLimits
from tests.unit.scheduler.workbench import Bench, one_turn


def group_of(
    payloads: Sequence[str],
    rows: int = 1,
    *,
    arrivals_ns: Sequence[int] = (),
    deadlines_ns: Sequence[int] = (),
    size_bytes: int = 0,
    priority: int = 0,
    timeout_ns: int = 0,
) -> list[Request[str, str]]:
    group = [
        Request[str, str](payload, rows, "k", size_bytes=size_bytes, priority=priority, timeout_ns=timeout_ns)
        for payload in payloads
    ]
    for one, arrived_ns in zip(group, arrivals_ns, strict=bool(arrivals_ns)):
        one.arrived_ns = arrived_ns
    for one, deadline_ns in zip(group, deadlines_ns, strict=bool(deadlines_ns)):
        one.deadline_ns = deadline_ns
    return group


def together(bench: Bench, group: Sequence[Request[str, str]]) -> tuple[str, Sequence[SchedulerError | None]]:
    """Submit `group`. Returns the payloads of those that were taken, and the errors of the others."""
    refusals = bench.batcher.submit(group)
    assert len(refusals) == (len(group) if any(refusals) else 0)
    assert [one.waits for one in group] == [not any(refusals[place : place + 1]) for place in range(len(group))]
    return "".join(one.payload for one in group if one.waits), [error for error in refusals if error is not None]


async def test_group_shares_a_batch_and_each_request_gets_its_own_result() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=8))
    group = group_of("abc")
    assert together(bench, group) == ("abc", [])
    await one_turn()
    assert bench.runner.batches[-1] == ["a", "b", "c"]
    bench.runner.finish(str.upper)
    assert [request.result() for request in group] == ["A", "B", "C"]


async def test_group_queues_behind_earlier_and_before_later_requests() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=3))
    bench.put("a")
    together(bench, group_of("bc"))
    bench.put("d")
    together(bench, group_of("ef"))
    await one_turn()
    assert bench.runner.batches[-1] == ["a", "b", "c"]
    bench.runner.finish(str.upper)
    await one_turn()
    assert bench.runner.batches[-1] == ["d", "e", "f"]


async def test_group_queues_behind_requests_announced_before() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=3))
    bench.batcher.announce(lambda payloads: bench.put(*payloads) and None, "a")
    together(bench, group_of("bc"))
    await one_turn()
    assert bench.runner.batches[-1] == ["a", "b", "c"]


async def test_results_of_a_group_are_delivered_together_in_order() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=8, preserve_ordering=True))
    group, told = group_of("abc"), list[list[AnyRequest]]()
    for request in group:
        request.on_answers = told.append
    together(bench, group)
    await one_turn()
    bench.runner.finish(str.upper)
    assert told == [group]


async def test_answers_of_a_group_leave_in_the_order_of_arrival() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=1, preserve_ordering=True), instances=2)
    group = group_of("ab")
    together(bench, group)
    await one_turn()
    bench.runners[1].finish(str.upper)
    assert not any(request.done() for request in group)
    bench.runners[0].finish(str.upper)
    assert [request.result() for request in group] == ["A", "B"]


async def test_refused_request_of_a_group_holds_up_no_ordered_answer() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=8, preserve_ordering=True, queue=QueuePolicy(max_queue_size=2)))
    taken, refused = group_of("ab"), group_of("cd")
    assert together(bench, [*taken, *refused])[0] == "ab"
    await one_turn()
    (later,) = bench.put("e")
    for _ in range(2):
        bench.runner.finish(str.upper)
        await one_turn()
    assert [request.result() for request in (*taken, later)] == ["A", "B", "E"]


async def test_cancelled_request_leaves_the_others_of_its_group_in_the_queue() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=8))
    group = group_of("abc")
    together(bench, group)
    group[1].cancel()
    assert bench.batcher.waiting_requests == 2
    await one_turn()
    assert bench.runner.batches[-1] == ["a", "c"]


async def test_wait_begins_when_a_request_of_a_group_arrived_or_is_submitted() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=8))
    bench.clock.advance(9)
    group = group_of("abc", arrivals_ns=[3, 7, 0])
    together(bench, group)
    assert [request.arrived_ns for request in group] == [3, 7, 10]


@pytest.mark.parametrize(
    "policy",
    [
        BatchPolicy(max_batch_rows=8),
        BatchPolicy(max_batch_rows=8, preferred_batch_rows=(2,), max_queue_delay_ns=100),
        BatchPolicy(max_batch_rows=8, queue=QueuePolicy(default_timeout_ns=50, allow_timeout_override=True)),
        BatchPolicy(
            max_batch_rows=8,
            priority_levels=3,
            default_priority_level=1,
            priority_queue={2: QueuePolicy(default_timeout_ns=20, allow_timeout_override=True)},
        ),
        BatchPolicy(max_batch_rows=8, await_returns=True),
        BatchPolicy(max_batch_rows=8, queue=QueuePolicy(max_queue_size=6)),
        BatchPolicy(max_batch_rows=8, limits=QueueLimits(max_rows=6)),
        BatchPolicy(max_batch_rows=8, limits=QueueLimits(max_bytes=65)),
        BatchPolicy(max_batch_rows=8, queue=QueuePolicy(default_timeout_ns=5, timeout_action=TimeoutAction.DELAY)),
    ],
    ids=["plain", "delay", "default timeout", "levels", "returns", "requests", "rows", "bytes", "delayed by timeout"],
)
@pytest.mark.parametrize("timeout_ns", [0, 10])
@pytest.mark.parametrize("measured_ns", [0, 25])
def test_group_waits_as_its_requests_would_one_after_the_other(
    policy: BatchPolicy, timeout_ns: int, measured_ns: int
) -> None:
    """With 25 ns for an execution, the second of each group can't be answered in time."""
    refusals, waiting, decisions = [], [], []
    for is_together in (False, True):
        queue: BatchQueue[AnyRequest] = BatchQueue(policy)
        for _ in range(3 if measured_ns else 0):
            queue.latency.observe("k", 1, measured_ns, 0)
        refused: list[type[object] | None] = []
        for priority in (2, 9):
            group = group_of(
                "abcd",
                arrivals_ns=[3, 5, 5, 8],
                deadlines_ns=[NEVER, 25, NEVER, 70],
                size_bytes=10,
                priority=priority,
                timeout_ns=timeout_ns,
            )
            for part in [group] if is_together else [[one] for one in group]:
                errors = queue.push(part) or [None] * len(part)
                refused += [error if error is None else type(error) for error in errors]
        refused += [type(error) for error in queue.push([Request("e", 1, "other", 8)])]
        refusals.append(refused)
        polled = queue.poll(13, idle=0)
        decisions.append(([one.payload for one in polled.expired], polled.wake_ns))
        waiting.append([(one.payload, one.order, one.level, one.act_at_ns) for one in queue.take_all()])
        assert queue.waiting.requests == queue.lanes == 0
    assert refusals[0] == refusals[1]
    assert waiting[0] == waiting[1]
    assert decisions[0] == decisions[1]
    assert refusals[0].count(DeadlineUnreachable) == (2 if measured_ns else 0)
    assert len(waiting[0]) + len(decisions[0][0]) == 9 - sum(error is not None for error in refusals[0])


@pytest.mark.parametrize(
    "policy",
    [
        BatchPolicy(max_batch_rows=8, queue=QueuePolicy(max_queue_size=2)),
        BatchPolicy(max_batch_rows=8, limits=QueueLimits(max_rows=2)),
        BatchPolicy(max_batch_rows=8, limits=QueueLimits(max_bytes=20)),
    ],
    ids=["requests", "rows", "bytes"],
)
async def test_as_many_are_taken_of_a_group_as_there_is_room_for(policy: BatchPolicy) -> None:
    bench = Bench(policy)
    taken, (error, other) = together(bench, group_of("abcd", size_bytes=10))
    assert (taken, bench.batcher.waiting_requests) == ("ab", 2)
    assert isinstance(error, QueueFull)
    assert isinstance(other, QueueFull)
    assert error is not other
    assert bench.seen.drops == [getattr(Drop, f"FULL_{error.what.upper()}")] * 2
    with pytest.raises(QueueFull):
        bench.put("e", size_bytes=10)
    await one_turn()
    assert bench.runner.batches == [["a", "b"]]


@pytest.mark.parametrize("limits", [SharedQueueLimits(2, 0), SharedQueueLimits(0, 20)], ids=["requests", "bytes"])
async def test_as_many_are_taken_of_a_group_as_other_models_leave_room_for(limits: SharedQueueLimits) -> None:
    bench, other = (
        Bench(BatchPolicy(max_batch_rows=8), shared_limits=limits),
        Bench(BatchPolicy(max_batch_rows=8), shared_limits=limits),
    )
    assert together(other, group_of("a", size_bytes=10)) == ("a", [])
    taken, (error,) = together(bench, group_of("bc", size_bytes=10))
    assert taken == "b"
    assert isinstance(error, QueueFull)
    assert (limits.requests, limits.size_bytes) == (2, 20)


async def test_those_of_a_group_are_refused_that_cannot_be_answered_in_time() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=8))
    await bench.measure(1_000)
    soon, late = bench.clock.now_ns() + 500, bench.clock.now_ns() + 1_000_000
    group = group_of("abcd", deadlines_ns=[NEVER, soon, late, soon])
    taken, errors = together(bench, group)
    assert taken == "ac"
    assert [type(error) for error in errors] == [DeadlineUnreachable] * 2
    assert bench.seen.drops == [Drop.UNREACHABLE] * 2
    assert together(bench, group_of("ef", deadlines_ns=[NEVER, late])) == ("ef", [])
    await one_turn()
    assert bench.runner.batches[-1] == ["a", "c", "e", "f"]


def test_deadline_of_each_in_a_group_is_held_against_its_own_arrival() -> None:
    queue: BatchQueue[AnyRequest] = BatchQueue(BatchPolicy(max_batch_rows=8))
    for _ in range(3):
        queue.latency.observe("k", 1, 1_000, 0)
    deadlines_ns = [NEVER, 5_500, NEVER]
    assert not any(queue.push(group_of("abc", arrivals_ns=[0, 0, 5_000], deadlines_ns=deadlines_ns)))
    refusals = queue.push(group_of("abc", arrivals_ns=[5_000, 5_000, 5_000], deadlines_ns=deadlines_ns))
    assert [type(error) for error in refusals] == [type(None), DeadlineUnreachable, type(None)]
    assert queue.waiting.requests == 5


def test_deadline_in_a_group_is_held_against_the_rows_of_the_requests_before_it() -> None:
    queue: BatchQueue[AnyRequest] = BatchQueue(BatchPolicy(max_batch_rows=1))
    for _ in range(3):
        queue.latency.observe("k", 1, 1_000, 0)
    refusals = queue.push(group_of("abcd", deadlines_ns=[2_500] * 4))
    assert [type(error) for error in refusals] == [type(None)] * 2 + [DeadlineUnreachable] * 2


@pytest.mark.parametrize(("rows", "taken"), [(0, ""), (1, "ab"), (4, "ab"), (5, "")])
async def test_none_is_taken_of_a_size_that_no_batch_can_have(rows: int, taken: str) -> None:
    got, errors = together(Bench(BatchPolicy(max_batch_rows=4)), group_of("ab", rows))
    assert got == taken
    assert [type(error) for error in errors] == [RequestTooLarge] * (2 - len(taken))


async def test_as_many_are_taken_of_a_group_as_there_is_room_for_their_rows() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=8, limits=QueueLimits(max_rows=5)))
    assert together(bench, group_of("abc", 2))[0] == "ab"


@pytest.mark.parametrize("is_together", [False, True])
def test_requests_of_a_group_count_as_returning_callers(is_together: bool) -> None:
    queue: BatchQueue[AnyRequest] = BatchQueue(BatchPolicy(max_batch_rows=8, await_returns=True))
    queue.latency.observe("k", 1, 65_000_000, 0)
    queue.latency.observe("k", 8, 72_000_000, 0)
    now_ns = 0
    for _ in range(30):
        group = group_of("abcd", arrivals_ns=[now_ns + 10_000] * 4)
        for part in [group] if is_together else [[one] for one in group]:
            assert queue.push(part) == ()
        now_ns += 64_000_000
        for batch in queue.poll(now_ns, idle=1).batches:
            now_ns += 68_000_000
            queue.done(batch, now_ns, 68_000_000)
    assert queue.push(group_of("ab", arrivals_ns=[now_ns + 10_000] * 2)) == ()
    assert not queue.poll(now_ns + 10_000, idle=1).batches
    assert queue.push(group_of("cd", arrivals_ns=[now_ns + 20_000] * 2)) == ()
    (batch,) = queue.poll(now_ns + 20_000, idle=1).batches
    assert batch.rows == 4


@pytest.mark.parametrize(("ends_by", "error"), [("close", BatcherClosed), ("suspend", NoInstance)])
async def test_none_is_taken_by_a_batcher_that_takes_no_requests(ends_by: str, error: type[SchedulerError]) -> None:
    bench = Bench(BatchPolicy(max_batch_rows=8))
    getattr(bench.batcher, ends_by)()
    taken, errors = together(bench, group_of("ab"))
    assert (taken, [type(one) for one in errors]) == ("", [error] * 2)
    assert bench.seen.drops == [Drop.CLOSED if error is BatcherClosed else Drop.NO_INSTANCE] * 2
    bench.batcher.close()
