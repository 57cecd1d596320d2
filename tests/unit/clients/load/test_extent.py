from __future__ import annotations

import pytest

from paceline.clients.load.extent import Everything, FixedTime, Period, UntilStable, agree, is_vain
from paceline.clients.load.tally import Counts
from tests.unit.clients.load.counting import counts

STEADY, SLOWER, IDLE = counts([10.0] * 100), counts([12.0] * 100), counts()
UNTIL = UntilStable(warmup_s=1.0, window_s=5.0, tolerance=0.1, most=5)  # slices of half a second


def test_windows_agree_within_the_tolerance() -> None:
    assert agree([STEADY, STEADY, counts([10.9] * 100)], 0.1)
    assert not agree([STEADY, STEADY, SLOWER], 0.1)
    assert not agree([STEADY, STEADY, counts([10.0] * 80)], 0.1)
    assert not agree([STEADY, STEADY, IDLE], 1.0)


def test_until_stable_takes_the_first_three_windows_that_agree() -> None:
    slices = [IDLE] * 2 + [STEADY] * 30
    assert UNTIL.period(slices[:-1], is_over=False) is None
    assert UNTIL.period(slices, is_over=False) == Period(2, 32, True)


def test_until_stable_leaves_out_windows_that_do_not_agree() -> None:
    slices = [IDLE] * 2 + [SLOWER] * 10 + [STEADY] * 20
    assert UNTIL.period(slices, is_over=False) is None
    assert UNTIL.period([*slices, *[STEADY] * 10], is_over=False) == Period(12, 42, True)


def test_until_stable_ends_after_the_most_windows_and_says_so() -> None:
    slices = [IDLE] * 2 + ([SLOWER] * 10 + [STEADY] * 10) * 2 + [SLOWER] * 10
    assert UNTIL.period(slices, is_over=False) == Period(22, 52, False)


def test_until_stable_of_a_load_that_ended_takes_what_there_is() -> None:
    assert UNTIL.period([IDLE] * 2 + [STEADY] * 5, is_over=True) == Period(2, 7, False)
    assert UNTIL.period([IDLE], is_over=True) == Period(1, 1, False)


def test_fixed_time_counts_what_follows_the_warm_up() -> None:
    extent = FixedTime(warmup_s=1.0, seconds=4.0)  # slices of 0.2 s
    assert extent.period([STEADY] * 24, is_over=False) is None
    assert extent.period([STEADY] * 25, is_over=False) == Period(5, 25)
    assert extent.period([STEADY] * 9, is_over=True) == Period(5, 9)


def test_fixed_time_is_repeated_until_enough_has_ended() -> None:
    extent, one, refused = FixedTime(0.0, 4.0, least=3, most=4), counts([10.0]), counts(refused=1)
    assert extent.period([one, *[IDLE] * 19], is_over=False) is None
    assert extent.period([one, *[IDLE] * 38, one], is_over=False) is None
    assert extent.period([one, *[IDLE] * 38, one, one, *[IDLE] * 18], is_over=False) is None
    assert extent.period([one, *[IDLE] * 38, one, refused, *[IDLE] * 19], is_over=False) == Period(0, 60)
    assert extent.period([IDLE] * 80, is_over=False) == Period(0, 80)
    assert extent.period([IDLE] * 70, is_over=True) == Period(0, 70)
    assert [number for number in range(101) if extent.marks(number)] == [0, 20, 40, 60, 80]


def test_everything_counts_once_it_is_over() -> None:
    assert Everything().period([STEADY] * 3, is_over=False) is None
    assert Everything().period([STEADY] * 3, is_over=True) == Period(0, 3)


@pytest.mark.parametrize(
    ("slices", "messages", "vain"),
    [
        ([counts(refused=5, status="NOT_FOUND")] * 2, 1, True),
        ([counts(refused=9, status="NOT_FOUND"), IDLE], 1, False),
        ([counts(refused=50, status="NOT_FOUND")] * 2, 100, True),
        ([counts(refused=50, status="NOT_FOUND")] * 2, 101, False),
        ([counts(refused=50, status="RESOURCE_EXHAUSTED")] * 2, 1, False),
        ([counts(refused=50, status="NOT_FOUND"), counts(refused=1, status="INTERNAL")], 1, False),
        ([counts([10.0]), counts(refused=50, status="NOT_FOUND")], 1, False),
        ([counts(refused=50, status="NOT_FOUND")], 1, False),
    ],
)
def test_load_is_vain_if_all_have_one_fault(slices: list[Counts], messages: int, vain: bool) -> None:
    assert is_vain(slices, 0.5, messages) == vain


@pytest.mark.parametrize(
    ("extent", "marks"), [(UNTIL, [2, 12, 22]), (FixedTime(1.0, 4.0), [5, 25]), (Everything(), [0])]
)
def test_marks_are_where_periods_may_begin_and_end(
    extent: UntilStable | FixedTime | Everything, marks: list[int]
) -> None:
    assert [number for number in range(30) if extent.marks(number)] == marks
