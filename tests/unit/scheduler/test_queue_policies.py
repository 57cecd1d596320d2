"""The queue's decisions on priorities, delayed timeouts, bounds, allowed sizes, and deadlines that can't be met."""

from __future__ import annotations

import pytest

from paceline.scheduler.batch_queue import BatchQueue, Decision
from paceline.scheduler.errors import DeadlineUnreachable, QueueFull
from paceline.scheduler.policy import BatchPolicy, PolicyError, QueueLimits, QueuePolicy, TimeoutAction
from paceline.scheduler.request import AnyRequest, Batch
from tests.unit.scheduler.workbench import push

MS = 1_000_000
LEVELS = BatchPolicy(max_batch_rows=8, priority_levels=3, default_priority_level=2)


def names(decision: Decision[AnyRequest]) -> list[list[str]]:
    return [[request.payload for request in batch.requests] for batch in decision.batches]


def measured(queue: BatchQueue[AnyRequest], durations_ns: dict[int, int], key: str = "k") -> None:
    """Teach the queue how long batches of so many rows take."""
    for rows, duration_ns in durations_ns.items():
        for _ in range(3):
            queue.done(Batch(0, key, rows, rows, ()), 0, duration_ns)


def test_poll_with_priorities_serves_lower_numbers_first_and_mixes_levels_in_one_batch() -> None:
    queue: BatchQueue[AnyRequest] = BatchQueue(LEVELS)
    for name, priority in (("last", 3), ("default", 0), ("second", 2), ("unknown", 9), ("first", 1)):
        push(queue, name, 1, "k", 0, priority=priority)
    assert names(queue.poll(0, idle=1)) == [["first", "default", "second", "unknown", "last"]]


def test_poll_with_priorities_serves_the_lane_of_higher_priority_first_though_younger() -> None:
    queue: BatchQueue[AnyRequest] = BatchQueue(LEVELS)
    push(queue, "old", 1, "a", 0, priority=2)
    for hours in (0, 1, 24):
        now_ns = hours * 3_600_000 * MS
        push(queue, "urgent", 1, "b", now_ns, priority=1)
        assert names(queue.poll(now_ns, idle=1)) == [["urgent"]], "however long the other has waited"
    assert names(queue.poll(now_ns, idle=1)) == [["old"]]


def test_push_of_higher_priority_completes_a_preferred_prefix_with_waiting_requests() -> None:
    """Triton's own priority test: 2 and 1 rows at the default level, then 2 rows before them: 2 + 2 make 4."""
    policy = BatchPolicy(
        max_batch_rows=8,
        preferred_batch_rows=(4,),
        max_queue_delay_ns=10**10,
        priority_levels=2,
        default_priority_level=2,
    )
    queue: BatchQueue[AnyRequest] = BatchQueue(policy)
    push(queue, "two", 2, "k", 0)
    push(queue, "one", 1, "k", 0)
    assert names(queue.poll(0, idle=1)) == []
    push(queue, "urgent", 2, "k", 0, priority=1)
    assert names(queue.poll(0, idle=1)) == [["urgent", "two"]]


def test_levels_of_64_bit_numbers_cost_nothing_until_used() -> None:
    queue: BatchQueue[AnyRequest] = BatchQueue(
        BatchPolicy(max_batch_rows=8, priority_levels=2**64 - 1, default_priority_level=2**63)
    )
    push(queue, "last", 1, "k", 0, priority=2**64 - 1)
    push(queue, "default", 1, "k", 0)
    push(queue, "first", 1, "k", 0, priority=1)
    assert queue.waiting.of_level(2**63) == 1
    assert queue.waiting.levels == [1, 2**63, 2**64 - 1]
    assert names(queue.poll(0, idle=1)) == [["first", "default", "last"]]
    assert queue.waiting.levels == []


def test_queue_timeout_with_delay_lets_the_request_wait_on_at_the_end_of_its_level_only() -> None:
    policy = BatchPolicy(
        max_batch_rows=1,
        priority_levels=2,
        default_priority_level=1,
        queue=QueuePolicy(timeout_action=TimeoutAction.DELAY, default_timeout_ns=10),
    )
    queue: BatchQueue[AnyRequest] = BatchQueue(policy)
    push(queue, "delayed", 1, "k", 0)
    push(queue, "low", 1, "k", 5, priority=2)  # its own timeout hasn't passed at its turn
    assert queue.poll(10, idle=0).expired == ()
    push(queue, "fresh", 1, "k", 11)
    order = [names(queue.poll(12, idle=1))[0][0] for _ in range(3)]
    assert order == ["fresh", "delayed", "low"]


