"""Requests that are alike, submitted together: like one after the other, or not at all."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from scheduler.batch_queue import Alike
from scheduler.errors import DeadlineUnreachable, QueueFull
from scheduler.pending import Pending
from scheduler.policy import NEVER, BatchPolicy, QueueLimits, QueuePolicy
from scheduler.waiting import Room
from tests.unit.scheduler.workbench import Bench, one_turn

ONE_ROW = Alike(1, "k")
TEN_BYTES = Alike(1, "k", size_bytes=10)


def _together(
    bench: Bench, payloads: str, alike: Alike = ONE_ROW, *, deadlines_ns: Sequence[int] = ()
) -> Sequence[Pending[str, str]]:
    arrivals_ns = [bench.clock.now_ns()] * len(payloads)
    return bench.batcher.submit_alike(list(payloads), alike, arrivals_ns, deadlines_ns or [NEVER] * len(payloads))


async def test_each_gets_its_own_result_of_one_batch() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=8))
    pendings = _together(bench, "abc")
    await one_turn()
    assert bench.runner.batches[-1] == ["a", "b", "c"]
    bench.runner.finish(str.upper)
    assert [pending.result() for pending in pendings] == ["A", "B", "C"]


async def test_they_queue_behind_those_that_came_before_and_before_those_that_come_after() -> None:
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


async def test_they_are_told_of_together_in_their_order() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=8, preserve_ordering=True))
    pendings, told = _together(bench, "abc"), list[list[object]]()
    for pending, name in zip(pendings, "abc", strict=True):
        pending.told, pending.about = told.append, name
    await one_turn()
    bench.runner.finish(str.upper)
    assert told == [["a", "b", "c"]]


async def test_one_that_is_cancelled_leaves_the_others() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=8))
    pendings = _together(bench, "abc")
    pendings[1].cancel()
    assert bench.batcher.waiting_requests == 2
    await one_turn()
    assert bench.runner.batches[-1] == ["a", "c"]


async def test_timeouts_count_from_each_ones_arrival() -> None:
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


@pytest.mark.parametrize("room", [Room(2, 0), Room(0, 20)], ids=["requests", "bytes"])
async def test_none_is_taken_where_other_models_leave_no_room_for_all(room: Room) -> None:
    bench, other = Bench(BatchPolicy(max_batch_rows=8), room=room), Bench(BatchPolicy(max_batch_rows=8), room=room)
    assert len(_together(other, "a", TEN_BYTES)) == 1
    assert _together(bench, "bc", TEN_BYTES) == ()
    assert len(_together(bench, "b", TEN_BYTES)) == 1


async def test_none_is_taken_if_one_may_not_be_answered_in_time() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=8))
    await bench.measure(1_000)
    soon = bench.clock.now_ns() + 500
    assert _together(bench, "ab", deadlines_ns=[NEVER, soon]) == ()
    with pytest.raises(DeadlineUnreachable):
        bench.put("b", rpc_deadline_ns=soon)
    late = bench.clock.now_ns() + 1_000_000
    assert len(_together(bench, "ab", deadlines_ns=[NEVER, late])) == 2


async def test_none_is_taken_that_has_too_many_rows() -> None:
    assert _together(Bench(BatchPolicy(max_batch_rows=4)), "ab", Alike(5, "k")) == ()


async def test_none_is_taken_where_lanes_are_held_for_those_who_were_just_answered() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=8, await_returns=True))
    assert not bench.batcher.takes_alike
    assert _together(bench, "ab") == ()
    bench.batcher.flush()
    assert bench.batcher.takes_alike
    assert len(_together(bench, "ab")) == 2


async def test_a_closed_batcher_takes_none() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=8))
    bench.batcher.close()
    assert _together(bench, "ab") == ()
