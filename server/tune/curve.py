"""How long executions take by their rows, and by the size of a row.

Lives here: what was measured, and what that says of sizes between. Must not: measure.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Curve", "Curves"]

_SHARES = 64
_LONGER = 1.1


@dataclass(frozen=True, slots=True)
class Curve:
    """By numbers of rows, which ascend, how long each measured execution took, in ascending order."""

    durations_ns: Mapping[int, Sequence[int]]

    @property
    def sizes(self) -> list[int]:
        return list(self.durations_ns)

    @property
    def doubtful(self) -> list[int]:
        """The sizes of which executions took longer than with more rows: something else may have slowed them down."""
        least_ns, found = math.inf, list[int]()
        for rows in reversed(self.sizes):
            if self.mean_ns(rows) > _LONGER * least_ns:
                found.append(rows)
            least_ns = min(least_ns, self.mean_ns(rows))
        return found[::-1]

    def cost(self, rows: int, share: float) -> int:
        """What an execution of `rows` rows takes, if `share` of such executions take less. Between two sizes that were
        measured, on the line between them; in proportion to the largest, beyond it."""
        return round(_between(self.sizes, rows, lambda size: self._quantile_ns(size, share)))

    def scaled(self, factor: float) -> Curve:
        """Of executions that take so many times as long."""
        durations = self.durations_ns.items()
        return Curve({rows: [max(1, int(ns * factor)) for ns in found] for rows, found in durations})

    def mean_ns(self, rows: int) -> float:
        """What an execution of `rows` rows takes on average, as `cost`."""
        return _between(self.sizes, rows, lambda size: sum(self.durations_ns[size]) / len(self.durations_ns[size]))

    def rows_per_s(self, most_rows: int) -> float:
        """What one instance can compute, if it always has batches of the best size up to `most_rows`."""
        return max(rows * 1e9 / max(1.0, self.mean_ns(rows)) for rows in self.sizes if rows <= most_rows)

    def _quantile_ns(self, rows: int, share: float) -> int:
        durations_ns = self.durations_ns[rows]
        return durations_ns[min(len(durations_ns) - 1, int(share * len(durations_ns)))]


@dataclass(frozen=True, slots=True)
class Curves:
    """Of rows of different sizes, which ascend: the texts of a request have more words, or fewer. `typical_size` is the
    mean of those that requests have."""

    by_size: Mapping[int, Curve]
    typical_size: int

    @property
    def typical(self) -> Curve:
        """Of rows of the typical size, for the numbers of rows that were measured of all sizes."""
        if self.typical_size in self.by_size:
            return self.by_size[self.typical_size]
        first, *others = self.by_size.values()
        shares = [number / _SHARES for number in range(_SHARES)]
        return Curve(
            {
                rows: [self.cost(rows, self.typical_size, share) for share in shares]
                for rows in first.sizes
                if all(rows in other.durations_ns for other in others)
            }
        )

    def scaled(self, factor: float) -> Curves:
        """Of executions that take so many times as long."""
        return Curves({size: one.scaled(factor) for size, one in self.by_size.items()}, self.typical_size)

    def cost(self, rows: int, size: int, share: float) -> int:
        """What an execution of `rows` rows of `size` takes, as `Curve.cost`."""
        return round(_between([*self.by_size], size, lambda near: self.by_size[near].cost(rows, share)))


def _between(measured: Sequence[int], at: int, value_ns: Callable[[int], float]) -> float:
    """`value_ns` where it was `measured`; on the line between two such places; in proportion to the last, beyond it."""
    place = bisect_left(measured, at)
    if place == len(measured):
        return value_ns(measured[-1]) * at / measured[-1]
    above_ns = value_ns(measured[place])
    if measured[place] == at or not place:
        return above_ns
    below = measured[place - 1]
    part = (at - below) / (measured[place] - below)
    return (1 - part) * value_ns(below) + part * above_ns
