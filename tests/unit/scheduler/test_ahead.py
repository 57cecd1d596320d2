"""When an instance counts as about to end its execution, and which batch it has next."""

from __future__ import annotations

import pytest

from paceline.scheduler.batch_queue import Batch
from paceline.scheduler.instances import Ahead
from paceline.scheduler.request import AnyRequest

MS = 1_000_000
LONG_NS = 20 * MS
DUE_NS = 18 * MS
"""An execution of 20 ms counts as about to end in its last 2 ms."""


@pytest.mark.parametrize(
    ("expected_ns", "due_ns"), [(0, 0), (MS - 1, 0), (MS, MS * 3 // 4), (8 * MS, 6 * MS), (LONG_NS, DUE_NS)]
)
def test_execution_is_about_to_end_in_its_last_2_ms_but_at_most_its_last_quarter(expected_ns: int, due_ns: int) -> None:
    ahead: Ahead[str, AnyRequest] = Ahead()
    ahead.begin("one", 0, expected_ns)
    assert ahead.wake_ns(0, requests=1) == (due_ns or None)
    assert ahead.wake_ns(0, requests=0) is None
    assert bool(ahead.ends) == bool(due_ns)
    over_ns = 2 * expected_ns - due_ns  # from then on, its end can't be predicted any more
    for now_ns, expected in ((due_ns - 1, []), (due_ns, ["one"]), (over_ns - 1, ["one"]), (over_ns, [])):
        assert ahead.about_to_end(now_ns) == (expected if due_ns else [])


def test_instances_about_to_end_are_listed_in_order_of_their_ends_until_given_a_batch() -> None:
    ahead: Ahead[str, AnyRequest] = Ahead()
    for number, runner in enumerate(("one", "two", "three")):
        ahead.begin(runner, -number * MS, LONG_NS)
    assert ahead.about_to_end(DUE_NS) == ["three", "two", "one"]
    assert ahead.ends["two"].at_ns == LONG_NS - MS
    ahead.next["two"] = Batch(1, "k", 1, 1, ())
    assert ahead.end("three") is None
    assert ahead.about_to_end(DUE_NS) == ["one"]
    assert ahead.wake_ns(DUE_NS - 1, requests=1) == DUE_NS
    # "two" was expected to end at 19 ms, and may be 2 ms late.
    assert ahead.wake_ns(DUE_NS - 1, requests=0) == 21 * MS
    assert (ahead.overdue(21 * MS - 1), ahead.overdue(21 * MS)) == ([], ["two"])
    assert ahead.end("one") is None
    assert ahead.wake_ns(DUE_NS - 1, requests=1) == 21 * MS
    assert ahead.end("two") is not None
    assert not ahead.ends


def test_instance_that_gets_no_more_batches_keeps_the_one_it_was_handed() -> None:
    ahead: Ahead[str, AnyRequest] = Ahead()
    for runner in ("one", "two"):
        ahead.begin(runner, 0, LONG_NS)
    following: Batch[AnyRequest] = Batch(1, "k", 1, 1, ())
    ahead.next["one"] = following
    for runner in ("one", "two"):
        ahead.hand_no_more(runner)
    assert ahead.about_to_end(DUE_NS) == []
    assert (ahead.overdue(22 * MS - 1), ahead.overdue(22 * MS)) == ([], ["one"])
    assert (ahead.end("one"), ahead.end("two")) == (following, None)


def test_next_batch_may_come_at_once_and_is_never_overdue() -> None:
    ahead: Ahead[str, AnyRequest] = Ahead(at_once=True)
    ahead.begin("one", MS, 0)
    assert ahead.about_to_end(MS) == ["one"]
    ahead.next["one"] = Batch(1, "k", 1, 1, ())
    assert (ahead.about_to_end(MS), ahead.overdue(60_000 * MS), ahead.wake_ns(MS, requests=1)) == ([], [], None)
