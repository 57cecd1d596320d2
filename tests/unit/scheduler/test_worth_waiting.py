"""How many more requests the queue lets an idle instance wait for, and until when."""

from __future__ import annotations

from typing import Any

import pytest

from paceline.scheduler.batch_queue import BatchQueue
from paceline.scheduler.errors import QueueFull
from paceline.scheduler.policy import NEVER, BatchPolicy, QueueLimits, QueuePolicy
from paceline.scheduler.request import AnyRequest
from paceline.scheduler.waiting import SharedQueueLimits
from tests.unit.scheduler.workbench import push

MS = 1_000_000


def waiting(*rows: int, shared: tuple[int, int] = (0, 0), size_bytes: int = 0, **policy: Any) -> BatchQueue[AnyRequest]:
    """A queue in which requests of these rows wait. `shared`: how many requests and bytes may wait for all models."""
    queue: BatchQueue[AnyRequest] = BatchQueue(
        BatchPolicy(**{"max_batch_rows": 16, **policy}), shared_limits=SharedQueueLimits(*shared)
    )
    for count in rows:
        push(queue, "waits", count, "k", 0, size_bytes=size_bytes)
    return queue


@pytest.mark.parametrize(
    ("rows", "announced", "more"),
    [
        ((), 0, 16),
        ((1,), 0, 15),
        ((1, 1), 3, 11),
        ((2, 2, 2), 0, 5),  # of two rows each
        ((2, 2, 2), 1, 5),  # nine rows are missing
        ((8, 8), 0, 0),
        ((8, 7), 1, 0),
        ((8, 7), 2, 0),
    ],
)
def test_worth_waiting_for_as_many_requests_like_the_waiting_ones_as_fill_a_batch(
    rows: tuple[int, ...], announced: int, more: int
) -> None:
    assert waiting(*rows).worth_waiting_for(announced) == more


def test_worth_waiting_for_the_smallest_preferred_size() -> None:
    assert waiting(1, preferred_batch_rows=(4, 8)).worth_waiting_for(0) == 3
    assert waiting(2, 3, preferred_batch_rows=(4, 8)).worth_waiting_for(0) == 0


def test_worth_waiting_for_no_more_than_is_allowed_while_memory_is_short() -> None:
    queue = waiting(1, 1)
    queue.exhausted(8, 0)
    assert queue.worth_waiting_for(0) == 2
    queue.exhausted(4, 0)
    assert queue.worth_waiting_for(0) == 0


@pytest.mark.parametrize(
    ("policy", "more"),
    [
        pytest.param({"queue": QueuePolicy(max_queue_size=6)}, 4, id="requests"),
        pytest.param({"limits": QueueLimits(max_rows=9)}, 4, id="rows"),
        pytest.param({"limits": QueueLimits(max_bytes=50)}, 3, id="bytes"),
        pytest.param({"max_batch_requests": 5}, 3, id="requests of a batch"),
        pytest.param({"shared": (3, 0)}, 1, id="requests of all models"),
        pytest.param({"shared": (0, 40)}, 2, id="bytes of all models"),
    ],
)
def test_worth_waiting_for_no_more_than_there_is_room_for(policy: dict[str, Any], more: int) -> None:
    queue = waiting(1, 2, size_bytes=10, **policy)
    assert queue.worth_waiting_for(0) == more
    assert queue.worth_waiting_for(1) == more - 1
    assert queue.worth_waiting_for(more + 1) == 0


@pytest.mark.parametrize(
    ("rows", "limits", "more"),
    [
        pytest.param((), QueueLimits(max_rows=9), 9, id="rows, nobody waits"),
        pytest.param((1,), QueueLimits(max_rows=9), 8, id="rows, one waits"),
        pytest.param((), QueueLimits(max_bytes=9), 9, id="bytes, nobody waits"),
        pytest.param((1,), QueueLimits(max_bytes=9), 9, id="bytes, who waits has none"),
    ],
)
def test_worth_waiting_up_to_the_limit_while_the_size_of_more_requests_is_unknown(
    rows: tuple[int, ...], limits: QueueLimits, more: int
) -> None:
    assert waiting(*rows, limits=limits).worth_waiting_for(0) == more


def test_worth_waiting_for_no_more_than_every_waiting_level_has_room_for() -> None:
    queue: BatchQueue[AnyRequest] = BatchQueue(
        BatchPolicy(
            max_batch_rows=16,
            priority_levels=3,
            default_priority_level=1,
            priority_queue={2: QueuePolicy(max_queue_size=3), 3: QueuePolicy(max_queue_size=1)},
        )
    )
    push(queue, "unbounded", 1, "k", 0, priority=1)
    assert queue.worth_waiting_for(0) == 15
    push(queue, "bounded", 1, "k", 0, priority=2)
    assert queue.worth_waiting_for(0) == 2
    push(queue, "bounded", 1, "k", 0, priority=3)
    assert queue.worth_waiting_for(0) == 0


@pytest.mark.parametrize(
    ("policy", "more"),
    [
        pytest.param({"queue": QueuePolicy(max_queue_size=5)}, 2, id="requests"),
        pytest.param({"limits": QueueLimits(max_rows=24)}, 3, id="rows"),
        pytest.param({"limits": QueueLimits(max_bytes=50)}, 2, id="bytes"),
        pytest.param({"shared": (5, 0)}, 2, id="requests of all models"),
        pytest.param({"shared": (0, 50)}, 2, id="bytes of all models"),
    ],
)
def test_worth_waiting_for_no_more_than_there_is_room_for_beside_reserved_requests(
    policy: dict[str, Any], more: int
) -> None:
    queue = waiting(8, 8, 2, size_bytes=10, **policy)
    (batch,) = queue.poll(0, idle=1).batches
    assert batch.rows == 16
    queue.reserve(batch)
    assert queue.worth_waiting_for(0) == more
    for _ in range(more):
        push(queue, "fits", 2, "k", 0, size_bytes=10)
    with pytest.raises(QueueFull):
        push(queue, "refused", 2, "k", 0, size_bytes=10)
    queue.release(batch)
    assert queue.waiting.reserved.requests == 0
    push(queue, "fits", 2, "k", 0, size_bytes=10)


def test_not_worth_waiting_after_a_flush() -> None:
    queue = waiting(1)
    queue.flush()
    assert queue.worth_waiting_for(0) == 0


def test_waiting_may_take_half_of_what_an_execution_leaves_until_the_first_deadline() -> None:
    queue = waiting(1)
    assert queue.spare_until_ns == NEVER
    queue.latency.observe("k", 1, 5 * MS, 0)
    assert queue.latency.longest_ns == 10 * MS
    push(queue, "later", 1, "k", 2 * MS, deadline_ns=90 * MS)
    assert queue.spare_until_ns == (2 + 39) * MS
    hasty = push(queue, "hasty", 1, "k", 4 * MS, deadline_ns=34 * MS)
    assert queue.spare_until_ns == (4 + 10) * MS
    queue.cancel(hasty)
    assert queue.spare_until_ns == (2 + 39) * MS
