"""How long executions take by their rows.

Lives here: what was measured, and what that says of sizes between. Must not: measure.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Curve"]


@dataclass(frozen=True, slots=True)
class Curve:
    """By numbers of rows, which ascend, how long each measured execution took, in ascending order."""

    durations_ns: Mapping[int, Sequence[int]]

    @property
    def sizes(self) -> list[int]:
        return list(self.durations_ns)

    def cost(self, rows: int, share: float) -> int:
        """What an execution of `rows` rows takes, if `share` of such executions take less. Between two sizes that were
        measured, on the line between them; in proportion to the largest, beyond it."""
        sizes = self.sizes
        place = bisect_left(sizes, rows)
        if place == len(sizes):
            return round(self._quantile_ns(sizes[-1], share) * rows / sizes[-1])
        above_ns = self._quantile_ns(sizes[place], share)
        if sizes[place] == rows or not place:
            return above_ns
        below = sizes[place - 1]
        part = (rows - below) / (sizes[place] - below)
        return round((1 - part) * self._quantile_ns(below, share) + part * above_ns)

    def mean_ns(self, rows: int) -> float:
        """Of a size that was measured."""
        return sum(self.durations_ns[rows]) / len(self.durations_ns[rows])

    def rows_per_s(self, most_rows: int) -> float:
        """What one instance can compute, if it always has batches of the best size up to `most_rows`."""
        return max(rows * 1e9 / max(1.0, self.mean_ns(rows)) for rows in self.sizes if rows <= most_rows)

    def _quantile_ns(self, rows: int, share: float) -> int:
        durations_ns = self.durations_ns[rows]
        return durations_ns[min(len(durations_ns) - 1, int(share * len(durations_ns)))]
