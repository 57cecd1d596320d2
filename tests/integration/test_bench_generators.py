"""The load generators are compared on a server whose requests take as long as asked for."""

from __future__ import annotations

import pytest

from bench.generators import PROGRAMS, compare, lag
from bench.perf_analyzer import find
from tests.lengths import whole_measurement


@whole_measurement
def test_open_loop_has_half_the_closed_rate() -> None:
    found = lag(0.3)
    assert found["open_per_s"] == found["closed_per_s"] / 2 > 0
    assert found["lag_p99_ms"] >= 0


@whole_measurement
@pytest.mark.skipif(find(PROGRAMS) is None, reason="no perf_analyzer: make witness")
def test_no_generator_is_faster_than_its_clients_can_be() -> None:
    binary = find(PROGRAMS)
    assert binary is not None
    for clients, found in compare(binary, 10, (1, 4), 1, 0.3).items():
        for per_s in (*found.ours_per_s, *found.theirs_per_s):
            assert 0 < per_s < 1.1 * clients / 0.01
        assert min(*found.ours_cpu_us, *found.theirs_cpu_us) > 0
