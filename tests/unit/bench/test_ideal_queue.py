from __future__ import annotations

import math

import pytest

from bench.ideal_queue import ideal_p99


@pytest.mark.parametrize("load", [0.3, 0.5, 0.7])
def test_batches_of_one_request_wait_as_in_theory(load: float) -> None:
    """Of all requests, 99 % wait no longer: M/D/1, by Crommelin's formula of 1932."""
    waited = ideal_p99(32, (32,), load, fixed=1.0) - 1
    terms = (
        (load * (k - waited)) ** k / math.factorial(k) * math.exp(-load * (k - waited)) for k in range(int(waited) + 1)
    )
    assert (1 - load) * sum(terms) == pytest.approx(0.99, abs=0.002)


def test_lone_requests_take_their_own_batch() -> None:
    assert ideal_p99(4, (4, 32), 0.0001, fixed=0.2) == pytest.approx(0.3)


def test_smaller_requests_more_sizes_and_less_load_wait_less() -> None:
    eight, four, two = (ideal_p99(rows, (32,), 0.7, fixed=1.0) for rows in (8, 4, 2))
    assert eight > 3 > 2.5 > four > two > ideal_p99(2, (32,), 0.5, fixed=1.0) > 1
    few, many = (ideal_p99(4, sizes, 0.7, fixed=0.0) for sizes in ((4, 8, 32), (4, 8, 16, 24, 32)))
    assert few > 2.3 > 2 > many


def test_same_seed_gives_the_same_and_others_nearly() -> None:
    first, again, other = (ideal_p99(4, (32,), 0.7, 1.0, seed) for seed in (1, 1, 2))
    assert first == again != other
    assert other == pytest.approx(first, rel=0.05)