def test_queue_timeout_with_delay_keeps_delayed_requests_in_order_behind_fresh_ones() -> None:
    queue: BatchQueue[AnyRequest] = BatchQueue(
        BatchPolicy(queue=QueuePolicy(timeout_action=TimeoutAction.DELAY, default_timeout_ns=10))
    )
    for name in "abc":
        push(queue, name, 1, "k", 0)
    assert queue.poll(10, idle=0).expired == ()
    for name in "de":
        push(queue, name, 1, "k", 11)
    assert queue.poll(21, idle=0).expired == ()
    push(queue, "f", 1, "k", 22)
    assert [names(queue.poll(22, idle=1))[0][0] for _ in range(6)] == list("fabcde")


def test_request_delayed_by_its_queue_timeout_still_expires_with_its_rpc() -> None:
    queue: BatchQueue[AnyRequest] = BatchQueue(
        BatchPolicy(queue=QueuePolicy(timeout_action=TimeoutAction.DELAY, default_timeout_ns=10))
    )
    request = push(queue, "x", 1, "k", 0, deadline_ns=50)
    assert queue.poll(10, idle=0).wake_ns == 50
    assert queue.poll(50, idle=1) == Decision(expired=(request,))


def test_queue_bound_counts_each_level_separately() -> None:
    policy = BatchPolicy(priority_levels=2, default_priority_level=1, priority_queue={2: QueuePolicy(max_queue_size=1)})
    queue: BatchQueue[AnyRequest] = BatchQueue(policy)
    push(queue, "a", 1, "k", 0, priority=2)
    with pytest.raises(QueueFull):
        push(queue, "b", 1, "k", 0, priority=2)
    for _ in range(5):
        push(queue, "c", 1, "k", 0, priority=1)


def test_only_level_has_its_own_bound_and_count() -> None:
    policy = BatchPolicy(priority_levels=1, default_priority_level=1, priority_queue={1: QueuePolicy(max_queue_size=1)})
    queue: BatchQueue[AnyRequest] = BatchQueue(policy)
    push(queue, "a", 1, "k", 0)
    assert (queue.waiting.levels, queue.waiting.of_level(1)) == ([1], 1)
    with pytest.raises(QueueFull):
        push(queue, "b", 1, "k", 0)


def test_no_level_is_listed_without_priority_levels() -> None:
    queue: BatchQueue[AnyRequest] = BatchQueue(BatchPolicy())
    push(queue, "a", 1, "k", 0, priority=1)
    assert (queue.waiting.levels, queue.waiting.of_level(0)) == ([], 1)


def test_reserved_requests_count_for_their_level_until_released() -> None:
    bounded = QueuePolicy(max_queue_size=1)
    policy = BatchPolicy(priority_levels=2, default_priority_level=1, priority_queue={1: bounded, 2: bounded})
    queue: BatchQueue[AnyRequest] = BatchQueue(policy)
    push(queue, "a", 1, "k", 0)
    (batch,) = queue.poll(0, idle=1).batches
    queue.reserve(batch)
    with pytest.raises(QueueFull):
        push(queue, "b", 1, "k", 0, priority=1)
    push(queue, "c", 1, "k", 0, priority=2)
    queue.release(batch)
    assert not queue.waiting.reserved.levels
    push(queue, "b", 1, "k", 0, priority=1)


@pytest.mark.parametrize(
    ("limits", "what"), [(QueueLimits(max_rows=5), "5 rows"), (QueueLimits(max_bytes=100), "100 bytes")]
)
def test_queue_bound_of_rows_and_bytes_is_exact_and_room_is_freed_again(limits: QueueLimits, what: str) -> None:
    queue: BatchQueue[AnyRequest] = BatchQueue(BatchPolicy(max_batch_rows=8, limits=limits))
    push(queue, "a", 3, "k", 0, size_bytes=60)
    request = push(queue, "b", 2, "k", 0, size_bytes=40)
    with pytest.raises(QueueFull, match=what):
        push(queue, "c", 1, "k", 0, size_bytes=1)
    queue.cancel(request)
    push(queue, "c", 2, "k", 0, size_bytes=40)


