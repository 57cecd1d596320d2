"""How many rows are allowed while memory is short: pure arithmetic on times that the tests pass in."""

from __future__ import annotations

import pytest

from paceline.scheduler.policy import NEVER
from paceline.scheduler.sizing import LONGEST_PAUSE_NS, PAUSE_NS, Allowance


def test_shortage_allows_half_of_what_failed_and_time_doubles_it_again() -> None:
    allowance = Allowance(32)
    allowance.exhausted(32, 0)
    assert allowance.rows == 16
    allowance.exhausted(16, 5)
    assert allowance.rows == 8
    seen = []
    for pauses in range(1, 4):
        allowance.grow(5 + pauses * PAUSE_NS - 1)
        seen.append(allowance.rows)
    allowance.grow(5 + 3 * PAUSE_NS)
    assert [*seen, allowance.rows] == [8, 16, 32, 32]
    assert allowance.due_ns == NEVER


def test_shortage_of_a_small_batch_allows_half_of_that_batch() -> None:
    allowance = Allowance(32)
    allowance.exhausted(6, 0)
    assert allowance.rows == 3


def test_shortages_of_concurrent_executions_halve_once() -> None:
    allowance = Allowance(32)
    for at_ns in (0, 1, 2):
        allowance.exhausted(32, at_ns)
    assert allowance.rows == 16


def test_shortage_of_one_row_leaves_one_row() -> None:
    allowance = Allowance(4)
    allowance.exhausted(1, 0)
    assert allowance.rows == 1


def test_failed_attempts_come_at_ever_longer_intervals_up_to_a_longest() -> None:
    allowance, now_ns, pauses_ns = Allowance(32), 0, []
    for _ in range(10):
        allowance.exhausted(32, now_ns)
        pauses_ns.append(allowance.due_ns - now_ns)
        now_ns = allowance.due_ns
        allowance.grow(now_ns)
        assert allowance.rows == 32
    assert pauses_ns == [min(PAUSE_NS << n, LONGEST_PAUSE_NS) for n in range(10)]
    assert pauses_ns[-1] == LONGEST_PAUSE_NS


def test_shortage_after_a_pause_is_a_failed_attempt_though_nobody_asked_meanwhile() -> None:
    allowance = Allowance(32)
    allowance.exhausted(32, 0)
    assert allowance.exhausted(32, PAUSE_NS).rows == 32
    assert (allowance.rows, allowance.due_ns) == (16, 3 * PAUSE_NS)


def test_more_than_the_maximum_is_never_tried() -> None:
    allowance, seen = Allowance(5), []
    allowance.exhausted(5, 0)
    for pauses in range(4):
        allowance.grow(pauses * PAUSE_NS)
        seen.append(allowance.rows)
    assert seen == [2, 4, 5, 5]
    assert allowance.due_ns == NEVER


def test_several_reductions_in_a_row_are_one_failed_attempt() -> None:
    allowance = Allowance(32)
    allowance.exhausted(32, 0)
    allowance.grow(PAUSE_NS)
    for rows in (32, 16, 8):
        allowance.exhausted(rows, PAUSE_NS)
    assert allowance.rows == 4
    assert allowance.due_ns == PAUSE_NS + 2 * PAUSE_NS


def test_shortage_after_a_pause_at_the_maximum_is_a_new_one() -> None:
    allowance = Allowance(2)
    allowance.exhausted(2, 0)
    allowance.grow(PAUSE_NS)
    allowance.exhausted(2, PAUSE_NS)
    allowance.grow(10 * PAUSE_NS)
    assert (allowance.rows, allowance.due_ns) == (2, NEVER)
    allowance.exhausted(2, 11 * PAUSE_NS)
    assert allowance.due_ns == 12 * PAUSE_NS


@pytest.mark.parametrize(
    ("failed", "expected"), [(64, 16), (32, 16), (31, 4), (16, 4), (4, 4)], ids=lambda rows: str(rows)
)
def test_only_configured_sizes_are_allowed_and_the_smallest_always_is(failed: int, expected: int) -> None:
    allowance = Allowance(64, (4, 16, 64))
    allowance.exhausted(failed, 0)
    assert allowance.rows == expected
    allowance.grow(PAUSE_NS)
    assert allowance.rows == {16: 64, 4: 16}[expected]


def test_forgiven_shortage_restores_what_was_allowed_and_due_before() -> None:
    allowance = Allowance(32)
    allowance.exhausted(32, 0)
    due_ns = allowance.due_ns
    before = allowance.exhausted(16, 7)
    assert allowance.rows == 8
    allowance.forgive(before)
    assert (allowance.rows, allowance.due_ns) == (16, due_ns)
    allowance.grow(due_ns)
    assert allowance.rows == 32


def test_two_concurrent_shortages_both_forgiven_restore_what_was_allowed() -> None:
    allowance = Allowance(32)
    one = allowance.exhausted(32, 0)
    other = allowance.exhausted(16, 1)
    allowance.forgive(one)
    allowance.forgive(other)
    assert allowance.rows == 32


def test_forgiven_shortage_that_allowed_no_less_postpones_nothing() -> None:
    allowance = Allowance(32)
    allowance.exhausted(32, 0)
    before = allowance.exhausted(32, PAUSE_NS // 2)
    assert (allowance.rows, allowance.due_ns) == (16, PAUSE_NS // 2 + PAUSE_NS)
    allowance.forgive(before)
    assert (allowance.rows, allowance.due_ns) == (16, PAUSE_NS)
