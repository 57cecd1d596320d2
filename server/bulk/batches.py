"""Which rows of a chunk share a call of the model.

Lives here: that choice, in numpy and whole numbers. Must not: depend on anything but the rows and what was fixed at the
job's start: a chunk has the same batches whenever and wherever it is computed, as the bits of outputs may depend on
them.
"""

from __future__ import annotations

import math

import numpy as np

from paceline.server.bulk.rows import Rows
from paceline.server.bulk.values import Fixed, Places

__all__ = ["batches"]

_WORTH_SHARE = 40
"""A batch costs as much as one in so many of a full batch's elements, besides its own: `Fixed.batch_rows` is about the
best, which is where larger batches gain some per cent at most. Half or twice as much would be worth the same: of 512 to
4,096 texts of log-normal lengths, calls and what is filled up differ by less than 0.5 % of the work in all."""


def batches(rows: Rows, fixed: Fixed, *, by_length: bool = False, max_elements: int = 0) -> list[Places]:
    """The places of each call, of `fixed.batch_rows` at most: every good row is in one of them. Rows of a batch have
    one shape, but for lengths that `Rows.take` fills up.

    Rows of equal (filled up) shapes share batches in the order in which they came. Of lengths, the rows that don't fill
    a batch share theirs with those of close sizes, where that is less work. `by_length`: all rows do, and smaller ones
    come first. `max_elements` is the most that rows times common sizes may be, unless of a single row; 0: no limit.
    """
    most = fixed.batch_rows if rows.batched else 1
    made = list[Places]()
    padded = rows.padded_sizes
    for group in _alike(rows.other_sizes[rows.good], by_key=by_length):
        places = rows.good[group]
        if not padded.shape[1]:
            made += _cut(places, most)
            continue
        rest = [places]
        if not by_length:
            rest = []
            for same in _alike(padded[places], by_key=False):
                volume = int(padded[places[same[0]]].prod())
                limit = max(1, min(most, max_elements // max(1, volume))) if max_elements else most
                full = len(same) // limit * limit
                made += _cut(places[same[:full]], limit)
                rest.append(places[same[full:]])
        left = np.concatenate(rest)
        if len(left):
            made += _sharing(left, padded[left], most, max_elements)
    return made


def _alike(keys: Places, *, by_key: bool) -> list[Places]:
    """The rows with equal `keys` [rows, columns], in the order of their first, or of their keys."""
    if not len(keys):
        return []
    if bool((keys == keys[0]).all()):
        return [np.arange(len(keys))]
    order = np.lexsort(keys.T[::-1])
    ordered = keys[order]
    groups = np.split(order, np.flatnonzero((ordered[1:] != ordered[:-1]).any(axis=1)) + 1)
    return groups if by_key else sorted(groups, key=lambda group: int(group[0]))


def _cut(places: Places, most: int) -> list[Places]:
    return [places[begin : begin + most] for begin in range(0, len(places), most)]


def _sharing(places: Places, sizes: Places, most: int, max_elements: int) -> list[Places]:
    """The batches of rows of these `sizes` [rows, lengths] that cost least: sorted by size, and cut where that is
    best."""
    order = np.lexsort((*sizes.T[::-1], sizes.prod(axis=1)))
    places, sizes = places[order], sizes[order]
    worth = most * int(sizes.prod(axis=1).sum()) // (len(sizes) * _WORTH_SHARE) + 1
    # Batches begin and end at marks only, an eighth of the largest apart, as each costs some microseconds.
    step = 1 if max_elements else math.gcd(most, max(1, most // 8))
    marks = np.array([0, *reversed(range(len(places), 0, -step))])
    peaks = np.maximum.reduceat(sizes, marks[:-1], axis=0)
    # best[n]: the least cost of what lies before mark n, the last batch of which begins at mark begins[n].
    best, begins = np.zeros(len(marks), np.int64), np.zeros(len(marks), np.int64)
    for end, low in enumerate(np.searchsorted(marks, marks - most).tolist()[1:], 1):
        common = np.maximum.accumulate(peaks[low:end][::-1], axis=0)[::-1]
        elements = common.prod(axis=1) * (marks[end] - marks[low:end])
        cost = best[low:end] + elements + worth
        if max_elements:
            cost[:-1][elements[:-1] > max_elements] = np.iinfo(np.int64).max
        begins[end] = low + cost.argmin()
        best[end] = cost[begins[end] - low]
    made, end = list[Places](), len(marks) - 1
    while end:
        made.append(np.sort(places[marks[begins[end]] : marks[end]]))
        end = int(begins[end])
    return made[::-1]
