"""Batches that instances get shortly before their current execution ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence

import pytest

from paceline.scheduler.batch_queue import BatchQueue
from paceline.scheduler.errors import QueueFull, QueueTimeout
from paceline.scheduler.observer import Drop
from paceline.scheduler.policy import BatchPolicy, QueueLimits, QueuePolicy
from paceline.scheduler.request import AnyRequest
from paceline.scheduler.runner import Outcome, ThreadRunner
from paceline.scheduler.testing import Results
from tests.unit.scheduler.staging_bench import DUE_NS, LONG_NS, MS, Counted, StagingBench
from tests.unit.scheduler.workbench import one_turn, push


@pytest.fixture
async def bench() -> AsyncIterator[StagingBench]:
    bench = StagingBench()
    await bench.learn()
    yield bench
    bench.batcher.close()


async def test_next_batch_is_handed_over_shortly_before_the_end_and_not_sooner(bench: StagingBench) -> None:
    first = await bench.submit("a", "b")
    second = await bench.submit("c")
    bench.clock.advance(DUE_NS - 1)
    await one_turn()
    assert bench.runner.next is None
    later = await bench.submit("d")
    bench.clock.advance(1)
    assert bench.runner.next == ["c", "d"]
    assert bench.batcher.waiting_requests == 2
    bench.clock.advance(2 * MS)
    bench.runner.finish(str.upper)
    assert await asyncio.gather(*first) == ["A", "B"]
    assert bench.batcher.waiting_requests == 0
    bench.clock.advance(LONG_NS)
    bench.runner.finish(str.upper)
    assert await asyncio.gather(*second, *later) == ["C", "D"]
    # Counted from when it executed, not from when it was handed over.
    assert bench.seen.reports[-1].finished_ns - bench.seen.reports[-1].started_ns == LONG_NS
    assert bench.seen.reports[-1].waits_ns == [LONG_NS, 2 * MS + 1]


async def test_request_that_times_out_before_the_end_is_near_fails_on_time(bench: StagingBench) -> None:
    await bench.submit("a", "b")
    (late,) = await bench.submit("c", timeout_ns=5 * MS)
    bench.clock.advance(5 * MS - 1)
    assert not late.done()
    bench.clock.advance(1)
    assert isinstance(late.exception(), QueueTimeout)


async def test_request_that_comes_when_the_end_is_near_is_handed_over_at_once(bench: StagingBench) -> None:
    await bench.submit("a", "b")
    bench.clock.advance(DUE_NS)
    await bench.submit("c")
    assert bench.runner.next == ["c"]
    await bench.submit("d")  # a batch handed over stays unchanged
    assert bench.runner.next == ["c"]
    assert bench.batcher.waiting_requests == 2


async def test_batch_handed_over_takes_room_until_it_executes(bench: StagingBench) -> None:
    await bench.submit("a", "b")
    waiting = await bench.submit("c", "d", size_bytes=10)
    bench.clock.advance(DUE_NS)
    assert bench.runner.next == ["c", "d"]
    assert (bench.shared_limits.requests, bench.shared_limits.size_bytes) == (2, 20)
    await bench.submit("e", "f")
    with pytest.raises(QueueFull):
        await bench.submit("g")
    bench.runner.finish(str.upper)
    assert (bench.shared_limits.requests, bench.shared_limits.size_bytes) == (2, 0)
    await bench.submit("g", "h")
    assert not any(one.done() for one in waiting)


async def test_batch_handed_over_takes_room_of_its_model_and_level() -> None:
    queue: BatchQueue[AnyRequest] = BatchQueue(
        BatchPolicy(
            max_batch_rows=2,
            priority_levels=2,
            default_priority_level=1,
            limits=QueueLimits(max_rows=3, max_bytes=30),
            queue=QueuePolicy(max_queue_size=2),
        )
    )
    for payload in "ab":
        push(queue, payload, 1, "k", 0, size_bytes=10)
    (batch,) = queue.poll(0, idle=1).batches
    queue.reserve(batch)
    assert (queue.waiting.requests, queue.waiting.reserved.requests) == (0, 2)
    with pytest.raises(QueueFull, match="2 requests"):
        push(queue, "c", 1, "k", 0)
    with pytest.raises(QueueFull, match="3 rows"):
        push(queue, "c", 2, "k", 0, priority=2)
    with pytest.raises(QueueFull, match="30 bytes"):
        push(queue, "c", 1, "k", 0, priority=2, size_bytes=11)
    push(queue, "c", 1, "k", 0, priority=2, size_bytes=10)
    queue.release(batch)
    push(queue, "d", 2, "k", 0, size_bytes=20)
    assert queue.waiting.reserved.requests == 0


async def test_requests_taken_back_from_a_slow_instance_are_never_counted_twice() -> None:
    bench = StagingBench()
    await bench.learn()
    bench.shared_limits.highest = 0
    await bench.submit("a", "b")
    await bench.submit("c", "d")
    bench.clock.advance(DUE_NS)
    await one_turn()
    assert bench.runner.next is not None
    bench.clock.advance(LONG_NS)
    await one_turn()
    assert bench.runner.next is None
    assert (bench.shared_limits.requests, bench.shared_limits.highest) == (2, 2)
    bench.batcher.close()


async def test_batch_handed_over_still_counts_as_waiting_in_its_level() -> None:
    bench = StagingBench(levels=2)
    await bench.learn()
    await bench.submit("a", "b")
    bench.clock.advance(DUE_NS)
    await bench.submit("c", priority=1)
    await bench.submit("d")
    assert bench.runner.next == ["c"]
    assert [bench.batcher.waiting_of_level(level) for level in (1, 2)] == [1, 1]
    assert bench.batcher.waiting_requests == 2
    bench.runner.finish(str.upper)
    await one_turn()
    assert [bench.batcher.waiting_of_level(level) for level in (1, 2)] == [0, 1]
    for _ in range(2):
        bench.runner.finish(str.upper)
        await one_turn()
    assert [bench.batcher.waiting_of_level(level) for level in (1, 2)] == [0, 0]
    bench.batcher.close()


async def test_idle_instance_is_preferred_to_handing_over() -> None:
    bench = StagingBench(instances=2)
    await bench.learn()
    await bench.submit("a", "b")
    bench.clock.advance(DUE_NS)
    await bench.submit("c")
    assert [runner.next for runner in bench.runners] == [None, None]
    assert [runner.busy for runner in bench.runners] == [True, True]
    bench.batcher.close()


async def test_nothing_is_handed_over_during_an_execution_of_unknown_length() -> None:
    bench = StagingBench()
    await bench.submit("a", "b")
    bench.clock.advance(10 * LONG_NS)
    await bench.submit("c")
    assert bench.runner.next is None
    bench.runner.finish(str.upper)
    assert bench.runner.busy
    bench.batcher.close()


def test_request_is_in_time_or_late_by_when_its_batch_will_start() -> None:
    for starts_ns, in_time in ((0, True), (MS, True), (2 * MS, False)):
        queue: BatchQueue[AnyRequest] = BatchQueue(BatchPolicy(max_batch_rows=2))
        for _ in range(3):
            push(queue, "before", 1, "k", 0)
            (batch,) = queue.poll(0, idle=1).batches
            queue.done(batch, LONG_NS, LONG_NS)
        push(queue, "x", 1, "k", LONG_NS, deadline_ns=2 * LONG_NS + MS)
        decision = queue.poll(LONG_NS, idle=1, starts_ns=starts_ns and LONG_NS + starts_ns)
        assert (len(decision.batches), len(decision.unreachable)) == ((1, 0) if in_time else (0, 1))


async def test_batch_handed_over_is_taken_back_if_the_execution_takes_longer(bench: StagingBench) -> None:
    await bench.submit("a", "b")
    (gone, kept) = await bench.submit("x", "c")
    bench.clock.advance(DUE_NS)
    assert bench.runner.next == ["x", "c"]
    gone.cancel()  # too late to be taken out
    (later,) = await bench.submit("d", timeout_ns=LONG_NS)
    bench.clock.advance(4 * MS)
    assert bench.runner.next is None
    assert bench.batcher.waiting_requests == 2
    (cancelled,) = await bench.submit("y")
    bench.clock.advance(LONG_NS)
    await one_turn()
    assert bench.runner.next is None  # nobody can tell when it will end
    cancelled.cancel()
    with pytest.raises(QueueTimeout):
        await later
    bench.runner.finish(str.upper)
    await one_turn()
    assert bench.runner.batches[-1] == ["c"]
    bench.runner.finish(str.upper)
    assert await kept == "C"
    assert bench.batcher.waiting_requests == 0
    assert bench.seen.count(Drop.CANCELLED) == 2


async def test_executing_instance_is_not_kept_waiting_for_more_until_its_end_is_near() -> None:
    arrivals = Counted()
    bench = StagingBench(arrivals=arrivals)
    await bench.learn()
    for in_ns, asked in ((DUE_NS - 1, 0), (DUE_NS, 1)):
        await bench.submit("a", "b")
        bench.clock.advance(in_ns)
        before = arrivals.asked
        (waiting,) = await bench.submit("c")
        assert arrivals.asked - before == asked
        waiting.cancel()
        bench.clock.advance(LONG_NS - in_ns)
        bench.runner.finish(str.upper)
        await one_turn()
        while bench.runner.busy:
            bench.clock.advance(LONG_NS)
            bench.runner.finish(str.upper)
            await one_turn()
    bench.batcher.close()


@pytest.mark.parametrize("limit_ns", [0, 21 * MS])
async def test_requests_handed_over_count_as_executing_until_taken_back(limit_ns: int) -> None:
    arrivals = Counted()
    bench = StagingBench(limit_ns=limit_ns, arrivals=arrivals)
    await bench.learn()
    await bench.submit("a", "b")
    waiting = await bench.submit("c")
    bench.clock.advance(DUE_NS)
    assert (bench.runner.next, arrivals.executing) == (["c"], 3)
    bench.clock.advance(4 * MS)  # longer than expected, or than its limit
    assert (bench.runner.next, arrivals.executing) == (None, 0 if limit_ns else 2)
    assert not waiting[0].done()
    bench.batcher.close()


async def test_failed_batch_comes_before_waiting_requests_and_nothing_is_handed_over_meanwhile(
    bench: StagingBench,
) -> None:
    first = await bench.submit("a", "b")
    await bench.submit("c")
    bench.clock.advance(DUE_NS)
    assert bench.runner.next == ["c"]
    await bench.submit("d")
    bench.runner.fail(ValueError("bad row"))
    await one_turn()
    bench.clock.advance(DUE_NS)
    await one_turn()
    assert bench.runner.next is None  # "c" executes; the halves of the failed one are next
    for payloads in (["c"], ["a"], ["b"], ["d"]):
        assert bench.runner.batches[-1] == payloads
        bench.runner.finish(str.upper)
        await one_turn()
    assert await asyncio.gather(*first) == ["A", "B"]


async def test_queue_timeout_no_longer_counts_after_the_hand_over(bench: StagingBench) -> None:
    await bench.submit("a", "b")
    (in_time,) = await bench.submit("c", timeout_ns=DUE_NS + MS)
    (too_late,) = await bench.submit("x", timeout_ns=MS)
    bench.clock.advance(LONG_NS)
    bench.runner.finish(str.upper)
    await one_turn()
    bench.runner.finish(str.upper)
    assert await in_time == "C"
    with pytest.raises(QueueTimeout):
        await too_late


async def test_thread_begins_the_next_batch_by_itself_and_gives_back_only_one_not_begun() -> None:
    begun: list[Sequence[str]] = []
    gates = {name: threading.Event() for name in "ab"}
    entered = {name: threading.Event() for name in "ab"}

    def execute(payloads: Sequence[str], padded_rows: int) -> Results[str]:
        begun.append(payloads)
        entered[payloads[0]].set()
        gates[payloads[0]].wait(60)
        return Results(payloads)

    runner: ThreadRunner[str, str] = ThreadRunner("ahead", execute)
    runner.start()
    ends: list[Outcome[str]] = []
    last: asyncio.Future[Outcome[str]] = asyncio.get_running_loop().create_future()
    runner.run(["a"], 1, ends.append)
    await asyncio.to_thread(entered["a"].wait, 60)
    runner.run(["gone"], 1, ends.append)
    assert runner.take_back()
    runner.run(["b"], 1, last.set_result)
    gates["a"].set()
    # The loop isn't needed: this blocks it until the thread has begun the next batch.
    assert entered["b"].wait(60)
    assert not runner.take_back()
    gates["b"].set()
    ends.append(await asyncio.wait_for(last, 60))
    assert [end.executed.results for end in ends if end.executed] == [["a"], ["b"]]
    assert begun == [["a"], ["b"]]
    runner.stop()


async def test_batch_handed_over_is_expected_to_begin_when_its_own_instance_ends() -> None:
    """Not when the last of the ending executions does: a request that can be answered in time isn't refused."""
    bench = StagingBench(instances=2)
    await bench.learn()
    began_ns = bench.clock.now_ns()
    await bench.submit("a", "b")
    bench.clock.advance(3 * MS // 2)
    await bench.submit("c", "d")
    bench.clock.advance(LONG_NS - 2 * MS)
    assert all(runner.busy for runner in bench.runners)
    (hurried,) = await bench.submit("e", deadline_ns=began_ns + 2 * LONG_NS + MS)
    assert not hurried.done()
    assert [runner.next for runner in bench.runners].count(["e"]) == 1
    bench.batcher.close()
