"""Metrics of one model, as a scraper reads them.

Lives here: fixtures, and reading a sample. Must not: assert behaviour.
"""

from __future__ import annotations

import pytest

from paceline.server.telemetry.metrics import Metrics, VersionMetrics
from tests.unit.server.counting import samples, version

__all__ = ["LABELS", "metrics", "model", "value"]

LABELS = 'model="m",version="3"'


@pytest.fixture
def metrics() -> Metrics:
    return Metrics()


@pytest.fixture
def model(metrics: Metrics) -> VersionMetrics:
    shown = version()
    metrics.add(shown)
    return shown


def value(metrics: Metrics, name: str, labels: str = LABELS) -> float:
    return samples(metrics)[f"{name}{{{labels}}}"]
