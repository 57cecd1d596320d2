"""Durations, counted by bounds.

Lives here: `DurationHistogram`. Must not: clocks, or what is timed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

__all__ = ["DurationHistogram"]


class DurationHistogram:
    """How many durations were up to each of `bounds_ns`, or above all of them, and their sum."""

    __slots__ = ("bounds_ns", "counts", "total_ns")

    def __init__(self, bounds_ns: Sequence[int]) -> None:
        self.bounds_ns = bounds_ns
        self.counts = [0] * (len(bounds_ns) + 1)
        self.total_ns = 0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def add(self, duration_ns: int) -> None:
        self.counts[bisect_left(self.bounds_ns, duration_ns)] += 1
        self.total_ns += duration_ns

    def add_all(self, durations_ns: Sequence[int]) -> None:
        counts, bounds_ns = self.counts, self.bounds_ns
        for duration_ns in durations_ns:
            counts[bisect_left(bounds_ns, duration_ns)] += 1
        self.total_ns += sum(durations_ns)

    def merge(self, other: DurationHistogram) -> None:
        """Add what `other`, of the same bounds, has counted."""
        self.counts = [mine + others for mine, others in zip(self.counts, other.counts, strict=True)]
        self.total_ns += other.total_ns
