from __future__ import annotations

import pytest

from bench.stats import percentile, ratio, spread


def test_spread_of_rounds_is_median_and_extremes() -> None:
    found = spread([3.0, 1.0, 2.0, 10.0])
    assert (found.median, found.low, found.high, found.samples) == (2.5, 1.0, 10.0, (3.0, 1.0, 2.0, 10.0))


def test_spread_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="got none"):
        spread([])


def test_ratio_divides_round_by_round() -> None:
    assert ratio([10.0, 40.0, 9.0], [5.0, 10.0, 3.0]).samples == (2.0, 4.0, 3.0)


def test_ratio_of_unequal_rounds_is_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        ratio([1.0], [1.0, 2.0])


@pytest.mark.parametrize(("percent", "expected"), [(1, 1), (50, 50), (90, 90), (99, 99), (100, 100)])
def test_percentile_is_the_nearest_rank(percent: float, expected: int) -> None:
    assert percentile(list(range(1, 101)), percent) == expected


def test_percentile_of_one_value_is_that_value() -> None:
    assert percentile([7.0], 50) == percentile([7.0], 99) == 7.0
