"""The measurement of offline work runs to its end: jobs compute all rows, and find those that are at fault."""

from __future__ import annotations

from bench import bulk
from tests.lengths import whole_measurement


@whole_measurement
def test_every_job_is_done_and_compared() -> None:
    found = bulk.measure(0.5, bulk.Sizes(quick=True))
    assert min(found[key] for key in bulk.RATIOS) > 0
    bad = {kind: found[kind]["bad"] for kind in ("clean", "poisoned", "texts", "poisoned_texts")}
    assert bad == {"clean": 0, "poisoned": 2, "texts": 0, "poisoned_texts": 1}
    assert found["texts"]["rows_per_batch"] > 1
