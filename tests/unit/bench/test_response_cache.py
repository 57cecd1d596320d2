"""The benchmark of the response cache, briefly."""

from __future__ import annotations

from bench import response_cache
from tests.lengths import whole_measurement


@whole_measurement
def test_each_side_is_measured_in_each_round() -> None:
    found = response_cache.measure("tiny", 2, 2, 0.2)
    assert [[*one] for one in found] == [["plain", "hits", "misses"]] * 2
    assert all(sample.requests_per_s > 0 for one in found for sample in one.values())
