"""Measured execution times against callers' deadlines: no request is given up that could be answered in time, and
measurements no longer count once they keep every request from being executed."""

from __future__ import annotations

import pytest

from paceline.scheduler.batch_queue import BatchQueue, Decision
from paceline.scheduler.errors import DeadlineUnreachable
from paceline.scheduler.policy import BatchPolicy, QueuePolicy, TimeoutAction
from paceline.scheduler.request import AnyRequest
from tests.unit.scheduler.workbench import push

MS = 1_000_000


def measured(policy: BatchPolicy, millis: dict[int, int]) -> BatchQueue[AnyRequest]:
    """A queue that has measured these times for batches of these rows."""
    queue: BatchQueue[AnyRequest] = BatchQueue(policy)
    for rows, duration_ms in millis.items():
        for _ in range(3):
            queue.latency.observe("k", rows, duration_ms * MS, 0)
    return queue


def names(decision: Decision[AnyRequest]) -> list[list[str]]:
    return [[request.payload for request in batch.requests] for batch in decision.batches]


@pytest.mark.parametrize("sizes", [(), (4, 8, 16, 32)])
def test_batch_too_large_for_every_deadline_in_it_is_cut_down_until_they_are_met(sizes: tuple[int, ...]) -> None:
    queue = measured(BatchPolicy(max_batch_rows=32, batch_sizes=sizes), {1: 2, 4: 5, 8: 9, 16: 17, 32: 33})
    for number in range(32):
        push(queue, f"p{number}", 1, "k", 0, deadline_ns=20 * MS)
    decision = queue.poll(0, idle=1)
    assert names(decision) == [[f"p{number}" for number in range(16)]]
    assert not decision.unreachable
    assert queue.waiting.requests == 16


def test_batch_cut_down_for_a_deadline_leaves_patient_requests_for_the_next_one() -> None:
    queue = measured(BatchPolicy(max_batch_rows=4), {1: 2, 2: 3, 4: 10})
    for name in "abcd":
        push(queue, name, 1, "k", 0, **({"deadline_ns": 5 * MS} if name == "b" else {}))
    assert names(queue.poll(0, idle=2)) == [["a", "b"], ["c", "d"]]


def test_batch_cut_down_keeps_a_large_request_whole() -> None:
    queue = measured(BatchPolicy(max_batch_rows=8), {1: 2, 6: 7, 8: 30})
    push(queue, "large", 6, "k", 0, deadline_ns=20 * MS)
    for name in "ab":
        push(queue, name, 1, "k", 0)
    assert names(queue.poll(0, idle=1)) == [["large"]]
    assert names(queue.poll(0, idle=1)) == [["a", "b"]]


def test_hopeless_request_is_given_up_and_the_rest_is_not_cut_down_for_it() -> None:
    queue = measured(BatchPolicy(max_batch_rows=4), {1: 10, 3: 12, 4: 13})
    push(queue, "hopeless", 1, "k", 0, deadline_ns=11 * MS)
    for name in "abc":
        push(queue, name, 1, "k", 0)
    decision = queue.poll(2 * MS, idle=1)
    assert names(decision) == [["a", "b", "c"]]
    assert [(late.request.payload, late.needed_ns) for late in decision.unreachable] == [("hopeless", 12 * MS)]


def test_answer_exactly_at_the_deadline_is_in_time() -> None:
    queue = measured(BatchPolicy(max_batch_rows=3), {1: 10, 2: 10, 3: 10})
    push(queue, "hopeless", 1, "k", 0, deadline_ns=10 * MS)
    push(queue, "just in time", 1, "k", 0, deadline_ns=14 * MS)
    push(queue, "patient", 1, "k", 0)
    decision = queue.poll(4 * MS, idle=1)
    assert names(decision) == [["just in time", "patient"]]
    assert [late.request.payload for late in decision.unreachable] == ["hopeless"]


def test_batch_too_late_for_all_gives_up_no_request_that_alone_would_be_just_in_time() -> None:
    queue = measured(BatchPolicy(max_batch_rows=4, batch_sizes=(2, 4)), {2: 10})
    queue.latency.observe("k", 2, 11 * MS, 0)  # so that it may well take longer than the proven time
    proven_ns = queue.latency.of("k").proven_ns(2, 0)
    assert 0 < queue.latency.of("k").margin_ns(2) < proven_ns
    push(queue, "just in time", 1, "k", 0, deadline_ns=proven_ns)
    decision = queue.poll(0, idle=1)
    assert names(decision) == [["just in time"]]
    assert not decision.unreachable


