"""Speed, time left and shares, from a job's counts at given times."""

from __future__ import annotations

import pytest

from paceline.server.bulk.tally import Figures, Pace, Reasons, Tally
from paceline.server.bulk.values import BadRow

SECOND_NS = 1_000_000_000


def looked(pace: Pace, tally: Tally, at_s: float, executed: int) -> Figures:
    """What the tally says at `at_s`, once `executed` rows have been."""
    tally.rows_read = max(tally.rows_read, executed)
    tally.rows_executed = executed
    return pace.figures(tally, int(at_s * SECOND_NS))


def test_time_before_first_row_is_not_slowness() -> None:
    pace, tally = Pace(0), Tally(rows=1000, planned_share=1)
    assert looked(pace, tally, 60, 100).rows_per_s is None
    figures = looked(pace, tally, 62, 300)
    assert (figures.rows_per_s, figures.left_s, figures.elapsed_s) == (100, 7, 62)


def test_rows_of_earlier_starts_are_progress_not_speed() -> None:
    pace, tally = Pace(0), Tally(rows=1000, planned_share=1, units_before=4, rows_before=800)
    looked(pace, tally, 1, 10)
    figures = looked(pace, tally, 2, 20)
    assert (figures.rows_done, figures.share, figures.rows_per_s, figures.left_s) == (820, 0.82, 10, 18)


def test_total_is_estimated_until_all_is_planned() -> None:
    pace, tally = Pace(0), Tally(rows=500, planned_share=0.25)
    looked(pace, tally, 1, 100)
    figures = looked(pace, tally, 2, 200)
    assert (figures.rows_total, figures.rows_are_estimated, figures.left_s) == (2000, True, 18)
    tally.rows, tally.planned_share = 1600, 1
    figures = looked(pace, tally, 3, 300)
    assert (figures.rows_total, figures.rows_are_estimated, figures.left_s) == (1600, False, 13)


def test_before_anything_is_planned_nothing_is_claimed() -> None:
    figures = Pace(0).figures(Tally(), SECOND_NS)
    assert (figures.rows_total, figures.share, figures.left_s, figures.rows_per_s) == (None, None, None, None)
    assert (figures.rows_per_batch, figures.padding) == (None, None)


def test_input_without_rows_is_done() -> None:
    assert Pace(0).figures(Tally(planned_share=1), SECOND_NS).share == 1


def test_speed_is_that_of_the_last_half_minute() -> None:
    pace, tally = Pace(0), Tally(rows=10_000, planned_share=1)
    for second in range(1, 61):
        looked(pace, tally, second, 10 * second)
    for second in range(61, 121):
        figures = looked(pace, tally, second, 600 + 50 * (second - 60))
    assert figures.rows_per_s == 50


def test_speed_falls_while_nothing_is_done() -> None:
    pace, tally = Pace(0), Tally(rows=10_000, planned_share=1)
    looked(pace, tally, 10, 100)
    assert looked(pace, tally, 20, 200).rows_per_s == 10
    assert looked(pace, tally, 210, 200).rows_per_s == 0.5


def test_leaps_further_apart_than_the_window_have_a_speed() -> None:
    pace, tally = Pace(0), Tally(rows=10_000, planned_share=1)
    for second in range(1, 601):
        figures = looked(pace, tally, second, 1000 * (second // 100))
    assert figures.rows_per_s == 10


def test_two_looks_at_one_time_have_no_speed() -> None:
    pace, tally = Pace(0), Tally(rows=10, planned_share=1)
    assert looked(pace, tally, 1, 1).rows_per_s is None
    assert looked(pace, tally, 1, 2).rows_per_s is None


def test_executed_row_that_turned_out_bad_counts_once() -> None:
    tally = Tally(rows=100, planned_share=1, rows_read=50, rows_executed=50, rows_bad=3)
    assert Pace(0).figures(tally, SECOND_NS).rows_done == 50


def test_rows_beyond_an_estimate_leave_no_time() -> None:
    pace, tally = Pace(0), Tally(rows=100, planned_share=0.9, rows_before=90)
    looked(pace, tally, 1, 20)
    figures = looked(pace, tally, 2, 40)
    assert (figures.share, figures.left_s) == (1, 0)


def test_batches_and_padding_are_shares_of_what_executed() -> None:
    tally = Tally(executions=4, rows_executed=100, elements=2000, filled_elements=150)
    figures = Pace(0).figures(tally, SECOND_NS)
    assert (figures.rows_per_batch, figures.padding) == (25, pytest.approx(0.075))


def test_reasons_that_differ_in_numbers_are_one() -> None:
    reasons = Reasons()
    for reason in ("expected 3 values, got 5", "no text", "expected 3 values, got 17"):
        reasons.add(reason)
    assert reasons.commonest(5) == [("expected 3 values, got 5", 2), ("no text", 1)]


def test_rarer_reasons_are_counted_together() -> None:
    reasons = Reasons()
    for reason, times in (("a", 3), ("b", 2), ("c", 1), ("d", 1)):
        for _ in range(times):
            reasons.add(reason)
    assert reasons.commonest(2) == [("a", 3), ("b", 2), ("other reasons", 2)]


def test_counts_of_others_are_added_with_reasons() -> None:
    whole, part = Tally(rows_read=10, executions=1, rows_executed=8), Tally(rows_read=5, executions=2, rows_executed=4)
    whole.add_bad([BadRow(0, "odd")])
    part.add_bad([BadRow(3, "odd"), BadRow(4, "even")])
    whole.add(part)
    assert (whole.rows_read, whole.executions, whole.rows_executed, whole.rows_bad) == (15, 3, 12, 3)
    assert whole.reasons.commonest(5) == [("odd", 2), ("even", 1)]


def test_reasons_that_never_repeat_take_bounded_memory() -> None:
    reasons = Reasons()
    letters = "abcdefghijklmnopqrstuvwxyz"
    for first in letters:
        for second in letters:
            reasons.add(first + second)
            reasons.add(first + second.upper())
    assert len(reasons.commonest(10_000)) == 1001
    assert reasons.commonest(10_000)[-1] == ("other reasons", 2 * 26 * 26 - 1000)
