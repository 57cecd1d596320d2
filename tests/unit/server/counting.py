"""Versions of models that aren't served, for counting: reports with exact times, and the samples of the metrics.

Lives here: what several tests of statistics and metrics need. Must not: assert behaviour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.backends.base import Execution
from paceline.scheduler.observer import BatchReport
from paceline.server.telemetry.metrics import Metrics, VersionMetrics
from paceline.server.telemetry.model_statistics import VersionStatistics

__all__ = ["US", "Gauges", "SequenceCounts", "report", "samples", "version"]

US = 1_000


@dataclass
class SequenceCounts:
    live: int
    waiting: int


@dataclass
class Gauges:
    """A batcher's gauges, as the test sets them."""

    waiting_requests: int = 0
    lanes: int = 0
    levels: dict[int, int] = field(default_factory=dict)
    allowed_rows: int = 0
    growth_bound: int = 0
    slots: int = 0
    sequences: SequenceCounts | None = None

    def waiting_of_level(self, level: int) -> int:
        return self.levels.get(level, 0)


def version(model: str = "m", number: str = "3", **more: Any) -> VersionMetrics:
    statistics = VersionStatistics(more.pop("lengths", ()))
    return VersionMetrics(model, number, statistics, more.pop("batcher", Gauges()), **more)


def report(
    rows: int,
    waits_us: Sequence[int],
    *,
    padded_rows: int = 0,
    input_us: int = 0,
    infer_us: int = 0,
    output_us: int = 0,
    other_us: int = 0,
    failed: int = 0,
    cancelled: int = 0,
    sizes: tuple[int, ...] = (),
    elements: int = 0,
) -> BatchReport:
    """The report of an execution that took the sum of the given times, or raised an error if requests `failed`."""
    execution = None if failed else Execution([()] * len(waits_us), input_us * US, infer_us * US, output_us * US)
    took_ns = (input_us + infer_us + output_us + other_us) * US
    waits_ns = [wait_us * US for wait_us in waits_us]
    error = RuntimeError("x") if failed else None
    return BatchReport(
        rows,
        padded_rows or rows,
        waits_ns,
        5,
        5 + took_ns,
        execution,
        error,
        failed,
        cancelled,
        sizes=sizes,
        elements=elements,
    )


def samples(metrics: Metrics) -> dict[str, float]:
    """All samples by `name{labels}`."""
    lines = (line.rsplit(" ", 1) for line in metrics.text().decode().splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in lines}
