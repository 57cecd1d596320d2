from __future__ import annotations

import weakref

import pytest

from paceline.scheduler.latency import LatencyModel
from paceline.scheduler.returning_callers import ReturningCallers

SECOND = 1_000_000_000


def learned(*durations_ns: int, rows: int = 1) -> LatencyModel:
    model = LatencyModel(64)
    for duration_ns in durations_ns:
        model.observe("k", rows, duration_ns, now_ns=0)
    return model


def test_expected_of_an_unknown_key_is_zero() -> None:
    assert LatencyModel(64).of("k").expected_ns(8) == LatencyModel(64).of("k").proven_ns(8, 0) == 0


def test_expected_of_a_size_seen_is_near_its_own_mean() -> None:
    model = LatencyModel(64)
    for rows, duration_ns in ((1, 100), (8, 900), (1, 100), (8, 900)):
        model.observe("k", rows, duration_ns, 0)
    assert (model.of("k").expected_ns(1), model.of("k").expected_ns(8)) == (100, 900)


def test_expected_of_other_sizes_lies_on_a_line_through_those_seen() -> None:
    model = LatencyModel(64)
    for _ in range(50):
        for rows in (1, 2, 8):
            model.observe("k", rows, 1_000 + 100 * rows, 0)
    assert model.of("k").expected_ns(5) == pytest.approx(1_500, rel=0.01)
    assert model.of("k").expected_ns(20) == pytest.approx(3_000, rel=0.01)


def test_expected_with_one_size_seen_is_flat_and_never_negative() -> None:
    model = learned(1_000, rows=8)
    assert model.of("k").expected_ns(1) == model.of("k").expected_ns(64) == 1_000


def test_observe_outlier_moves_the_mean_by_a_bounded_amount() -> None:
    assert learned(1_000, SECOND).of("k").expected_ns(1) <= 1_300


@pytest.mark.parametrize(("first", "then"), [(1_000, 3_000), (3_000, 1_000)])
def test_observe_follows_a_lasting_change(first: int, then: int) -> None:
    assert learned(*[first] * 20, *[then] * 40).of("k").expected_ns(1) == pytest.approx(then, rel=0.05)


def test_proven_needs_several_measurements_of_that_size() -> None:
    model = learned(1_000, 1_000)
    assert model.of("k").proven_ns(1, 0) == 0
    model.observe("k", 1, 1_000, 0)
    assert model.of("k").proven_ns(1, 0) == 1_000
    model.observe("k", 2, 5_000, 0)
    assert model.of("k").proven_ns(2, 0) == 0
    assert model.of("k").proven_ns(64, 0) == 0
    model.observe("k", 2, 5_000, 0)
    assert model.of("k").proven_ns(64, 0) > 0


def test_proven_goes_stale_for_each_size_separately() -> None:
    model = learned(*[5 * SECOND] * 3, rows=32)
    for second in range(100):
        model.observe("k", 1, 1_000, second * SECOND)
    assert model.of("k").proven_ns(32, 51 * SECOND) == 0
    assert model.of("k").proven_ns(1, 99 * SECOND) > 0


def test_first_execution_of_a_size_does_not_count_once_there_is_another() -> None:
    assert learned(10 * SECOND, 1_000).of("k").expected_ns(1) == 1_000


def test_proven_after_a_cold_start_falls_within_a_few_measurements() -> None:
    model = learned(600_000_000, *[2_000_000] * 5)
    assert model.of("k").proven_ns(1, 0) < 30_000_000


@pytest.mark.parametrize(("duration_ns", "fresh_ns"), [(1_000, SECOND), (SECOND, 10 * SECOND)])
def test_proven_goes_stale_so_that_refusals_cannot_last_for_ever(duration_ns: int, fresh_ns: int) -> None:
    model = learned(*[duration_ns] * 3)
    assert model.of("k").proven_ns(1, fresh_ns) == duration_ns
    assert model.of("k").proven_ns(1, fresh_ns + 1) == 0
    assert model.of("k").expected_ns(1) == duration_ns


def test_observe_remembers_a_bounded_number_of_keys() -> None:
    model = LatencyModel(64)
    for key in range(5_000):
        model.observe(key, 1, 1_000, 0)
    assert len(model._curves) == 1024
    assert model.of(4_999).expected_ns(1) == 1_000
    assert model.of(0).expected_ns(1) == 0


def test_longest_bounds_every_estimate_even_beyond_the_sizes_seen() -> None:
    model = LatencyModel(64)
    for rows in (1, 2, 4):
        for _ in range(5):
            model.observe("k", rows, rows * rows * 1_000, 0)
            assert all(model.of("k").expected_ns(size) <= model.longest_ns for size in range(1, 65))


@pytest.mark.parametrize("before", [0, 500])
def test_longest_forgets_an_outlier_within_150_measurements(before: int) -> None:
    model = learned(*[2_000_000] * before, 2 * SECOND)
    assert model.longest_ns == 4 * SECOND
    for _ in range(150):
        model.observe("k", 1, 2_000_000, 0)
    assert 2_000_000 < model.longest_ns < 10_000_000


def test_longest_still_bounds_estimates_of_keys_that_have_become_rare() -> None:
    model = LatencyModel(64)
    for rows, duration_ns in ((1, SECOND), (2, 2 * SECOND), (1, SECOND), (2, 2 * SECOND)):
        model.observe("rare", rows, duration_ns, 0)
    for _ in range(1_000):
        model.observe("k", 1, 2_000_000, 0)
    assert 64 * SECOND == model.of("rare").expected_ns(64) <= model.longest_ns


def test_observe_remembers_a_bounded_number_of_sizes() -> None:
    model = LatencyModel(1_024)
    for key in range(20):
        for rows in range(1, 1_025):
            model.observe(key, rows, rows * 1_000, 0)
    assert sum(len(curve.sizes) for curve in model._curves.values()) <= 16_384 < 20 * 1_024
    assert model.of(19).expected_ns(7) == 7_000
    assert model.of(0).expected_ns(7) == 0


def test_keys_are_not_kept_alive() -> None:
    class Key:
        """A key that came with a request; callers can make these large."""

    key = Key()
    gone = weakref.ref(key)
    model, returns = LatencyModel(64), ReturningCallers()
    model.observe(key, 1, 1_000, 0)
    returns.answered(key, 1, 1_000, 0)
    assert model.of(key).expected_ns(1) == 1_000
    del key
    assert gone() is None
