"""How long an execution takes, learned from earlier ones, and when those that run are likely to end.

Lives here: the measurements, two estimates, and the batches that execute. `expected_ns` is the best guess, to compare
costs. `proven_ns` is for refusing requests, which must not perpetuate itself: if everything is refused, nothing is
measured again. So it is 0 unless several measurements agree and the last one is recent, and it falls faster than it
rises.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from paceline.scheduler.request import Batch, RequestT

_RISE = 0.1
_FALL = 0.5
_OUTLIER = 4
"""A measurement counts as at most this many times the mean: one storm of page faults must not refuse requests."""
_PROOFS = 3
_FRESH_NS = 1_000_000_000
_FRESH_TIMES = 10
"""A measurement is fresh for a second, or for ten times what it measured."""
_MARGIN = 2
"""How many mean deviations longer than expected an execution may take before it counts as unexpected."""
_MAX_KEYS = 1024
_MAX_SIZES = 16_384
"""Of all keys together: callers choose both keys and sizes, and each takes 200 bytes."""
_FEW = 8
"""Each of a size's first measurements may change estimates by much, and is looked at; later only every `_FEW`th is."""
_LOOK_EVERY = 64
_LOOK_EVERY_TIMES = 8
"""After `_LOOK_EVERY` measurements, and this many more for each size known, all sizes are looked at: 0.1 us a
measurement. One look takes 3 ms where there are as many sizes as can be."""


@dataclass(slots=True)
class _Size:
    """What is known of one number of rows: mean, mean deviation, number of measurements, time of the last one."""

    mean: float
    last_ns: int
    count: int = 1
    deviation: float = 0.0

    def observe(self, duration_ns: int, now_ns: int) -> None:
        mean = self.mean
        off = duration_ns - mean
        if off > 0:
            off = min(off, (_OUTLIER - 1) * mean)
            self.deviation += _RISE * (min(off, mean) - self.deviation)
            self.mean = mean + _RISE * off
        elif self.count == 1:
            # The first execution of a size may include the cost of preparing it, which says nothing about later ones.
            self.mean = float(duration_ns)
        else:
            self.deviation += _RISE * (-off - self.deviation)
            self.mean = mean + _FALL * off
        self.count += 1
        self.last_ns = now_ns


