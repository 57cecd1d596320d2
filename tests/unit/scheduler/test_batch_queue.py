"""Batch formation as Triton's own test suite specifies it, row by row, and ways to leave without being executed."""

from __future__ import annotations

import pytest

from paceline.scheduler.batch_queue import BatchQueue, Decision
from paceline.scheduler.errors import QueueFull, RequestTooLarge
from paceline.scheduler.policy import NEVER, BatchPolicy, QueuePolicy
from paceline.scheduler.request import AnyRequest
from paceline.scheduler.sizing import PAUSE_NS
from tests.unit.scheduler.workbench import push

SECOND = 1_000_000_000
TRITON_QA = BatchPolicy(max_batch_rows=8, preferred_batch_rows=(2, 6), max_queue_delay_ns=10 * SECOND)
PREFERRED_ONLY = BatchPolicy(max_batch_rows=8, preferred_batch_rows=(4, 6))


def rows_of(decision: Decision[AnyRequest]) -> list[int]:
    return [batch.rows for batch in decision.batches]


def poll_all(queue: BatchQueue[AnyRequest], now_ns: int) -> list[int]:
    return rows_of(queue.poll(now_ns, idle=100))


def filled(policy: BatchPolicy, *rows: int, key: str = "k") -> BatchQueue[AnyRequest]:
    queue: BatchQueue[AnyRequest] = BatchQueue(policy)
    for count in rows:
        push(queue, "request", count, key, now_ns=0)
    return queue


@pytest.mark.parametrize(
    ("rows", "at_once", "after_delay"),
    [
        pytest.param([2], [2], [], id="static-preferred-2"),
        pytest.param([6], [6], [], id="static-preferred-6"),
        pytest.param([1], [], [1], id="below-any-preferred"),
        pytest.param([3], [], [3], id="not-preferred"),
        pytest.param([7], [7], [], id="above-largest-preferred"),
        pytest.param([1, 3], [], [4], id="two-not-preferred"),
        pytest.param([3, 7], [3, 7], [], id="sum-above-maximum"),
        pytest.param([3, 4], [3], [4], id="sum-above-largest-preferred"),
        pytest.param([1] * 6, [6], [], id="biggest-preferred"),
        pytest.param([1] * 3, [2], [1], id="best-preferred"),
        pytest.param([2, 3, 2], [2], [5], id="preferred-before-sum-above-largest-preferred"),
        pytest.param([5, 2, 1], [5, 2], [1], id="nobody-overtakes-who-is-too-large"),
    ],
)
def test_poll_with_preferred_sizes_and_delay_batches_as_triton_does(
    rows: list[int], at_once: list[int], after_delay: list[int]
) -> None:
    queue = filled(TRITON_QA, *rows)
    assert poll_all(queue, 0) == at_once
    assert poll_all(queue, 10 * SECOND - 1) == []
    assert poll_all(queue, 10 * SECOND) == after_delay
    assert queue.waiting.requests == 0


def test_poll_when_delay_exceeded_takes_up_to_maximum_past_preferred_sizes() -> None:
    queue = filled(TRITON_QA, 3, 4)
    push(queue, "late", 1, "k", now_ns=11 * SECOND)
    assert poll_all(queue, 11 * SECOND) == [8]


@pytest.mark.parametrize(
    ("rows", "batches"), [([1] * 4, [4]), ([1] * 5, [4, 1]), ([1] * 7, [6, 1]), ([1] * 3, [3]), ([5, 2, 1], [5, 3])]
)
def test_poll_with_preferred_sizes_and_no_delay_never_waits(rows: list[int], batches: list[int]) -> None:
    assert poll_all(filled(PREFERRED_ONLY, *rows), 0) == batches


def test_poll_prefers_the_allowed_size_while_memory_is_short_until_that_is_forgiven() -> None:
    queue = filled(BatchPolicy(max_batch_rows=4, max_queue_delay_ns=SECOND), 1, 1)
    assert poll_all(queue, 0) == []
    before = queue.exhausted(4, 0)
    assert poll_all(queue, 0) == [2]
    queue.forgive(before)
    for _ in range(2):
        push(queue, "request", 1, "k", 0)
    assert poll_all(queue, 0) == []


