"""What a waiting request takes in memory besides its tensors, and that nothing keeps these once it has left."""

from __future__ import annotations

import gc
import tracemalloc
import weakref

import pytest

from paceline.scheduler.batch_queue import BatchQueue
from paceline.scheduler.batcher import Batcher
from paceline.scheduler.policy import BatchPolicy
from paceline.scheduler.request import AnyRequest
from paceline.scheduler.testing import ManualClock, StepRunner
from tests.unit.scheduler.workbench import push, submit

REQUESTS = 5_000
LIMIT_BYTES = 1024
LEFT_BYTES = 256
"""What may stay in the heap of deadlines for a request that has left, until that is next cleaned."""


async def test_queued_request_with_deadline_and_priority_takes_less_than_1_kib_and_frees_it() -> None:
    clock = ManualClock(now_ns=1)
    policy = BatchPolicy(max_batch_rows=8, max_queue_delay_ns=10**12, priority_levels=4, default_priority_level=1)
    batcher: Batcher[None, None] = Batcher(policy, [StepRunner(clock)], clock=clock)
    batcher.start()
    runs = submit(batcher, None, 8, "runs")
    gc.collect()
    tracemalloc.start()
    try:
        before_bytes = tracemalloc.get_traced_memory()[0]
        pending = [
            submit(batcher, None, 1, number % 100, priority=number % 5, deadline_ns=10**15 + number)
            for number in range(REQUESTS)
        ]
        held_bytes = tracemalloc.get_traced_memory()[0] - before_bytes
        assert held_bytes / REQUESTS < LIMIT_BYTES
        for one in pending:
            one.cancel()
        pending.clear()
        del one
        assert (tracemalloc.get_traced_memory()[0] - before_bytes) / REQUESTS < LEFT_BYTES
    finally:
        tracemalloc.stop()
        batcher.close()
        assert runs.exception()


@pytest.mark.parametrize("leaves_by", ["executing", "cancelling"])
def test_request_that_has_left_is_not_kept_alive_by_its_deadline(leaves_by: str) -> None:
    class Tensors:
        pass

    queue: BatchQueue[AnyRequest] = BatchQueue(BatchPolicy(max_batch_rows=8))
    payload = Tensors()
    gone = weakref.ref(payload)
    request = push(queue, payload, 1, "k", 0, deadline_ns=10**12)
    if leaves_by == "executing":
        (batch,) = queue.poll(0, idle=1).batches
        queue.done(batch, 0, None)
        del batch
    else:
        queue.cancel(request)
    del payload, request
    assert gone() is None


@pytest.mark.parametrize(
    "policy",
    [
        BatchPolicy(max_batch_rows=8, preferred_batch_rows=(2,), max_queue_delay_ns=10**12),
        BatchPolicy(max_batch_rows=8, priority_levels=3, default_priority_level=1),
    ],
    ids=["delay", "priorities"],
)
def test_batch_that_has_left_is_not_kept_alive_by_its_lanes_place_in_the_heaps(policy: BatchPolicy) -> None:
    class Tensors:
        pass

    queue: BatchQueue[AnyRequest] = BatchQueue(policy)
    push(queue, Tensors(), 1, "before it in the heap", 0, priority=2)
    payload = Tensors()
    gone = weakref.ref(payload)
    push(queue, payload, 1, "k", 1, priority=3)
    push(queue, Tensors(), 1, "k", 1, priority=1)
    (batch,) = queue.poll(1, idle=1).batches
    assert payload in [request.payload for request in batch.requests]
    queue.done(batch, 1, None)
    del payload, batch
    assert gone() is None
