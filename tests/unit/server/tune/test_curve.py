"""What measured executions say of those of other sizes."""

from __future__ import annotations

import pytest

from paceline.server.tune.curve import Curve, Curves

CURVE = Curve({1: [10, 10, 10, 40], 4: [30, 30, 30, 60], 8: [80]})


@pytest.mark.parametrize(
    ("rows", "share", "expected"),
    [(1, 0.0, 10), (1, 0.99, 40), (2, 0.5, 17), (4, 0.8, 60), (6, 0.9, 70), (8, 0.3, 80), (16, 0.0, 160)],
)
def test_sizes_between_lie_on_lines_between(rows: int, share: float, expected: int) -> None:
    assert CURVE.cost(rows, share) == expected


def test_size_that_takes_longer_than_a_larger_is_doubtful() -> None:
    assert CURVE.doubtful == []
    assert Curve({1: [50], 2: [55], 4: [40], 8: [37], 16: [60]}).doubtful == [1, 2]


def test_best_size_says_what_instances_can() -> None:
    assert CURVE.rows_per_s(8) == pytest.approx(4e9 / 37.5)
    assert CURVE.rows_per_s(1) == pytest.approx(1e9 / 17.5)


def test_size_of_rows_counts_between_curves() -> None:
    curves = Curves({10: Curve({1: [100], 2: [150]}), 50: Curve({1: [300], 2: [550], 4: [900]})}, 30)
    assert [curves.cost(1, size, 0.5) for size in (5, 10, 20, 50, 100)] == [100, 100, 150, 300, 600]
    assert curves.cost(2, 30, 0.5) == 350
    assert curves.typical.sizes == [1, 2]
    assert curves.typical.mean_ns(2) == 350
