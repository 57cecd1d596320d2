"""The asyncio shell around the queue, with instances that finish and time that moves only when a test says so."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from paceline.scheduler.batcher import Batcher
from paceline.scheduler.errors import (
    BatcherClosed,
    DeadlineUnreachable,
    QueueFull,
    QueueTimeout,
    RequestTooLarge,
)
from paceline.scheduler.observer import Drop
from paceline.scheduler.policy import BatchPolicy, QueuePolicy
from paceline.scheduler.testing import ManualClock, StepRunner
from paceline.scheduler.turns import ArrivalModel
from tests.unit.scheduler.workbench import Bench, one_turn, submit

MS = 1_000_000


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench(BatchPolicy(max_batch_rows=4))
    yield bench
    bench.batcher.close()


async def test_requests_submitted_in_one_turn_share_a_batch_and_each_is_answered(bench: Bench) -> None:
    futures = bench.put("a", "b", "c")
    await one_turn()
    bench.runner.finish(str.upper)
    assert await asyncio.gather(*futures) == ["A", "B", "C"]
    assert bench.runner.batches == [["a", "b", "c"]]
    assert bench.seen.rows == [3]


async def test_requests_submitted_while_busy_wait_and_share_a_batch_when_the_instance_is_free(bench: Bench) -> None:
    first = bench.put("a")
    await one_turn()
    later = bench.put("b", "c")
    await one_turn()
    assert bench.batcher.waiting_requests == 2
    bench.runner.finish(str.upper)
    await one_turn()
    bench.runner.finish(str.upper)
    assert await asyncio.gather(*first, *later) == ["A", "B", "C"]
    assert bench.runner.batches == [["a"], ["b", "c"]]


async def test_instance_done_early_gets_requests_that_arrive_while_its_answers_leave() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=4), arrivals=ArrivalModel())
    first = bench.put("a", "b", "c")
    await one_turn()
    bench.put("d")
    await one_turn()
    loop = asyncio.get_running_loop()
    first[0].on_answers = lambda _: loop.call_soon(bench.put, "e") and None  # type: ignore[assignment]
    bench.runner.finish(str.upper)
    await one_turn()
    assert not bench.runner.busy
    bench.clock.advance(1_000_000)
    assert bench.runner.batches == [["a", "b", "c"], ["d", "e"]]


async def test_instance_done_late_starts_on_waiting_requests_before_its_answers_leave(bench: Bench) -> None:
    bench.put("a")
    await one_turn()
    bench.put("b")
    await one_turn()
    bench.clock.advance(5 * MS)
    bench.runner.finish(str.upper)
    assert bench.runner.batches == [["a"], ["b"]]


@pytest.mark.parametrize(("took_us", "early"), [(299, True), (300, False)])
async def test_instance_counts_as_done_early_if_the_loop_takes_longer_for_as_many_requests(
    took_us: int, early: bool
) -> None:
    bench = Bench(BatchPolicy(max_batch_rows=4))
    await bench.submit("a", "b", "c")
    await bench.submit("d")
    bench.clock.advance(took_us * 1_000)
    bench.runner.finish(str.upper)
    assert bench.runner.busy != early
    await one_turn()
    assert bench.runner.batches == [["a", "b", "c"], ["d"]]
    bench.batcher.close()


async def test_instance_done_early_starts_on_a_full_batch_at_once(bench: Bench) -> None:
    bench.put("a")
    await one_turn()
    bench.put("b", "c", "d", "e")
    await one_turn()
    bench.runner.finish(str.upper)
    assert bench.runner.batches == [["a"], ["b", "c", "d", "e"]]


async def test_two_instances_are_both_kept_busy() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=1), instances=2)
    futures = bench.put("a", "b", "c")
    await one_turn()
    assert [runner.busy for runner in bench.runners] == [True, True]
    assert bench.batcher.waiting_requests == 1
    for runner in (*bench.runners, bench.runners[0]):
        runner.finish(str.upper)
    assert await asyncio.gather(*futures) == ["A", "B", "C"]
    bench.batcher.close()


async def test_idle_instance_waits_for_the_configured_delay_and_starts_with_the_alarm() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=4, max_queue_delay_ns=5 * MS))
    futures = bench.put("a")
    await one_turn()
    bench.clock.advance(5 * MS - 1)
    assert not bench.runner.busy
    bench.clock.advance(1)
    bench.runner.finish(str.upper)
    assert await futures[0] == "A"
    assert bench.seen.reports[0].waits_ns == [5 * MS]
    bench.batcher.close()


async def test_queue_timeout_fails_a_request_on_time_though_no_instance_is_free() -> None:
    policy = BatchPolicy(max_batch_rows=4, queue=QueuePolicy(default_timeout_ns=50 * MS, allow_timeout_override=True))
    bench = Bench(policy)
    bench.clock.advance(7 * MS)
    bench.put("blocker")
    await one_turn()
    hasty, patient = bench.put("a", timeout_ns=10 * MS), bench.put("b")
    await one_turn()
    bench.clock.advance(10 * MS)
    with pytest.raises(QueueTimeout, match=r"Request timeout expired after 10000 us in the queue$"):
        await hasty[0]
    assert not patient[0].done()
    bench.runner.finish(str.upper)
    bench.runner.finish(str.upper)
    assert await patient[0] == "B"
    assert bench.seen.count(Drop.EXPIRED) == 1
    bench.batcher.close()


async def test_rpc_deadline_bounds_the_wait(bench: Bench) -> None:
    bench.put("blocker")
    await one_turn()
    future = submit(bench.batcher, "a", 1, "k", deadline_ns=bench.clock.now_ns() + MS)
    await one_turn()
    bench.clock.advance(MS)
    with pytest.raises(QueueTimeout, match="Request timeout expired after 1000 us in the queue: Deadline Exceeded"):
        await future


async def test_submit_beyond_the_queue_bound_is_refused_and_counted() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=1, queue=QueuePolicy(max_queue_size=1)))
    bench.put("runs")
    await one_turn()
    bench.put("waits")
    with pytest.raises(QueueFull):
        bench.put("too many")
    assert bench.seen.drops == [Drop.FULL_REQUESTS]
    assert bench.batcher.waiting_requests == 1
    bench.batcher.close()


async def test_waiting_requests_are_counted_by_level_and_shape() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=1, priority_levels=2, default_priority_level=2))
    await bench.submit("executes")
    bench.put("a", priority=1)
    bench.put("b", "c", key="other")
    told = bench.batcher.waiting_requests, bench.batcher.lanes, *map(bench.batcher.waiting_of_level, (1, 2))
    assert told == (3, 2, 1, 2)
    bench.batcher.announce(lambda payloads: None, "d")
    assert bench.batcher.waiting_requests == 4
    bench.batcher.close()


async def test_batcher_needs_nothing_but_a_policy_and_runners() -> None:
    runner: StepRunner[str, str] = StepRunner(ManualClock())
    batcher: Batcher[str, str] = Batcher(BatchPolicy(max_batch_rows=4), [runner])
    batcher.start()
    future = submit(batcher, "a", 1, "k")
    await one_turn()
    runner.finish(str.upper)
    assert await future == "A"
    batcher.close()


async def test_submit_of_too_many_rows_is_refused(bench: Bench) -> None:
    with pytest.raises(RequestTooLarge):
        submit(bench.batcher, "a", 5, "k")


async def test_drain_executes_queued_requests_without_further_delay_and_refuses_new_ones() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=4, max_queue_delay_ns=10**12))
    futures = bench.put("a", "b")
    await one_turn()
    assert not bench.runner.busy
    drained = asyncio.create_task(bench.batcher.drain())
    await one_turn()
    with pytest.raises(BatcherClosed):
        bench.put("late")
    assert not drained.done()
    bench.runner.finish(str.upper)
    await drained
    assert await asyncio.gather(*futures) == ["A", "B"]
    bench.batcher.close()


async def test_drain_with_nothing_to_do_returns_at_once(bench: Bench) -> None:
    await bench.batcher.drain()


async def test_failed_start_leaves_nothing_running() -> None:
    class Unable(StepRunner[str, str]):
        def start(self) -> None:
            raise RuntimeError("can't start new thread")

    clock = ManualClock()
    able = StepRunner[str, str](clock)
    policy = BatchPolicy(execution_limit_ns=MS)
    batcher: Batcher[str, str] = Batcher(policy, [able, Unable(clock)], clock=clock)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        batcher.start()
    assert able.stopped
    assert clock.alarms == 0
    with pytest.raises(BatcherClosed):
        submit(batcher, "a", 1, "k")


@pytest.mark.parametrize("most", [0, 1, 2])
async def test_start_with_too_few_descriptors_leaves_no_alarm(most: int) -> None:
    class Short(ManualClock):
        """Has `most` alarms at most."""

        def alarm(self, ring: Callable[[], None]) -> Any:
            if self.alarms == most:
                raise OSError(errno.EMFILE, "timerfd_create")
            return super().alarm(ring)

    clock = Short()
    runner = StepRunner[str, str](clock)
    batcher: Batcher[str, str] = Batcher(BatchPolicy(execution_limit_ns=MS), [runner], clock=clock)
    with pytest.raises(OSError, match="timerfd_create"):
        batcher.start()
    assert (clock.alarms, runner.started) == (0, False)
    with pytest.raises(BatcherClosed):
        submit(batcher, "a", 1, "k")
    batcher.close()
    await batcher.drain()


async def test_close_fails_every_unanswered_request_and_ignores_late_results(bench: Bench) -> None:
    running, queued = bench.put("a"), []
    await one_turn()
    queued = bench.put("b", key="1") + bench.put("c", key="2")
    bench.batcher.close()
    errors = await asyncio.gather(*running, *queued, return_exceptions=True)
    assert all(isinstance(error, BatcherClosed) for error in errors)
    bench.runner.finish(str.upper)
    assert bench.runner.stopped
    bench.batcher.close()


async def test_answered_requests_leave_no_reference_cycle_behind(bench: Bench) -> None:
    import gc
    import weakref

    class Payload(str):
        pass

    gc.collect()
    gc.disable()
    try:
        payload = Payload("a")
        gone = weakref.ref(payload)
        future = submit(bench.batcher, payload, 1, "k")
        await one_turn()
        bench.runner.finish(lambda _: "A")
        assert await future == "A"
        bench.runner.batches.clear()
        bench.seen.reports.clear()  # the last to refer to the requests of a batch
        del payload, future
        assert gone() is None
    finally:
        gc.enable()


async def test_request_with_an_unreachable_deadline_is_refused_and_counted() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=4))
    await bench.measure(10 * MS)
    with pytest.raises(DeadlineUnreachable):
        submit(bench.batcher, "b", 1, "k", deadline_ns=bench.clock.now_ns() + MS)
    assert bench.seen.count(Drop.UNREACHABLE) == 1
    bench.batcher.close()


async def test_batch_of_which_nothing_ran_teaches_no_duration() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=4))
    for _ in range(3):
        await bench.submit("unreadable")
        bench.clock.advance(10 * MS)
        bench.runner.finish_with([ValueError("unreadable")], ran=False)
    (request,) = await bench.submit("b", deadline_ns=bench.clock.now_ns() + MS)
    bench.runner.finish(str.upper)
    assert request.result() == "B"
    bench.batcher.close()


async def test_request_is_given_up_instead_of_executed_once_its_deadline_is_unreachable() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=4))
    await bench.measure(10 * MS)
    await bench.submit("a")
    doomed = submit(bench.batcher, "b", 1, "k", deadline_ns=bench.clock.now_ns() + 25 * MS)
    bench.clock.advance(16 * MS)
    bench.runner.finish(str.upper)
    with pytest.raises(DeadlineUnreachable, match=r": 9000 us are left, an answer takes about \d{5} us"):
        await doomed
    assert not bench.runner.busy
    bench.batcher.close()
