"""Many durations in little memory: counts by size, percentiles, and intervals for them.

Lives here: pure arithmetic. Must not: clocks. The rule: no duration is left out, and what a bucket forgets is known: a
percentile is at most 1/1024 (0.1 %) above the duration that it stands for, and never below it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

_PER_OCTAVE: Final = 1024
_RESAMPLES: Final = 1000
_RESAMPLES_AT_ONCE: Final = 100
_FEWEST_BLOCKS: Final = 8
"""Fewer say too little about how much they vary."""

Integers = npt.NDArray[np.int64]
Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, eq=False)
class Histogram:
    """How many durations there were in each of the ascending `buckets`, 1024 of which are an octave; their exact sum,
    and the longest."""

    buckets: Integers
    counts: Integers
    sum_ns: int
    longest_ns: int

    @classmethod
    def of(cls, durations_ns: Iterable[int]) -> Histogram:
        values = np.maximum(np.fromiter(durations_ns, np.int64), 1)
        if not values.size:
            return cls(values, values, 0, 0)
        # A value is m * 2**e, with m in [0.5, 1).
        mantissas, exponents = np.frexp(values)
        buckets = exponents * _PER_OCTAVE + ((2 * mantissas - 1) * _PER_OCTAVE).astype(np.int64)
        found, counts = np.unique(buckets, return_counts=True)
        return cls(found.astype(np.int64), counts.astype(np.int64), int(values.sum()), int(values.max()))

    @classmethod
    def merged(cls, histograms: Iterable[Histogram]) -> Histogram:
        """All durations of several; of none, an empty one."""
        given = [cls.of(()), *histograms]
        buckets, places = np.unique(np.concatenate([one.buckets for one in given]), return_inverse=True)
        counts = np.zeros(len(buckets), np.int64)
        np.add.at(counts, places, np.concatenate([one.counts for one in given]))
        return cls(buckets, counts, sum(one.sum_ns for one in given), max(one.longest_ns for one in given))

    @property
    def count(self) -> int:
        return int(self.counts.sum())

    @property
    def mean_ns(self) -> float | None:
        """None if there is no duration."""
        return self.sum_ns / self.count if self.count else None

    def percentile_ns(self, percent: float) -> float | None:
        """The duration that `percent` per cent don't exceed (nearest rank); None if there is none."""
        if not self.count:
            return None
        rank = max(1, int(np.ceil(self.count * percent / 100)))
        place = int(np.searchsorted(np.cumsum(self.counts), rank))
        return min(float(_upper_ns(self.buckets[place])), float(self.longest_ns))


def _upper_ns(buckets: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """Where each bucket ends."""
    octaves, steps = np.divmod(buckets, _PER_OCTAVE)
    upper_ns: npt.NDArray[np.float64] = np.ldexp(1 + (steps + 1) / _PER_OCTAVE, octaves - 1)
    return upper_ns


def intervals(values: Sequence[float], seed: int = 0) -> Interval | None:
    """In which interval the mean of blocks' `values` lies, with 95 % confidence; None if there are too few blocks."""
    if len(values) < _FEWEST_BLOCKS:
        return None
    return _bounds(_weights(len(values), seed) @ np.asarray(values, np.float64) / len(values))


def percentile_intervals(
    blocks: Sequence[Histogram], percents: Sequence[float], seed: int = 0
) -> dict[float, Interval | None]:
    """In which interval, in nanoseconds, each percentile lies, with 95 % confidence; None if there are too few blocks.

    A bootstrap of blocks, which are stretches of time: as many blocks are drawn, with replacement, a thousand times,
    and the percentile is that of all durations in them. Requests that are near each other in time wait for the same
    things, so drawing single requests would give intervals that are much too narrow.
    """
    given = [block for block in blocks if block.count]
    if len(given) < _FEWEST_BLOCKS:
        return dict.fromkeys(percents)
    buckets = np.unique(np.concatenate([block.buckets for block in given]))
    table = np.zeros((len(given), len(buckets)))
    for row, block in zip(table, given, strict=True):
        row[np.searchsorted(buckets, block.buckets)] = block.counts
    upper_ns = np.minimum(_upper_ns(buckets), max(block.longest_ns for block in given))
    weights, found = _weights(len(given), seed), np.empty((len(percents), _RESAMPLES))
    for first in range(0, _RESAMPLES, _RESAMPLES_AT_ONCE):
        some = slice(first, first + _RESAMPLES_AT_ONCE)
        below = np.cumsum(weights[some] @ table, axis=1)
        for row, percent in zip(found, percents, strict=True):
            ranks = np.maximum(1, np.ceil(below[:, -1:] * percent / 100))
            row[some] = upper_ns[np.argmax(below >= ranks, axis=1)]
    return {percent: _bounds(row) for percent, row in zip(percents, found, strict=True)}


def _weights(blocks: int, seed: int) -> npt.NDArray[np.float64]:
    """How often each block is drawn, by resample and block."""
    generator = np.random.default_rng(seed)
    return generator.multinomial(blocks, np.full(blocks, 1 / blocks), _RESAMPLES).astype(np.float64)


def _bounds(values: npt.NDArray[np.float64]) -> Interval:
    low, high = np.percentile(values, [2.5, 97.5])
    return float(low), float(high)