class Curve:
    """Time over rows for one shape key: the mean at each size seen, and for other sizes a line through the smallest and
    the largest (`fewest` and `most` rows) of those that were measured more than once."""

    __slots__ = ("count", "fewest", "last_ns", "most", "sizes", "worth_due", "worth_rows")

    def __init__(self) -> None:
        self.sizes: dict[int, _Size] = {}
        self.worth_due, self.worth_rows = 1, 0.0
        self.count = self.last_ns = self.fewest = self.most = 0

    def expected_ns(self, rows: int) -> int:
        """What a batch of `rows` rows is expected to take; 0 as long as nothing is known."""
        size = self.sizes.get(rows)
        if size is not None:
            return int(size.mean)
        if not self.most:
            return int(min((one.mean for one in self.sizes.values()), default=0.0))
        few_ns, many_ns = self.sizes[self.fewest].mean, self.sizes[self.most].mean
        row_ns = max(0.0, many_ns - few_ns) / max(1, self.most - self.fewest)
        return int(max(0.0, few_ns + row_ns * (rows - self.fewest)))

    def proven_ns(self, rows: int, now_ns: int) -> int:
        """As `expected_ns`, if that is known well enough to refuse a request for it; else 0."""
        size = self.sizes.get(rows)
        count, last_ns = (size.count, size.last_ns) if size is not None else (self.count, self.last_ns)
        if count < _PROOFS:
            return 0
        # Of a size beyond all that were measured, only that it takes no less than these is proven: a line through two
        # sizes close to each other says anything of one that is far away, which would be refused for ever.
        expected_ns = int(size.mean) if size is not None else self.expected_ns(min(rows, self.most or rows))
        return expected_ns if _is_fresh(last_ns, expected_ns, now_ns) else 0

    def recent_ns(self, rows: int, now_ns: int) -> int:
        """As `expected_ns`, if anything was measured lately, whatever its size; else 0."""
        expected_ns = self.expected_ns(rows)
        return expected_ns if self.count >= _PROOFS and _is_fresh(self.last_ns, expected_ns, now_ns) else 0

    def base_ns(self) -> int:
        """What a batch costs whatever its rows, by the smallest and largest size seen; 0 with fewer than two."""
        if len(self.sizes) < 2:
            return 0
        few, many = min(self.sizes), max(self.sizes)
        few_ns, many_ns = self.sizes[few].mean, self.sizes[many].mean
        return int(max(0.0, few_ns - few * max(0.0, many_ns - few_ns) / (many - few)))

    def worth(self) -> float:
        """How many more rows take as long as one more batch costs whatever its rows; 0 as long as it isn't known."""
        if self.count >= self.worth_due:
            self.worth_rows, self.worth_due = self._worth(), self.count + _FEW
        return self.worth_rows

    def _worth(self) -> float:
        """By the line of least squares, in proportion to what was measured, through sizes measured twice or more."""
        sizes = [(rows, one) for rows, one in self.sizes.items() if one.count > 1]
        weights = [min(one.count, _FEW) / max(1.0, one.mean) ** 2 for _, one in sizes]
        total = sum(weights)
        if len(sizes) < 2:
            return 0.0
        rows_mean = sum([weight * rows for weight, (rows, _) in zip(weights, sizes, strict=True)]) / total
        time_mean = sum([weight * one.mean for weight, (_, one) in zip(weights, sizes, strict=True)]) / total
        spread = together = 0.0
        for weight, (rows, one) in zip(weights, sizes, strict=True):
            spread += weight * (rows - rows_mean) ** 2
            together += weight * (rows - rows_mean) * (one.mean - time_mean)
        row_ns = together / spread
        base_ns = max(0.0, time_mean - row_ns * rows_mean)
        return base_ns / row_ns if row_ns > 0 else base_ns

    def margin_ns(self, rows: int) -> int:
        """How much longer than expected it may well take; 0 as long as nothing is known about the size."""
        size = self.sizes.get(rows)
        return int(_MARGIN * size.deviation) if size is not None else 0

    def longest_ns(self, max_rows: int) -> int:
        """An upper bound of all estimates for up to `max_rows` rows. At least twice what was measured, as later
        executions may take longer."""
        seen_ns = max([one.mean + _MARGIN * one.deviation for one in self.sizes.values()])
        return max(2 * int(seen_ns), self.expected_ns(max_rows) + self.margin_ns(max_rows))


def _is_fresh(last_ns: int, expected_ns: int, now_ns: int) -> bool:
    return now_ns - last_ns <= max(_FRESH_NS, _FRESH_TIMES * expected_ns)