@pytest.mark.parametrize(("short_ns", "leaving"), [(0, ["hasty", "patient"]), (1, ["hasty"])])
def test_batch_is_cut_down_for_a_request_that_would_be_late_within_the_measured_variation(
    short_ns: int, leaving: list[str]
) -> None:
    queue = measured(BatchPolicy(max_batch_rows=2), {1: 8, 2: 10})
    queue.latency.observe("k", 2, 14 * MS, 0)
    margin_ns = queue.latency.of("k").margin_ns(2)
    assert margin_ns > 1
    needed_ns = queue.latency.of("k").proven_ns(2, 0) + margin_ns
    push(queue, "hasty", 1, "k", 0, deadline_ns=needed_ns - short_ns)
    push(queue, "patient", 1, "k", 0)
    decision = queue.poll(0, idle=1)
    assert names(decision) == [leaving]
    assert not decision.unreachable


def test_batch_that_skips_late_requests_has_no_more_requests_than_it_may_have() -> None:
    queue = measured(BatchPolicy(max_batch_rows=8, max_batch_requests=2), {1: 10, 2: 10, 3: 10, 5: 10})
    push(queue, "late", 4, "k", 0, deadline_ns=12 * MS)
    for name in "abc":
        push(queue, name, 1, "k", 0)
    decision = queue.poll(5 * MS, idle=1)
    assert [late.request.payload for late in decision.unreachable] == ["late"]
    assert names(decision) == [["a", "b"]]


def test_refusals_because_of_a_measurement_that_nobody_can_renew_come_to_an_end() -> None:
    """A first execution may be slower than any after it. If no caller has that much time, only executing a request
    anyway can show this."""
    queue = measured(BatchPolicy(max_batch_rows=4), {1: 2_000})
    stale_ns = 20_000 * MS
    for now_ns in (0, stale_ns):
        with pytest.raises(DeadlineUnreachable):
            push(queue, "refused", 1, "k", now_ns, deadline_ns=now_ns + 500 * MS)
    now_ns = stale_ns + 1
    for _ in range(5):
        push(queue, "probe", 1, "k", now_ns, deadline_ns=now_ns + 500 * MS)
        (batch,) = queue.poll(now_ns, idle=1).batches
        queue.done(batch, now_ns, MS)
        now_ns += stale_ns
    push(queue, "next", 1, "k", now_ns, deadline_ns=now_ns + 500 * MS)
    assert names(queue.poll(now_ns, idle=1)) == [["next"]]


def test_batch_too_late_for_all_gives_up_only_requests_that_would_be_late_alone() -> None:
    queue = measured(BatchPolicy(max_batch_rows=4), {1: 10, 2: 12, 4: 20})
    push(queue, "hopeless", 1, "k", 0, deadline_ns=12 * MS)
    for name in "abc":
        push(queue, name, 1, "k", 0, deadline_ns=19 * MS)
    decision = queue.poll(5 * MS, idle=2)
    assert [late.request.payload for late in decision.unreachable] == ["hopeless"]
    assert names(decision) == [["a"], ["b", "c"]]


def test_batch_gives_up_one_request_rather_than_being_cut_down_for_it() -> None:
    queue = measured(BatchPolicy(max_batch_rows=8), {1: 10, 2: 11, 4: 12, 8: 14})
    push(queue, "hasty", 1, "k", 0, deadline_ns=13 * MS)
    for name in "abcdefg":
        push(queue, name, 1, "k", 0)
    decision = queue.poll(0, idle=1)
    assert [late.request.payload for late in decision.unreachable] == ["hasty"]
    assert names(decision) == [list("abcdefg")]


def test_push_is_not_refused_because_of_other_shapes_that_may_take_turns_with_it() -> None:
    queue = measured(BatchPolicy(max_batch_rows=1), {1: 100})
    for number in range(30):
        push(queue, "other", 1, f"other {number}", 0)
    push(queue, "in time", 1, "k", 0, deadline_ns=150 * MS)


def test_push_is_not_refused_because_of_other_shapes_or_lower_levels_behind_it() -> None:
    queue = measured(BatchPolicy(max_batch_rows=1, priority_levels=2, default_priority_level=2), {1: 100})
    push(queue, "same shape", 1, "k", 0)
    push(queue, "in time, of a higher level", 1, "k", 0, priority=1, deadline_ns=150 * MS)
    for number in range(30):
        push(queue, "other", 1, f"other {number}", 0, priority=1)
    push(queue, "as late as one behind one", 1, "k", 0, priority=1, deadline_ns=350 * MS)


def test_push_is_not_refused_because_of_one_other_shape_where_levels_exist() -> None:
    queue = measured(BatchPolicy(max_batch_rows=1, priority_levels=2, default_priority_level=2), {1: 100})
    for _ in range(30):
        push(queue, "other", 1, "other", 0, priority=1)
    push(queue, "in time, or so it may be", 1, "k", 0, priority=1, deadline_ns=150 * MS)
    with pytest.raises(DeadlineUnreachable):
        push(queue, "late, behind that one", 1, "k", 0, priority=1, deadline_ns=150 * MS)


