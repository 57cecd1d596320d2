"""What is compared of one model on a GPU, from given samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import gpu_models
from bench.gpu_plan import Found, Plan
from bench.gpu_rounds import ModelRun
from bench.gpu_sections import scale_frontends
from bench.summary import Comparison

PLAN = Plan("cuda", 3, 4.0, 1.0, 8, 4, 0.0, graphs=True)
MODEL = gpu_models.chosen("cuda", gpu_models.QUICK)[0]


def compared(found: Found) -> Mapping[str, Comparison]:
    nowhere: Any = None
    section = ModelRun(PLAN, nowhere, MODEL, Path(), Path(), found).section()
    assert "with CUDA graphs" in section.how
    return {one.what: one for one in section.comparisons}


def measured(lag_ms: float = 0.1) -> Found:
    """Full batches of 32 rows take 10 ms in the ceiling."""
    found = Found()
    for p99_ms in (21.0, 24.0, 30.0):
        found.add("paceline", {"rows_per_s": 2880.0, "rows_per_batch": 30.0, "gpu_busy": 0.95})
        found.add("run_with_iobinding", {"rows_per_s": 3200.0, "batch_ms": 10.0})
        found.add("paceline at 70 %", {"p99_ms": p99_ms, "lag_p99_ms": lag_ms})
    return found


def test_latency_is_in_full_batches_with_the_spread_of_the_stretches() -> None:
    one = compared(measured())["p99 latency / a full batch"]
    assert one.found is not None
    assert (one.found.median, one.found.low, one.found.high) == (2.4, 2.1, 3.0)
    assert one.verdict == "reached"


def test_latency_has_no_verdict_if_the_generator_was_slow() -> None:
    found = compared(measured(lag_ms=1.2))
    assert found["p99 latency / a full batch, generator too slow: lag 0.12 of it"].verdict == ""


def test_busy_share_stands_beside_the_share_that_batches_take() -> None:
    found = compared(measured())
    assert found["share of the time in which any kernel ran"].verdict == "reached"
    filled = found["batches/s x the time of a full one in run_with_iobinding"]
    assert filled.found is not None
    assert filled.found.median == pytest.approx(0.96)


def test_no_section_begins_after_the_time(tmp_path: Path) -> None:
    nowhere: Any = None
    model = replace(MODEL, name="m")
    *_, of_model = ModelRun(PLAN, nowhere, model, tmp_path, tmp_path, Found()).sections()
    *_, of_frontends = scale_frontends(PLAN, tmp_path)
    assert of_model.absent["m"] == of_frontends.absent["frontends"] == "the time was up"
    assert not list(tmp_path.iterdir())


def test_model_that_is_not_measured_has_that_reason_alone() -> None:
    nowhere: Any = None
    found = Found(absent={"the first request": "INTERNAL: no"})
    section = ModelRun(PLAN, nowhere, MODEL, Path(), Path(), found).unmeasured("why")
    assert dict(section.absent) == {MODEL.name: "why"}