def test_poll_no_longer_prefers_the_reduced_size_after_a_pause() -> None:
    queue: BatchQueue[AnyRequest] = BatchQueue(BatchPolicy(max_batch_rows=4, max_queue_delay_ns=SECOND))
    queue.exhausted(4, 0)
    for now_ns, at_once in ((PAUSE_NS - 1, [2]), (PAUSE_NS, [])):
        for _ in range(2):
            push(queue, "request", 1, "k", now_ns)
        assert poll_all(queue, now_ns) == at_once


def test_poll_with_two_shapes_batches_each_in_its_lane() -> None:
    queue: BatchQueue[AnyRequest] = BatchQueue(TRITON_QA)
    for rows, key in ((1, "16"), (1, "8"), (3, "16"), (5, "8")):
        push(queue, key, rows, key, now_ns=0)
    decision = queue.poll(0, idle=2)
    assert [(batch.key, batch.rows) for batch in decision.batches] == [("8", 6)]
    assert rows_of(queue.poll(10 * SECOND, idle=2)) == [4]


def test_poll_with_several_ready_lanes_serves_the_oldest_head_first() -> None:
    queue: BatchQueue[AnyRequest] = BatchQueue(BatchPolicy(max_batch_rows=4))
    for number, key in enumerate("abcab"):
        push(queue, number, 1, key, now_ns=number)
    order = [queue.poll(9, idle=1).batches[0].key for _ in range(3)]
    assert order == ["a", "b", "c"]


def test_poll_with_a_flood_of_one_shape_does_not_starve_the_rare_one() -> None:
    queue: BatchQueue[AnyRequest] = BatchQueue(BatchPolicy(max_batch_rows=2))
    for now_ns in range(3):
        push(queue, "common", 2, "common", now_ns)
    push(queue, "rare", 1, "rare", 3)
    served = []
    for now_ns in range(4, 10):
        push(queue, "common", 2, "common", now_ns)
        served.append(queue.poll(now_ns, idle=1).batches[0].key)
    assert served.index("rare") == 3


def test_poll_with_merging_off_gives_each_request_its_own_batch() -> None:
    policy = BatchPolicy(max_batch_rows=8, max_batch_requests=1, max_queue_delay_ns=SECOND)
    assert poll_all(filled(policy, 3, 1, 2), 0) == [3, 1, 2]


@pytest.mark.parametrize(
    ("policy", "rows", "ahead"),
    [
        pytest.param(BatchPolicy(max_batch_rows=8), [4, 4], [8], id="all rows there may be"),
        pytest.param(BatchPolicy(max_batch_rows=8), [4, 3], [], id="room for a row"),
        pytest.param(BatchPolicy(max_batch_rows=8, max_batch_requests=1), [1], [1], id="merging off"),
        pytest.param(BatchPolicy(max_batch_rows=8, max_batch_requests=3), [1] * 3, [3], id="all requests there may be"),
        pytest.param(BatchPolicy(max_batch_rows=8, max_batch_requests=3), [1] * 2, [], id="room for a request"),
    ],
)
def test_poll_hands_out_ahead_only_batches_that_cannot_become_any_larger(
    policy: BatchPolicy, rows: list[int], ahead: list[int]
) -> None:
    assert rows_of(filled(policy, *rows).poll(0, idle=0, spare=1)) == ahead


def test_poll_without_idle_instance_starts_nothing_and_wakes_for_deadlines_only() -> None:
    queue = filled(TRITON_QA, 1)
    assert queue.poll(0, idle=0).wake_ns is None, "the end of its delay is nothing to wake for"
    push(queue, "patient", 1, "k", 0, deadline_ns=5)
    assert queue.poll(0, idle=0) == Decision(wake_ns=5)


def test_poll_with_waiting_lane_wakes_when_its_head_has_waited_the_delay() -> None:
    queue = filled(TRITON_QA, 1)
    assert queue.poll(7, idle=1).wake_ns == 10 * SECOND


def test_poll_with_waiting_lane_wakes_for_a_deadline_that_comes_before_the_end_of_the_delay() -> None:
    for left_ns, wake_ns in ((5, 5), (11 * SECOND, 10 * SECOND)):
        queue: BatchQueue[AnyRequest] = BatchQueue(TRITON_QA)
        push(queue, "patient", 1, "k", 0, deadline_ns=left_ns)
        assert queue.poll(0, idle=1).wake_ns == wake_ns