@pytest.mark.parametrize("levels", [0, 2])
def test_push_is_not_refused_because_of_delayed_rows_of_its_level_that_it_overtakes(
    levels: int,
) -> None:
    delay = QueuePolicy(timeout_action=TimeoutAction.DELAY, default_timeout_ns=10 * MS)
    policy = BatchPolicy(max_batch_rows=1, queue=delay, priority_levels=levels, default_priority_level=min(1, levels))
    queue = measured(policy, {1: 100})
    for number in range(10):
        push(queue, f"delayed {number}", 1, "k", 0)
    queue.poll(10 * MS, idle=0)
    push(queue, "in time", 1, "k", 20 * MS, deadline_ns=130 * MS)
    with pytest.raises(DeadlineUnreachable):
        push(queue, "late", 1, "k", 20 * MS, deadline_ns=130 * MS)
    assert names(queue.poll(20 * MS, idle=1)) == [["in time"]]


def test_push_is_refused_because_of_delayed_rows_of_a_level_served_before_its_own() -> None:
    delay = QueuePolicy(timeout_action=TimeoutAction.DELAY, default_timeout_ns=10 * MS)
    policy = BatchPolicy(max_batch_rows=1, queue=delay, priority_levels=2, default_priority_level=1)
    queue = measured(policy, {1: 100})
    for number in range(5):
        push(queue, f"delayed {number}", 1, "k", 0)
    queue.poll(10 * MS, idle=0)
    with pytest.raises(DeadlineUnreachable):
        push(queue, "late", 1, "k", 10 * MS, priority=2, deadline_ns=600 * MS)
    push(queue, "in time", 1, "k", 10 * MS, priority=2, deadline_ns=620 * MS)


def test_push_is_refused_because_of_rows_of_its_lane_served_before_it() -> None:
    for levels, before, after in ((0, 0, 0), (2, 1, 2), (2, 2, 2)):
        queue = measured(BatchPolicy(max_batch_rows=1, priority_levels=levels, default_priority_level=levels), {1: 100})
        for number in range(5):
            push(queue, f"before {number}", 1, "k", 0, priority=before)
        with pytest.raises(DeadlineUnreachable):
            push(queue, "late", 1, "k", 0, priority=after, deadline_ns=590 * MS)
        push(queue, "in time", 1, "k", 0, priority=after, deadline_ns=610 * MS)


def test_push_is_not_refused_because_of_a_batch_that_was_put_back() -> None:
    queue = measured(BatchPolicy(max_batch_rows=1), {1: 10})
    push(queue, "waits again", 1, "k", 0)
    (batch,) = queue.poll(0, idle=1).batches
    queue.put_back(batch, batch.requests)
    push(queue, "in time", 1, "k", 0, deadline_ns=20 * MS)


def test_push_is_not_refused_because_of_an_execution_that_only_one_measurement_calls_long() -> None:
    queue = measured(BatchPolicy(max_batch_rows=1), {1: 5})
    queue.latency.observe("slow once", 1, 5_000 * MS, 0)
    push(queue, "runs", 1, "slow once", 0)
    assert names(queue.poll(0, idle=1)) == [["runs"]]
    push(queue, "in time", 1, "k", 0, deadline_ns=50 * MS)


def test_requests_still_in_time_are_served_and_late_ones_skipped_under_overload() -> None:
    queue = measured(BatchPolicy(max_batch_rows=4), {1: 10, 2: 11, 3: 12, 4: 13})
    for number in range(4):
        push(queue, f"late {number}", 1, "k", 0, deadline_ns=20 * MS + number)
    for number in range(4):
        push(queue, f"p{number}", 1, "k", 0, deadline_ns=90 * MS)
    decision = queue.poll(10 * MS, idle=1)
    assert [late.request.payload for late in decision.unreachable] == [f"late {number}" for number in range(4)]
    assert names(decision) == [["p0", "p1", "p2", "p3"]]


def test_batch_handed_out_ahead_is_expected_to_start_when_the_first_execution_ends() -> None:
    queue: BatchQueue[AnyRequest] = BatchQueue(BatchPolicy(max_batch_rows=4))
    for name in "abcd":
        push(queue, name, 1, "k", 0)
    for name in "efgh":
        push(queue, name, 1, "k", 0, deadline_ns=15 * MS)
    for rows in (1, 2, 3, 4) * 3:
        queue.latency.observe("k", rows, 10 * MS, 0)
    decision = queue.poll(0, idle=1, spare=1)
    assert names(decision) == [list("abcd")]
    assert [late.request.payload for late in decision.unreachable] == list("efgh")


def test_batch_handed_out_ahead_is_expected_to_start_no_sooner_than_now() -> None:
    queue: BatchQueue[AnyRequest] = BatchQueue(BatchPolicy(max_batch_rows=4))
    for name in "abcd":
        push(queue, name, 1, "k", 0)
    for name in "efgh":
        push(queue, name, 1, "k", 0, deadline_ns=21 * MS)
    for rows in (1, 2, 3, 4) * 3:
        queue.latency.observe("k", rows, 10 * MS, 0)
    assert names(queue.poll(0, idle=1)) == [list("abcd")]
    decision = queue.poll(12 * MS, idle=0, spare=1)
    assert [late.request.payload for late in decision.unreachable] == list("efgh")
