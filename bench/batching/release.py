"""Rules for an idle instance: start on what waits, or wait for more?

Lives here: the candidates that docs/decisions/0001-release-when-idle.md compares. Must not: be part of the product. The
rules are given what the product would have to estimate (the cost line), so a rule that loses here loses everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from bench.batching.costs import Cost

__all__ = ["Greedy", "RateTimesBase", "Returning", "Rule", "Target", "Waiting"]

_RATE_WEIGHT = 0.05
_RETURN_WEIGHT = 0.1
_PARTS = (1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4)
_MIN_SHARE = 0.5
_MIN_MORE = 0.5


@dataclass(frozen=True, slots=True)
class Waiting:
    """What a rule sees: the time, the waiting rows, the oldest request's arrival, the earliest deadline, and since when
    an instance could have started on them."""

    now_ns: int
    rows: int
    oldest_ns: int
    deadline_ns: int
    idle_since_ns: int


class Rule(Protocol):
    """Says until when to hold an idle instance back; a time that has passed means not at all."""

    name: str

    def arrived(self, now_ns: int, rows: int) -> None: ...

    def answered(self, now_ns: int, rows: int) -> None: ...

    def hold_until_ns(self, waiting: Waiting) -> int: ...


class _Deaf:
    """Ignores arrivals and answers."""

    def arrived(self, now_ns: int, rows: int) -> None:
        pass

    def answered(self, now_ns: int, rows: int) -> None:
        pass


class Greedy(_Deaf):
    """Never wait: the product's rule if no delay is configured."""

    name = "greedy"

    def hold_until_ns(self, waiting: Waiting) -> int:
        return 0


class RateTimesBase(_Deaf):
    """Wait while fewer rows wait than arrive during `base_ns`, the cost of a batch without its rows: until then, one
    more row adds more to the throughput than waiting for it takes. It waits for `base_ns` at most, and never past a
    deadline.

    The rate is measured, as a moving average of the gaps between requests, or given as `rate_per_s`.
    """

    def __init__(self, cost: Cost, base_ns: int, rate_per_s: float = 0.0) -> None:
        self.name = "rate x base"
        self._cost = cost
        self._base_ns = base_ns
        self._gap_ns = 1e9 / rate_per_s if rate_per_s else 0.0
        self._measures = not rate_per_s
        self._last_ns = -1

    def arrived(self, now_ns: int, rows: int) -> None:
        if not self._measures:
            return
        if self._last_ns >= 0:
            gap_ns = (now_ns - self._last_ns) / rows
            self._gap_ns += _RATE_WEIGHT * (gap_ns - self._gap_ns) if self._gap_ns else gap_ns
        self._last_ns = now_ns

    def hold_until_ns(self, waiting: Waiting) -> int:
        if not self._gap_ns or waiting.rows * self._gap_ns >= self._base_ns:
            return 0
        return min(waiting.idle_since_ns + self._base_ns, waiting.deadline_ns - self._cost(waiting.rows))


class Target(_Deaf):
    """Wait as long as the oldest request would still be answered within `target_ns`, and no deadline would be
    missed."""

    def __init__(self, cost: Cost, target_ns: int, name: str) -> None:
        self.name = name
        self._cost = cost
        self._target_ns = target_ns

    def hold_until_ns(self, waiting: Waiting) -> int:
        return min(waiting.oldest_ns + self._target_ns, waiting.deadline_ns) - self._cost(waiting.rows)


class Returning(_Deaf):
    """Wait for callers who were just answered, if they tend to come again at once.

    Learns which share of a batch's rows comes within some short times of its answers. Waiting t for m more rows while q
    wait raises the throughput if m * base > q * t: `RateTimesBase` with the rate that follows answers. Where requests
    don't depend on answers, less than half of a batch comes within so short a time, and the rule is greedy. The wait
    ends when as many have come as were expected, and a quarter of `base_ns` after the answers at the latest.
    """

    name = "returning"

    def __init__(self, cost: Cost, base_ns: int) -> None:
        self._cost = cost
        self._base_ns = base_ns
        self._times_ns = [int(base_ns * part) for part in _PARTS]
        self._shares = [0.0] * len(_PARTS)
        self._came = [0] * len(_PARTS)
        self._answered_ns = self._answered_rows = 0

    def arrived(self, now_ns: int, rows: int) -> None:
        for place, time_ns in enumerate(self._times_ns):
            if now_ns <= self._answered_ns + time_ns:
                self._came[place] += rows

    def answered(self, now_ns: int, rows: int) -> None:
        if self._answered_rows:
            for place, came in enumerate(self._came):
                share = min(1.0, came / self._answered_rows)
                self._shares[place] += _RETURN_WEIGHT * (share - self._shares[place])
        self._came = [0] * len(_PARTS)
        self._answered_ns, self._answered_rows = now_ns, rows

    def hold_until_ns(self, waiting: Waiting) -> int:
        best, until_ns = 0.0, 0
        for time_ns, share, came in zip(self._times_ns, self._shares, self._came, strict=True):
            left_ns = self._answered_ns + time_ns - waiting.now_ns
            more = share * self._answered_rows - came
            gain = more * self._base_ns - waiting.rows * left_ns
            if share >= _MIN_SHARE and left_ns > 0 and more >= _MIN_MORE and gain > best:
                best, until_ns = gain, waiting.now_ns + left_ns
        return min(until_ns, waiting.deadline_ns - self._cost(waiting.rows))
