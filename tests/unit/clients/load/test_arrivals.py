from __future__ import annotations

from itertools import islice, pairwise

import pytest

from paceline.clients.load.arrivals import (
    Arrivals,
    Constant,
    Poisson,
    Recorded,
    share,
)

S = 1_000_000_000


def test_poisson_has_its_rate_and_depends_on_the_seed_alone() -> None:
    first = list(islice(Poisson(1_000, 1).times(), 10_000))
    assert first == list(islice(Poisson(1_000, 1).times(), 10_000))
    assert first != list(islice(Poisson(1_000, 2).times(), 10_000))
    assert [number for _, number in first] == list(range(10_000))
    assert first[-1][0] == pytest.approx(10 * S, rel=0.05)
    gaps = [later - earlier for (earlier, _), (later, _) in pairwise(first)]
    # Of an exponential distribution, mean and standard deviation are equal.
    mean = sum(gaps) / len(gaps)
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.05)


def test_constant_arrivals_do_not_drift() -> None:
    times = [at_ns for at_ns, _ in islice(Constant(3).times(), 3_001)]
    assert times[:4] == [0, round(S / 3), round(2 * S / 3), S]
    assert times[-1] == 1_000 * S


@pytest.mark.parametrize("arrivals", [Poisson(100, 7), Constant(100), Recorded((0, 5, 5, 9, 20), (0, 1, 0, 1, 2))])
def test_processes_together_send_each_arrival_once(arrivals: Arrivals) -> None:
    parts = [list(islice(share(arrivals, part, 3), 100)) for part in range(3)]
    together = sorted(arrival for part in parts for arrival in part)
    assert together == sorted(islice(arrivals.times(), len(together)))


def test_recorded_arrivals_can_be_sent_faster() -> None:
    recorded = Recorded((0, S, 3 * S), (0, 0, 1), speed=2.0)
    assert list(recorded.times()) == [(0, 0), (S // 2, 0), (3 * S // 2, 1)]
    assert recorded.seconds == pytest.approx(1.5)


def test_recording_is_repeated_or_its_busiest_part_taken() -> None:
    recorded = Recorded((0, 4 * S, 5 * S, 9 * S), (0, 1, 2, 3))
    assert list(recorded.of_length(2).times()) == [(0, 1), (S, 2)]
    assert list(recorded.of_length(6).times())[4:] == [(12 * S, 0), (16 * S, 1)]
    assert recorded.of_length(8).seconds == pytest.approx(21)
    assert recorded.rate == pytest.approx(1 / 3)