def test_poll_at_the_deadline_expires_instead_of_starting() -> None:
    queue: BatchQueue[AnyRequest] = BatchQueue(BatchPolicy(max_batch_rows=8))
    request = push(queue, "late", 1, "k", 0, deadline_ns=100)
    push(queue, "kept", 1, "k", 0)
    decision = queue.poll(100, idle=1)
    assert decision.expired == (request,)
    assert [request.payload for request in decision.batches[0].requests] == ["kept"]


def test_cancel_of_a_request_that_completed_a_preferred_size_makes_the_lane_wait_again() -> None:
    queue = filled(TRITON_QA, 1)
    second = push(queue, "second", 1, "k", 0)
    assert queue.cancel(second)
    assert poll_all(queue, 0) == []
    push(queue, "third", 1, "k", 1)
    assert poll_all(queue, 1) == [2]


def test_cancel_twice_changes_nothing() -> None:
    queue: BatchQueue[AnyRequest] = BatchQueue(TRITON_QA)
    request = push(queue, "x", 1, "k", 0)
    assert queue.cancel(request)
    assert not queue.cancel(request)
    assert (queue.waiting.requests, queue.waiting.rows, queue.lanes) == (0, 0, 0)


def test_cancel_after_leaving_in_a_batch_is_refused() -> None:
    queue: BatchQueue[AnyRequest] = BatchQueue(BatchPolicy(max_batch_rows=8))
    request = push(queue, "x", 1, "k", 0)
    queue.poll(0, idle=1)
    assert not queue.cancel(request)


def test_cancel_after_leaving_in_a_batch_with_others_is_refused() -> None:
    for leaving in (2, 3):
        queue: BatchQueue[AnyRequest] = BatchQueue(BatchPolicy(max_batch_rows=leaving))
        first, *_ = [push(queue, name, 1, "k", 0) for name in "abc"]
        (batch,) = queue.poll(0, idle=1).batches
        assert batch.rows == leaving
        assert not queue.cancel(first)
        assert queue.waiting.requests == 3 - leaving


def test_push_to_a_full_queue_is_refused_exactly_at_the_limit() -> None:
    queue: BatchQueue[AnyRequest] = BatchQueue(BatchPolicy(max_batch_rows=8, queue=QueuePolicy(max_queue_size=2)))
    push(queue, "a", 1, "k", 0)
    request = push(queue, "b", 1, "other", 0)
    with pytest.raises(QueueFull, match="Exceeds maximum queue size"):
        push(queue, "c", 1, "k", 0)
    assert (queue.waiting.requests, queue.waiting.rows) == (2, 2)
    queue.cancel(request)
    push(queue, "c", 1, "k", 0)


@pytest.mark.parametrize("rows", [0, -1, 9])
def test_push_of_a_size_no_batch_can_have_is_refused(rows: int) -> None:
    queue: BatchQueue[AnyRequest] = BatchQueue(BatchPolicy(max_batch_rows=8))
    with pytest.raises(RequestTooLarge):
        push(queue, "x", rows, "k", 0)
    assert queue.waiting.requests == queue.lanes == 0


def test_memory_of_cancelled_requests_with_far_deadlines_is_freed() -> None:
    queue: BatchQueue[AnyRequest] = BatchQueue(TRITON_QA)
    for number in range(10_000):
        queue.cancel(push(queue, number, 1, number, 0, deadline_ns=SECOND))
    assert len(queue._timers.items) < 200


def test_flush_releases_requests_that_wait_for_more() -> None:
    queue = filled(TRITON_QA, 1)
    queue.flush()
    assert poll_all(queue, 0) == [1]


def test_poll_of_the_same_history_twice_gives_the_same_decisions() -> None:
    def history() -> list[tuple[object, ...]]:
        queue: BatchQueue[AnyRequest] = BatchQueue(TRITON_QA)
        seen: list[tuple[object, ...]] = []
        for number in range(200):
            deadline_ns = number * 10 + number % 7 * 100 or NEVER
            push(queue, number, number % 3 + 1, number % 5, number * 10, deadline_ns=deadline_ns)
            decision = queue.poll(number * 10, idle=number % 3)
            seen.append(tuple(tuple(e.payload for e in b.requests) for b in decision.batches))
        return seen

    assert history() == history()
