from __future__ import annotations

import numpy as np
import pytest

from paceline.clients.load.histogram import Histogram, intervals, percentile_intervals


def durations(seed: int, count: int = 5_000) -> list[int]:
    return np.random.default_rng(seed).lognormal(14, 2, count).astype(np.int64).tolist()


@pytest.mark.parametrize("percent", [0, 1, 50, 90, 99, 99.9, 100])
def test_percentile_is_the_nearest_rank_within_its_known_error(percent: float) -> None:
    values = durations(1)
    exact = sorted(values)[max(0, int(np.ceil(len(values) * percent / 100)) - 1)]
    found = Histogram.of(values).percentile_ns(percent)
    assert found is not None
    assert exact <= found <= exact * (1 + 1 / 1024)


def test_merged_histograms_are_the_histogram_of_all() -> None:
    parts = [durations(seed, 100) for seed in range(5)]
    everything = [duration for part in parts for duration in part]
    merged, whole = Histogram.merged(map(Histogram.of, parts)), Histogram.of(everything)
    assert merged.buckets.tolist() == whole.buckets.tolist()
    assert merged.counts.tolist() == whole.counts.tolist()
    assert (merged.count, merged.sum_ns, merged.longest_ns) == (500, whole.sum_ns, max(everything))


def test_histogram_of_nothing_has_no_figures() -> None:
    empty = Histogram.merged(())
    assert (empty.count, empty.mean_ns, empty.percentile_ns(50)) == (0, None, None)


def test_durations_of_nothing_or_less_count_as_a_nanosecond() -> None:
    assert Histogram.of([0, -5]).percentile_ns(100) == 1


def test_interval_of_equal_blocks_is_a_point() -> None:
    blocks = [Histogram.of([1_000_000] * 20)] * 10
    assert percentile_intervals(blocks, [50, 99]) == {50: (1_000_000, 1_000_000), 99: (1_000_000, 1_000_000)}
    assert intervals([7.0] * 10) == (7.0, 7.0)


def test_interval_covers_the_truth_as_often_as_it_says() -> None:
    generator, truth, covered = np.random.default_rng(3), 1e6 * np.log(2), 0
    for repetition in range(60):
        blocks = [Histogram.of(generator.exponential(1e6, 12).astype(np.int64)) for _ in range(20)]
        found = percentile_intervals(blocks, [50], seed=repetition)[50]
        assert found is not None
        covered += found[0] <= truth <= found[1]
    assert 51 <= covered < 60


def test_interval_is_wider_where_blocks_differ() -> None:
    values = np.concatenate([np.full(100, 1_000_000 * block) for block in range(1, 11)])
    mixed = np.random.default_rng(0).permutation(values)
    widths = []
    for one in (values, mixed):
        found = percentile_intervals([Histogram.of(part) for part in np.split(one, 10)], [50])[50]
        assert found is not None
        widths.append(found[1] - found[0])
    assert widths[0] > 1.5 * widths[1]


def test_too_few_blocks_have_no_interval() -> None:
    blocks = [Histogram.of([1]), *[Histogram.of([])] * 20]
    assert percentile_intervals(blocks, [50]) == {50: None}
    assert intervals([1.0, 2.0]) is None