@pytest.mark.parametrize(
    ("rows", "padded"), [([1], [(1, 1)]), ([1, 1, 1], [(3, 4)]), ([5], [(5, 8)]), ([8, 1], [(8, 8), (1, 1)])]
)
def test_batch_sizes_without_measurements_pad_up(rows: list[int], padded: list[tuple[int, int]]) -> None:
    queue: BatchQueue[AnyRequest] = BatchQueue(BatchPolicy(max_batch_rows=8, batch_sizes=(1, 2, 4, 8)))
    for count in rows:
        push(queue, "x", count, "k", 0)
    assert [(batch.rows, batch.padded_rows) for batch in queue.poll(0, idle=9).batches] == padded


@pytest.mark.parametrize(
    ("cost_of_8", "batches"),
    [
        pytest.param(50, [(5, 8)], id="padding 3 rows is cheap"),
        pytest.param(90, [(4, 4), (1, 1)], id="cutting 1 row off is cheaper a row"),
    ],
)
def test_batch_sizes_with_measurements_pad_up_or_cut_down_by_cost_per_row(
    cost_of_8: int, batches: list[tuple[int, int]]
) -> None:
    queue: BatchQueue[AnyRequest] = BatchQueue(BatchPolicy(max_batch_rows=8, batch_sizes=(1, 2, 4, 8)))
    measured(queue, {1: 20, 4: 45, 8: cost_of_8})
    for _ in range(5):
        push(queue, "x", 1, "k", 0)
    assert [(batch.rows, batch.padded_rows) for batch in queue.poll(0, idle=9).batches] == batches


def test_batch_sizes_pad_up_where_cutting_down_costs_as_much_per_row() -> None:
    queue: BatchQueue[AnyRequest] = BatchQueue(BatchPolicy(max_batch_rows=8, batch_sizes=(4, 8)))
    measured(queue, {4: 40, 8: 50})
    for _ in range(5):
        push(queue, "x", 1, "k", 0)
    assert [(batch.rows, batch.padded_rows) for batch in queue.poll(0, idle=1).batches] == [(5, 8)]


def test_batch_below_the_smallest_size_is_padded_to_it_though_a_larger_one_was_faster() -> None:
    queue: BatchQueue[AnyRequest] = BatchQueue(BatchPolicy(max_batch_rows=8, batch_sizes=(4, 8)))
    measured(queue, {4: 100, 8: 50})
    for _ in range(2):
        push(queue, "x", 1, "k", 0)
    assert [(batch.rows, batch.padded_rows) for batch in queue.poll(0, idle=1).batches] == [(2, 4)]


def test_batch_is_not_cut_down_to_a_size_that_was_never_measured() -> None:
    """A line through the measurements would have two rows cost nothing."""
    queue: BatchQueue[AnyRequest] = BatchQueue(BatchPolicy(max_batch_rows=8, batch_sizes=(2, 4, 8)))
    measured(queue, {4: 10, 8: 100})
    for _ in range(3):
        push(queue, "x", 1, "k", 0)
    assert [(batch.rows, batch.padded_rows) for batch in queue.poll(0, idle=1).batches] == [(3, 4)]


def test_batch_sizes_never_cut_a_request_in_two() -> None:
    queue: BatchQueue[AnyRequest] = BatchQueue(BatchPolicy(max_batch_rows=8, batch_sizes=(4, 8)))
    measured(queue, {4: 1, 8: 1_000})
    push(queue, "x", 5, "k", 0)
    assert [(batch.rows, batch.padded_rows) for batch in queue.poll(0, idle=1).batches] == [(5, 8)]


def test_push_whose_execution_alone_outlasts_its_deadline_is_refused_at_once() -> None:
    queue: BatchQueue[AnyRequest] = BatchQueue(BatchPolicy(max_batch_rows=8))
    measured(queue, {1: 10 * MS})
    with pytest.raises(DeadlineUnreachable, match="9000 us are left, an answer takes about 10000 us"):
        push(queue, "x", 1, "k", 0, deadline_ns=9 * MS)
    assert queue.waiting.requests == queue.lanes == 0
    push(queue, "x", 1, "k", 0, deadline_ns=11 * MS)


