"""Deadlines of requests that differ in length count with what a batch costs at the size that it is filled up to."""

from __future__ import annotations

from paceline.scheduler.batch_queue import BatchQueue
from paceline.scheduler.errors import DeadlineUnreachable
from paceline.scheduler.latency import LatencyModel, cost_size
from paceline.scheduler.policy import NEVER, BatchPolicy
from paceline.scheduler.request import AnyRequest, Request

MS = 1_000_000
BASE_MS = 200


def learned() -> BatchQueue[AnyRequest]:
    """A queue that knows: an execution takes 200 ms, and 1 ms for each element."""
    queue: BatchQueue[AnyRequest] = BatchQueue(BatchPolicy(max_batch_rows=8, lengths=(lambda size: size,)))
    for elements in (10, 20, 100, 110, 120, 220):
        for _ in range(20):
            queue.latency.observe("k", cost_size(1, (elements,)), (BASE_MS + elements) * MS, 0)
    return queue


def text(size: int, patience_ms: int = 0, now_ns: int = 1) -> AnyRequest:
    deadline_ns = now_ns + patience_ms * MS if patience_ms else NEVER
    return Request(None, 1, "k", now_ns, sizes=(size,), deadline_ns=deadline_ns)


def leaving(queue: BatchQueue[AnyRequest], *requests: AnyRequest) -> list[AnyRequest]:
    for request in requests:
        assert not any(queue.push([request]))
    (batch,) = queue.poll(2, idle=1).batches
    return list(batch.requests)


def test_short_one_in_a_hurry_leaves_without_longer_ones() -> None:
    hurried, like, longer = text(10, patience_ms=300), text(10), text(110)
    assert leaving(learned(), hurried, longer, like) == [hurried, like]


def test_short_one_with_time_shares_with_longer_ones() -> None:
    requests = [text(10, patience_ms=900), text(110, patience_ms=900)]
    assert leaving(learned(), *requests) == requests


def test_too_long_a_text_for_its_deadline_is_refused() -> None:
    queue = learned()
    assert not any(queue.push([text(10, patience_ms=250)]))
    (refusal,) = queue.push([text(100, patience_ms=250)])
    assert isinstance(refusal, DeadlineUnreachable)


def test_sizes_of_about_the_same_cost_count_as_one() -> None:
    assert cost_size(3, ()) == 3
    assert cost_size(2, (50,)) == cost_size(1, (103,)) == 96
    assert cost_size(1, (9,)) == 9
    assert cost_size(4, (20, 30)) == cost_size(1, (2_400,))


def test_worth_is_the_fixed_cost_in_elements() -> None:
    latency = LatencyModel(8)
    assert latency.of("k").worth() == 0
    for size in (10, 20, 40, 80):
        for _ in range(10):
            latency.observe("k", size, (BASE_MS + size) * MS, 0)
    assert abs(latency.of("k").worth() - BASE_MS) < 1


def test_again_with_fewer_has_the_sizes_of_these() -> None:
    queue = learned()
    requests = [text(10), text(30), text(20)]
    batch, rest = queue.again(requests, 5, 2)
    assert (batch.sizes, batch.elements, rest) == ((30,), 40, [requests[2]])


def test_overload_gives_up_one_for_a_batch() -> None:
    """After a batch of the short one alone, all others would be late."""
    queue = learned()
    hurried, others = text(10, patience_ms=250), [text(20, patience_ms=500) for _ in range(5)]
    assert leaving(queue, hurried, *others) == others
    assert not hurried.waits


def test_one_in_a_hurry_goes_before_those_with_time() -> None:
    hurried, others = text(10, patience_ms=250), [text(20, patience_ms=600) for _ in range(5)]
    assert leaving(learned(), hurried, *others) == [hurried]


def test_sizes_measured_long_ago_still_count() -> None:
    """There are too many for each to be measured all the time."""
    queue, now_ns = learned(), 60_000 * MS
    for _ in range(3):
        queue.latency.observe("k", 10, (BASE_MS + 10) * MS, now_ns)
    hurried, longer = text(10, 300, now_ns), text(110, 0, now_ns)
    assert not any(queue.push([hurried]))
    assert not any(queue.push([longer]))
    assert [one.requests for one in queue.poll(now_ns, idle=1).batches] == [(hurried,)]


def test_text_beyond_all_measured_is_not_refused() -> None:
    """What two close sizes say of a much larger one is no proof, and nothing would ever correct it."""
    queue: BatchQueue[AnyRequest] = BatchQueue(BatchPolicy(max_batch_rows=8, lengths=(lambda size: size,)))
    for size in (10, 11):
        for _ in range(3):
            queue.latency.observe("k", size, (BASE_MS + 2 * size) * MS, 0)
    assert not any(queue.push([text(500, patience_ms=600)]))
