"""Callers who have just been answered and come again: when an idle instance is held back for them, and when not."""

from __future__ import annotations

from scheduler.batch_queue import BatchQueue
from scheduler.policy import BatchPolicy

MS = 1_000_000
BASE_NS = 64 * MS


def learned(clients: int, policy: BatchPolicy | None = None) -> tuple[BatchQueue[int], int]:
    """A queue whose callers, all at once, come again a hundredth of a millisecond after their answers; and the time at
    which the last of many batches has been answered."""
    queue: BatchQueue[int] = BatchQueue(policy or BatchPolicy(max_batch_rows=8, await_returns=True))
    queue.latency.observe("k", 1, BASE_NS + MS, 0)
    queue.latency.observe("k", 8, BASE_NS + 8 * MS, 0)
    now_ns = 0
    for _ in range(30):
        for number in range(clients):
            queue.push(number, 1, "k", now_ns + 10_000)
        now_ns += BASE_NS
        for batch in queue.poll(now_ns, idle=1).batches:
            now_ns += BASE_NS + clients * MS
            queue.done(batch, now_ns, BASE_NS + clients * MS)
    return queue, now_ns


def test_idle_instance_waits_for_callers_who_return_and_starts_when_they_are_there() -> None:
    queue, now_ns = learned(clients=4)
    queue.push(0, 1, "k", now_ns + 10_000)
    step = queue.poll(now_ns + 10_000, idle=1)
    assert not step.batches
    assert step.wake_ns is not None
    assert now_ns < step.wake_ns <= now_ns + BASE_NS // 4
    for number in range(1, 4):
        queue.push(number, 1, "k", now_ns + 20_000)
    (batch,) = queue.poll(now_ns + 20_000, idle=1).batches
    assert batch.rows == 4


def test_idle_instance_waits_no_longer_than_announced() -> None:
    queue, now_ns = learned(clients=4)
    queue.push(0, 1, "k", now_ns + 10_000)
    wake_ns = queue.poll(now_ns + 10_000, idle=1).wake_ns
    assert wake_ns is not None
    while not (step := queue.poll(wake_ns, idle=1)).batches:
        assert step.wake_ns is not None
        assert step.wake_ns > wake_ns
        wake_ns = step.wake_ns
    assert wake_ns <= now_ns + BASE_NS // 4


def test_idle_instance_does_not_wait_by_default_nor_after_a_flush() -> None:
    for queue, now_ns in (learned(clients=4, policy=BatchPolicy(max_batch_rows=8)), learned(clients=4)):
        queue.flush()
        queue.push(0, 1, "k", now_ns + 10_000)
        assert queue.poll(now_ns + 10_000, idle=1).batches


def test_idle_instance_does_not_wait_for_one_caller_alone() -> None:
    queue, now_ns = learned(clients=1)
    queue.push(0, 1, "k", now_ns + 10_000)
    assert queue.poll(now_ns + 10_000, idle=1).batches


def test_idle_instance_does_not_wait_where_a_deadline_leaves_no_time_for_it() -> None:
    queue, now_ns = learned(clients=4)
    now_ns += 10_000
    queue.push(0, 1, "k", now_ns, rpc_deadline_ns=now_ns + queue.latency.longest_ns)
    assert queue.poll(now_ns, idle=1).batches
