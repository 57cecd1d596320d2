"""Statistics of what was measured.

Lives here: samples, medians of rounds, ratios of pairs, percentiles. Must not: measure or print. Everything is pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import median

__all__ = ["Sample", "Spread", "percentile", "ratio", "spread"]

Sample = Mapping[str, float]
"""What one measurement found, by name; the unit is in the name."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The median of some rounds, with the lowest and the highest of them."""

    median: float
    low: float
    high: float
    samples: tuple[float, ...]


def spread(samples: Sequence[float]) -> Spread:
    """Sum up one value per round. Raises ValueError if there is none."""
    if not samples:
        raise ValueError("expected one sample or more, got none")
    return Spread(median(samples), min(samples), max(samples), tuple(samples))


def ratio(subject: Sequence[float], baseline: Sequence[float]) -> Spread:
    """`subject` over `baseline`, round by round: what the machine did to a whole round cancels out."""
    return spread([one / other for one, other in zip(subject, baseline, strict=True)])


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` per cent of `values`, which are sorted, don't exceed (nearest rank)."""
    if not values:
        raise ValueError("expected one value or more, got none")
    return values[max(0, ceil(len(values) * percent / 100) - 1)]
