"""What an execution costs, as a function of the rows that the model sees.

Lives here: cost curves in nanoseconds. Must not: time or sleep. A curve that remembers or draws numbers is created anew
for each run, so that runs don't depend on one another.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from random import Random

__all__ = ["MS", "Cost", "FirstUse", "Jittered", "Linear", "Stepped", "capacity_per_s"]

Cost = Callable[[int], int]
"""Rows to nanoseconds."""

MS = 1_000_000


class Linear:
    """`base_ns + row_ns * rows`, the usual shape of an accelerator's cost."""

    def __init__(self, base_ns: int, row_ns: int) -> None:
        self.base_ns, self.row_ns = base_ns, row_ns

    def __call__(self, rows: int) -> int:
        return self.base_ns + self.row_ns * rows


class Stepped:
    """The cost of the smallest size in `ns_of_size` that is large enough, as with kernels that work on whole tiles."""

    def __init__(self, ns_of_size: dict[int, int]) -> None:
        self._sizes = sorted(ns_of_size)
        self._ns = [ns_of_size[size] for size in self._sizes]

    def __call__(self, rows: int) -> int:
        return self._ns[bisect_left(self._sizes, rows)]


class FirstUse:
    """`cost`, and `extra_ns` on top the first time that a number of rows is seen, as in a runtime that prepares per
    shape."""

    def __init__(self, cost: Cost, extra_ns: int) -> None:
        self._cost = cost
        self._extra_ns = extra_ns
        self._seen: set[int] = set()

    def __call__(self, rows: int) -> int:
        extra_ns = 0 if rows in self._seen else self._extra_ns
        self._seen.add(rows)
        return self._cost(rows) + extra_ns


class Jittered:
    """`cost` times a random factor of mean 1 (log-normal, of deviation `sigma`)."""

    def __init__(self, cost: Cost, sigma: float, random: Random) -> None:
        self._cost = cost
        self._sigma = sigma
        self._random = random

    def __call__(self, rows: int) -> int:
        return int(self._cost(rows) * self._random.lognormvariate(-self._sigma * self._sigma / 2, self._sigma))


def capacity_per_s(cost: Cost, max_rows: int) -> float:
    """Rows per second of one instance that is never idle and whose batches are full."""
    return max_rows * 1e9 / cost(max_rows)
