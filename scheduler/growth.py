"""How large a batch is worth while, where large ones cost more per row than small ones: on a processor whose caches
they exceed, for example.

Lives here: what a row costs in batches of about a size, measured; and the size to stop at. Must not: cut batches, or
know deadlines. A size is in rows, or, where requests differ in length, in elements.

Sizes count by octaves. The bound of a key moves by one octave at a time, towards where a row costs less by more than
the measurements differ among themselves. It starts without a bound, so a model that nothing speaks against has none.
What is measured is forgotten after half a minute, or some executions. To know whether the next octave is cheaper, a few
batches are made of that size now and then: eight in half a minute, and not two in a row.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

_ENOUGH = 8
"""Measurements that say what a row costs."""
_WEIGHT = 0.1
_FRESH_NS = 30_000_000_000
_FRESH_TIMES = 64
"""What is measured is forgotten after half a minute, or, for slow models, the time of so many executions."""
_NOISE = 0.03
"""A difference up to this fraction means nothing, however often it is seen."""
_DEVIATIONS = 2
_OUTLIER = 3
_EVERY = 4
"""Of so many batches, one is of another size, while that has to be measured."""
_MAX_KEYS = 256


@dataclass(slots=True)
class _Octave:
    """What a row costs in batches of one octave: mean, mean deviation, measurements, and until when they count."""

    mean: float = 0.0
    deviation: float = 0.0
    count: int = 0
    until_ns: int = 0

    def observe(self, duration_ns: int, size: int, now_ns: int) -> None:
        cost = duration_ns / size
        if now_ns > self.until_ns:
            self.count = 0
        self.until_ns = now_ns + max(_FRESH_NS, _FRESH_TIMES * duration_ns)
        self.count += 1
        if self.count == 1:
            self.mean, self.deviation = cost, 0.0
            return
        off = min(cost - self.mean, _OUTLIER * self.mean)
        weight = max(_WEIGHT, 1 / self.count)
        self.deviation += weight * (abs(off) - self.deviation)
        self.mean += weight * off

    def is_cheaper(self, other: _Octave) -> bool:
        """Whether a row costs less here than in `other`, beyond noise."""
        effective = min(self.count, other.count, round(2 / _WEIGHT))
        noise = _DEVIATIONS * (self.deviation + other.deviation) / math.sqrt(effective)
        return other.mean - self.mean > max(noise, _NOISE * other.mean)


@dataclass(slots=True)
class _Key:
    """What is known of a key. `bound`: the octave to stop at, None if there is no bound."""

    octaves: dict[int, _Octave] = field(default_factory=dict)
    bound: int | None = None
    batches: int = 0
    measurements: int = 0

    def known(self, number: int, now_ns: int) -> _Octave | None:
        """The octave of this number, if enough of it was measured lately."""
        octave = self.octaves.get(number)
        return octave if octave and octave.count >= _ENOUGH and now_ns <= octave.until_ns else None

    def top(self, now_ns: int) -> int | None:
        """The bound, or without one the largest octave that is known; None if none is."""
        if self.bound is not None:
            return self.bound
        return max((number for number in self.octaves if self.known(number, now_ns)), default=None)


class Growth:
    """The sizes at which batches stop, by key. Only the hashes of keys are kept, as in `LatencyModel`. If there are
    only some `sizes`, batches stop at none below them."""

    def __init__(self, sizes: Sequence[int] = ()) -> None:
        octaves = {(size - 1).bit_length() for size in sizes} or range(sys.maxsize.bit_length())
        self._octaves = sorted(octaves)
        self._keys: OrderedDict[int, _Key] = OrderedDict()

    @property
    def bounds(self) -> list[int]:
        """The bounds in force; keys without one have none here."""
        return [1 << key.bound for key in self._keys.values() if key.bound is not None]

    # hot path
    def most(self, key: Hashable, now_ns: int) -> int:
        """The largest size that the next batch of `key`, for which more is waiting, should have; 0: any."""
        known = self._keys.get(hash(key))
        if known is None:
            return 0
        known.batches += 1
        if known.batches % _EVERY == 0 and (top := known.top(now_ns)) is not None:
            below, above = self._beside(top)
            # Larger ones than without a bound can't be had, so only a bound hides them.
            for number in (below, above) if known.bound is not None else (below,):
                if number is not None and not known.known(number, now_ns):
                    return 1 << number
        return 0 if known.bound is None else 1 << known.bound

    # hot path
    def observe(self, key: Hashable, size: int, duration_ns: int, now_ns: int) -> None:
        """Learn that a batch of `size` took `duration_ns`."""
        known = self._keys.get(hash(key))
        if known is None:
            if size == 1:
                return  # where shapes are many, most of them never have a larger batch
            known = self._keys[hash(key)] = _Key()
            if len(self._keys) > _MAX_KEYS:
                self._keys.popitem(last=False)
        number = (size - 1).bit_length()
        octave = known.octaves.get(number)
        if octave is None:
            octave = known.octaves[number] = _Octave()
        octave.observe(duration_ns, size, now_ns)
        known.measurements += 1
        if not known.measurements % _ENOUGH:
            self._judge(known, now_ns)

    def _judge(self, known: _Key, now_ns: int) -> None:
        """Move the bound of a key, if what is known of the octaves beside it speaks for that."""
        if (top := known.top(now_ns)) is None or (here := known.known(top, now_ns)) is None:
            return
        lower, upper = self._beside(top)
        below, above = (None if one is None else known.known(one, now_ns) for one in (lower, upper))
        if below and below.is_cheaper(here):
            known.bound = lower
        elif known.bound is not None and above and upper is not None and not here.is_cheaper(above):
            # Where no larger octave was ever measured, there is nothing to stop before.
            known.bound = upper if any(one > upper for one in known.octaves) else None

    def _beside(self, number: int) -> tuple[int | None, int | None]:
        """The octaves next to this one in which there are sizes, below and above."""
        begin, end = bisect_left(self._octaves, number), bisect_right(self._octaves, number)
        below = self._octaves[begin - 1] if begin else None
        return below, self._octaves[end] if end < len(self._octaves) else None
