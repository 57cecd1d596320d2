"""Limits that several queues share."""

from __future__ import annotations

import pytest

from paceline.scheduler.batch_queue import BatchQueue
from paceline.scheduler.errors import QueueFull
from paceline.scheduler.policy import BatchPolicy, QueuePolicy
from paceline.scheduler.request import AnyRequest
from paceline.scheduler.waiting import SharedQueueLimits
from tests.unit.scheduler.workbench import push

POLICY = BatchPolicy(max_batch_rows=4)


def queues(limits: SharedQueueLimits) -> tuple[BatchQueue[AnyRequest], BatchQueue[AnyRequest]]:
    return BatchQueue(POLICY, shared_limits=limits), BatchQueue(POLICY, shared_limits=limits)


def taken(limits: SharedQueueLimits) -> tuple[int, int]:
    return limits.requests, limits.size_bytes


def test_two_queues_share_a_limit_of_requests_and_those_that_leave_make_room() -> None:
    limits = SharedQueueLimits(max_requests=3, max_bytes=0)
    one, other = queues(limits)
    push(one, "a", 1, "k", 0)
    leaving = push(other, "b", 1, "k", 0)
    push(one, "c", 1, "k", 0)
    for queue in (one, other):
        with pytest.raises(QueueFull, match="Exceeds maximum queue size of 3 requests of all models"):
            push(queue, "d", 1, "k", 0)
    assert (one.waiting.requests, other.waiting.requests, taken(limits)) == (2, 1, (3, 0))
    other.cancel(leaving)
    push(other, "d", 1, "k", 0)
    assert one.poll(0, idle=1).batches[0].rows == 2
    assert taken(limits) == (1, 0)
    assert other.poll(0, idle=1).batches[0].rows == 1
    assert taken(limits) == (0, 0)


def test_two_queues_share_a_limit_of_bytes_to_the_last_byte() -> None:
    limits = SharedQueueLimits(max_requests=0, max_bytes=100)
    one, other = queues(limits)
    push(one, "a", 1, "k", 0, size_bytes=60)
    with pytest.raises(QueueFull, match="Exceeds maximum queue size of 100 bytes of all models"):
        push(other, "b", 1, "k", 0, size_bytes=41)
    push(other, "b", 1, "k", 0, size_bytes=40)
    push(other, "c", 1, "k", 0)
    assert taken(limits) == (3, 100)


def test_expired_requests_make_room() -> None:
    limits = SharedQueueLimits(max_requests=1, max_bytes=1)
    impatient = BatchPolicy(max_batch_rows=4, queue=QueuePolicy(default_timeout_ns=10))
    one: BatchQueue[AnyRequest] = BatchQueue(impatient, shared_limits=limits)
    other: BatchQueue[AnyRequest] = BatchQueue(POLICY, shared_limits=limits)
    push(one, "a", 1, "k", 0, size_bytes=1)
    assert len(one.poll(20, idle=0).expired) == 1
    push(other, "b", 1, "k", 20, size_bytes=1)
    assert taken(limits) == (1, 1)
