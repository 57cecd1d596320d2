"""Numbers that add up: of versions of a model with those of the versions that they have replaced.

Lives here: how they are added, and how often something took how long. Must not: know what is counted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import ClassVar, Self

DURATION_BOUNDS_NS = tuple(
    us * 1_000
    for us in (100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 1_000_000, 10_000_000)
)


class Sums:
    """Numbers that add up, except for `no_sums`."""

    __slots__ = ()
    no_sums: ClassVar[tuple[str, ...]] = ()

    def merge(self, other: Self) -> None:
        """Add what `other` has counted so far. May be called on any thread if nothing else writes to these numbers."""
        for name in {*(self.__slots__ or vars(self))}.difference(self.no_sums):
            mine, others = getattr(self, name), getattr(other, name)
            if isinstance(mine, Sums):
                mine.merge(others)
            elif isinstance(mine, Counter):
                mine.update(others.copy())
            elif isinstance(mine, defaultdict):
                for key, one in others.copy().items():
                    mine[key].merge(one)
            elif isinstance(mine, list):
                setattr(self, name, [sum(pair) for pair in zip(mine, others, strict=True)])
            else:
                setattr(self, name, mine + others)


class DurationHistogram(Sums):
    """How many durations were up to each of `bounds_ns`, or above all of them, and their sum."""

    __slots__ = ("bounds_ns", "counts", "total_ns")
    no_sums = ("bounds_ns",)

    def __init__(self, bounds_ns: Sequence[int] = DURATION_BOUNDS_NS) -> None:
        self.bounds_ns = bounds_ns
        self.counts = [0] * (len(bounds_ns) + 1)
        self.total_ns = 0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def add(self, duration_ns: int, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds_ns, duration_ns)] += times
        self.total_ns += times * duration_ns

    def add_all(self, durations_ns: Sequence[int]) -> None:
        bounds_ns, counts = self.bounds_ns, self.counts
        for duration_ns in durations_ns:
            counts[bisect_left(bounds_ns, duration_ns)] += 1
        self.total_ns += sum(durations_ns)
