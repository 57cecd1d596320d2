"""Alike requests submitted together: they are taken as if one came after the other, or not at all."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from paceline.scheduler.batch_queue import Alike, BatchQueue
from paceline.scheduler.errors import DeadlineUnreachable, QueueFull
from paceline.scheduler.pending import Pending
from paceline.scheduler.policy import NEVER, BatchPolicy, QueueLimits, QueuePolicy
from paceline.scheduler.waiting import SharedQueueLimits
from tests.unit.scheduler.workbench import Bench, one_turn

ONE_ROW = Alike(1, "k")
TEN_BYTES = Alike(1, "k", size_bytes=10)


def _together(
    bench: Bench, payloads: str, alike: Alike = ONE_ROW, *, deadlines_ns: Sequence[int] = ()
) -> Sequence[Pending[str, str]]:
    arrivals_ns = [bench.clock.now_ns()] * len(payloads)
    return bench.batcher.submit_alike(list(payloads), alike, arrivals_ns, deadlines_ns or [NEVER] * len(payloads))


async def test_alike_requests_share_a_batch_and_each_gets_its_own_result() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=8))
    pendings = _together(bench, "abc")
    await one_turn()
    assert bench.runner.batches[-1] == ["a", "b", "c"]
    bench.runner.finish(str.upper)
    assert [pending.result() for pending in pendings] == ["A", "B", "C"]


async def test_alike_requests_queue_behind_earlier_and_before_later_requests() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=3))
    bench.put("a")
    _together(bench, "bc")
    bench.put("d")
    _together(bench, "ef")
    await one_turn()
    assert bench.runner.batches[-1] == ["a", "b", "c"]
    bench.runner.finish(str.upper)
    await one_turn()
    assert bench.runner.batches[-1] == ["d", "e", "f"]


async def test_alike_requests_queue_behind_those_announced_before() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=3))
    bench.batcher.announce(lambda payloads: bench.put(*payloads) and None, "a")
    _together(bench, "bc")
    await one_turn()
    assert bench.runner.batches[-1] == ["a", "b", "c"]


async def test_results_of_alike_requests_are_delivered_together_in_order() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=8, preserve_ordering=True))
    pendings, told = _together(bench, "abc"), list[list[object]]()
    for pending, name in zip(pendings, "abc", strict=True):
        pending.on_done, pending.subject = told.append, name
    await one_turn()
    bench.runner.finish(str.upper)
    assert told == [["a", "b", "c"]]


async def test_cancelled_request_leaves_the_others_in_the_queue() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=8))
    pendings = _together(bench, "abc")
    pendings[1].cancel()
    assert bench.batcher.waiting_requests == 2
    await one_turn()
    assert bench.runner.batches[-1] == ["a", "c"]


async def test_timeouts_count_from_each_requests_arrival() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=8, queue=QueuePolicy(allow_timeout_override=True)), instances=1)
    await bench.submit("busy")
    pendings = _together(bench, "ab", Alike(1, "k", timeout_ns=50))
    bench.clock.advance(49)
    await one_turn()
    assert not any(pending.done() for pending in pendings)
    bench.clock.advance(1)
    await one_turn()
    assert [type(pending.exception()).__name__ for pending in pendings] == ["QueueTimeout", "QueueTimeout"]


@pytest.mark.parametrize(
    "policy",
    [
        BatchPolicy(max_batch_rows=8),
        BatchPolicy(max_batch_rows=8, max_queue_delay_ns=50),
        BatchPolicy(max_batch_rows=8, queue=QueuePolicy(default_timeout_ns=50)),
        BatchPolicy(
            max_batch_rows=8,
            priority_levels=3,
            default_priority_level=1,
            queue=QueuePolicy(default_timeout_ns=50),
            priority_queue={2: QueuePolicy(default_timeout_ns=20, allow_timeout_override=True)},
        ),
    ],
    ids=["plain", "delay", "default timeout", "levels"],
)
@pytest.mark.parametrize("timeout_ns", [0, 10])
def test_alike_requests_wait_as_they_would_one_after_the_other(policy: BatchPolicy, timeout_ns: int) -> None:
    arrivals_ns, deadlines_ns = [3, 5, 5, 8], [NEVER, 30, NEVER, 70]
    waiting = []
    for together in (False, True):
        queue: BatchQueue[int] = BatchQueue(policy)
        for priority in (2, 9):
            if together:
                alike = Alike(1, "k", size_bytes=10, priority=priority, timeout_ns=timeout_ns)
                queue.push_alike(range(4), alike, arrivals_ns, deadlines_ns)
            else:
                for number, (now_ns, deadline_ns) in enumerate(zip(arrivals_ns, deadlines_ns, strict=True)):
                    how = {"size_bytes": 10, "priority": priority, "timeout_ns": timeout_ns}
                    queue.push(number, 1, "k", now_ns, rpc_deadline_ns=deadline_ns, **how)
        queue.push(4, 1, "k", 8)
        waiting.append([(one.payload, one.order, one.level, one.act_at_ns) for one in queue.take_all()])
        assert queue.waiting.requests == queue.lanes == 0
    assert waiting[0] == waiting[1]
    assert len(waiting[0]) == 9


@pytest.mark.parametrize(
    "policy",
    [
        BatchPolicy(max_batch_rows=8, queue=QueuePolicy(max_queue_size=2)),
        BatchPolicy(max_batch_rows=8, limits=QueueLimits(max_rows=2)),
        BatchPolicy(max_batch_rows=8, limits=QueueLimits(max_bytes=20)),
    ],
    ids=["requests", "rows", "bytes"],
)
async def test_none_is_taken_where_there_is_no_room_for_all(policy: BatchPolicy) -> None:
    bench = Bench(policy)
    assert _together(bench, "abc", TEN_BYTES) == ()
    assert bench.batcher.waiting_requests == 0
    assert len(_together(bench, "ab", TEN_BYTES)) == 2
    with pytest.raises(QueueFull):
        bench.put("c", size_bytes=10)


@pytest.mark.parametrize("limits", [SharedQueueLimits(2, 0), SharedQueueLimits(0, 20)], ids=["requests", "bytes"])
async def test_none_is_taken_where_other_models_leave_no_room_for_all(limits: SharedQueueLimits) -> None:
    bench, other = (
        Bench(BatchPolicy(max_batch_rows=8), shared_limits=limits),
        Bench(BatchPolicy(max_batch_rows=8), shared_limits=limits),
    )
    assert len(_together(other, "a", TEN_BYTES)) == 1
    assert _together(bench, "bc", TEN_BYTES) == ()
    assert len(_together(bench, "b", TEN_BYTES)) == 1


async def test_none_is_taken_if_one_might_not_be_answered_in_time() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=8))
    await bench.measure(1_000)
    soon = bench.clock.now_ns() + 500
    assert _together(bench, "ab", deadlines_ns=[NEVER, soon]) == ()
    with pytest.raises(DeadlineUnreachable):
        bench.put("b", rpc_deadline_ns=soon)
    late = bench.clock.now_ns() + 1_000_000
    assert len(_together(bench, "ab", deadlines_ns=[NEVER, late])) == 2


def test_none_is_taken_if_a_deadline_is_too_close_when_the_last_one_arrives() -> None:
    queue: BatchQueue[int] = BatchQueue(BatchPolicy(max_batch_rows=8))
    queue.latency.observe("k", 1, 1_000, 0)
    assert queue.takes_alike(ONE_ROW, [0, 0, 0], [NEVER, 10_000, NEVER])
    assert not queue.takes_alike(ONE_ROW, [0, 0, 5_000], [NEVER, 10_000, NEVER])


@pytest.mark.parametrize(("rows", "taken"), [(0, 0), (1, 2), (4, 2), (5, 0)])
async def test_none_is_taken_of_a_size_that_no_batch_can_have(rows: int, taken: int) -> None:
    assert len(_together(Bench(BatchPolicy(max_batch_rows=4)), "ab", Alike(rows, "k"))) == taken


async def test_none_is_taken_where_there_is_no_room_for_the_rows_of_all() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=8, limits=QueueLimits(max_rows=5)))
    assert _together(bench, "abc", Alike(2, "k")) == ()
    assert len(_together(bench, "ab", Alike(2, "k"))) == 2


async def test_none_is_taken_where_lanes_are_held_for_returning_callers() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=8, await_returns=True))
    assert not bench.batcher.takes_any_alike
    assert _together(bench, "ab") == ()
    bench.batcher.flush()
    assert bench.batcher.takes_any_alike
    assert len(_together(bench, "ab")) == 2


async def test_none_is_taken_by_a_closed_batcher() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=8))
    bench.batcher.close()
    assert _together(bench, "ab") == ()
