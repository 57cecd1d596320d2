"""The measurement of offline work runs to its end: jobs compute all rows, and find those that are at fault."""

from __future__ import annotations

from bench import bulk
from tests.lengths import whole_measurement


@whole_measurement
def test_every_job_is_done_and_compared() -> None:
    found = bulk.measure(0.5, bulk.Sizes(quick=True))
    assert min(found[key] for key in bulk.RATIOS) > 0
    assert (found["clean"]["bad"], found["poisoned"]["bad"], found["texts"]["bad"]) == (0, 2, 0)
    assert found["texts"]["rows_per_batch"] > 1