def test_push_after_its_deadline_is_refused_with_no_time_left() -> None:
    queue: BatchQueue[AnyRequest] = BatchQueue(BatchPolicy(max_batch_rows=8))
    measured(queue, {1: 10 * MS})
    with pytest.raises(DeadlineUnreachable, match=r": 0 us are left, an answer takes about 10000 us"):
        push(queue, "x", 1, "k", 2 * MS, deadline_ns=1 * MS)


def test_push_behind_a_backlog_that_outlasts_its_deadline_is_refused_at_once() -> None:
    queue: BatchQueue[AnyRequest] = BatchQueue(BatchPolicy(max_batch_rows=2))
    measured(queue, {1: 10 * MS, 2: 10 * MS})
    push(queue, "runs", 2, "k", 0)
    queue.poll(0, idle=1)
    for _ in range(4):
        push(queue, "ahead", 1, "k", 0)
    with pytest.raises(DeadlineUnreachable):
        push(queue, "late", 1, "k", 0, deadline_ns=39 * MS)
    push(queue, "in time", 1, "k", 0, deadline_ns=41 * MS)


def test_push_of_higher_priority_is_not_refused_because_of_a_backlog_behind_it() -> None:
    queue: BatchQueue[AnyRequest] = BatchQueue(
        BatchPolicy(max_batch_rows=1, priority_levels=2, default_priority_level=2)
    )
    measured(queue, {1: 10 * MS})
    for _ in range(9):
        push(queue, "behind", 1, "k", 0)
    with pytest.raises(DeadlineUnreachable):
        push(queue, "late", 1, "k", 0, deadline_ns=20 * MS)
    push(queue, "urgent", 1, "k", 0, priority=1, deadline_ns=20 * MS)


def test_poll_gives_up_requests_whose_batch_would_end_too_late_and_executes_the_rest() -> None:
    queue: BatchQueue[AnyRequest] = BatchQueue(BatchPolicy(max_batch_rows=8))
    push(queue, "late", 1, "k", 0, deadline_ns=9 * MS)
    push(queue, "kept", 1, "k", 0)
    push(queue, "patient", 1, "k", 0, deadline_ns=99 * MS)
    measured(queue, {1: 10 * MS, 2: 10 * MS, 3: 10 * MS})
    decision = queue.poll(0, idle=1)
    assert [(late.request.payload, late.needed_ns) for late in decision.unreachable] == [("late", 10 * MS)]
    assert names(decision) == [["kept", "patient"]]


def test_deadlines_only_bound_the_wait_where_the_policy_is_not_deadline_aware() -> None:
    queue: BatchQueue[AnyRequest] = BatchQueue(BatchPolicy(max_batch_rows=8, deadline_aware=False))
    measured(queue, {1: 10 * MS})
    push(queue, "x", 1, "k", 0, deadline_ns=MS)
    assert names(queue.poll(0, idle=1)) == [["x"]]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"priority_levels": -1}, "priority_levels"),
        ({"default_priority_level": 1}, "default_priority_level"),
        ({"priority_levels": 2}, "default_priority_level"),
        ({"priority_levels": 2, "default_priority_level": 3}, "default_priority_level"),
        ({"priority_levels": 1, "default_priority_level": 1, "priority_queue": {2: QueuePolicy()}}, "priority_queue"),
        ({"priority_levels": 2, "default_priority_level": 1, "preserve_ordering": True}, "preserve_ordering"),
        ({"queue": QueuePolicy(0, 1, False, TimeoutAction.DELAY), "preserve_ordering": True}, "preserve_ordering"),
        ({"queue": QueuePolicy(0, 0, True, TimeoutAction.DELAY), "preserve_ordering": True}, "preserve_ordering"),
        ({"max_batch_rows": 8, "batch_sizes": (4, 2, 8)}, "batch_sizes"),
        ({"max_batch_rows": 8, "batch_sizes": (0, 8)}, "batch_sizes"),
        ({"max_batch_rows": 8, "batch_sizes": (2, 4)}, "batch_sizes"),
    ],
)
def test_invalid_policy_is_refused_naming_the_field(fields: dict[str, object], name: str) -> None:
    with pytest.raises(PolicyError, match=name):
        BatchPolicy(**fields)  # type: ignore[arg-type]