class LatencyModel:
    """Execution times by shape key and rows, up to `max_rows`; or, if requests of a key differ in length, by elements,
    which take the place of rows (`cost_size`). Everything is O(1); the keys first seen longest ago are
    forgotten. Only the hashes of keys are kept: keys may be as large as callers like, and would outlive their requests.
    Two keys of the same hash count as one, and estimates are no worse for that.

    `longest_ns` is about as long as anything is likely to take, for a cheap check before an exact one, and where there
    is none. It is never less than any estimate, nor than what was measured lately: one execution that took long is
    forgotten after 64 more, and 8 for each size known.
    """

    def __init__(self, max_rows: int) -> None:
        self._max_rows = self._largest = max_rows
        self._lately = 0
        self._curves: OrderedDict[int, Curve] = OrderedDict()
        self._nothing = Curve()
        self._sizes = 0
        self._since_look = 0
        self.longest_ns = 0

    def observe(self, key: Hashable, rows: int, duration_ns: int, now_ns: int) -> None:
        """Learn that a batch of `rows` rows took `duration_ns`."""
        hashed = hash(key)
        curve = self._curves.get(hashed)
        if curve is None:
            curve = self._curves[hashed] = Curve()
        size = curve.sizes.get(rows)
        if size is None:
            size = curve.sizes[rows] = _Size(float(duration_ns), now_ns)
            self._sizes += 1
            # Those first seen longest ago go; one is left however many sizes it has.
            while len(self._curves) > _MAX_KEYS or (self._sizes > _MAX_SIZES and len(self._curves) > 1):
                self._sizes -= len(self._curves.popitem(last=False)[1].sizes)
        else:
            size.observe(duration_ns, now_ns)
            curve.count += 1
            curve.last_ns = now_ns
            if size.count == 2:
                curve.fewest, curve.most = min(curve.fewest or rows, rows), max(curve.most, rows)
        if 2 * duration_ns > self.longest_ns:
            self.longest_ns = 2 * duration_ns
        if size.count < _FEW or not size.count % _FEW:
            longest_ns = curve.expected_ns(self._largest) + curve.margin_ns(self._largest)
            self.longest_ns = max(self.longest_ns, longest_ns)
        self._since_look += 1
        if self._since_look >= _LOOK_EVERY + _LOOK_EVERY_TIMES * self._sizes:
            self._look()

    def of(self, key: Hashable) -> Curve:
        """What is known of a key."""
        return self._curves.get(hash(key), self._nothing)

    def expect(self, size: int) -> None:
        """Learn that a batch may have this size; for a while, as one large request says nothing about later ones."""
        self._lately = max(self._lately, size)
        if size > self._largest:
            self._look()

    def _look(self) -> None:
        self._since_look = 0
        self._largest, self._lately = max(self._max_rows, self._lately), 0
        self.longest_ns = max([one.longest_ns(self._largest) for one in self._curves.values()], default=0)


def cost_size(rows: int, sizes: Sequence[int]) -> int:
    """By what a batch's execution time is learned: its rows; or, if its requests differ in length and are filled up to
    `sizes`, its elements, of which about the same number counts as the same."""
    if not sizes:
        return rows
    elements = rows * math.prod(sizes)
    step = max(0, elements.bit_length() - 4)
    return max(1, elements >> step << step)


class Executing:
    """The batches that have left and aren't done, each with when it is likely to end, of up to `max_rows` rows, on
    `instances` instances. Which instance has which, `Instances` knows."""

    def __init__(self, latency: LatencyModel, instances: int, max_rows: int) -> None:
        self._latency = latency
        self._instances = instances
        self._max_rows = max_rows
        self._begun = 0
        self._ends_ns: dict[int, int] = {}

    # hot path
    def begin(
        self, requests: Sequence[RequestT], rows: int, padded_rows: int, now_ns: int, sizes: tuple[int, ...] = ()
    ) -> Batch[RequestT]:
        """Begin a batch of `requests`, all of one key and filled up to `sizes`, which starts at `now_ns`."""
        key = requests[0].key
        self._begun += 1
        size = padded_rows if not sizes else cost_size(padded_rows, sizes)
        expected_ns = self._latency.of(key).proven_ns(size, now_ns)
        self._ends_ns[self._begun] = now_ns + expected_ns
        elements = rows if not sizes else sum([one.rows * math.prod(one.sizes) for one in requests])
        return Batch(self._begun, key, rows, padded_rows, tuple(requests), expected_ns, sizes, elements)

    # hot path
    def end(self, batch: Batch[RequestT]) -> None:
        """Forget a batch that is done, or won't execute."""
        self._ends_ns.pop(batch.number, None)

    def first_end_ns(self, now_ns: int) -> int:
        """When the first batch is likely to end; `now_ns` if there is none."""
        return min(self._ends_ns.values(), default=now_ns)

    def least_wait_ns(self, key: Hashable, rows_before: int, now_ns: int) -> int:
        """The least time that a request of `key` that arrives now will wait: until an instance is free, and for the
        full batches among the `rows_before` it in its own lane. Other lanes don't count, as any may come first."""
        full_batches = rows_before // self._max_rows
        wait_ns = full_batches * self._latency.of(key).proven_ns(self._max_rows, now_ns) // self._instances
        if len(self._ends_ns) >= self._instances:
            wait_ns += max(0, self.first_end_ns(now_ns) - now_ns)
        return wait_ns
