"""When requests are due, whether or not answers come: at random, at regular intervals, or as they were recorded.

Lives here: pure sequences of times, determined by a seed. Must not: clocks, files, sending. Several processes share
one sequence: of N, each takes every N-th arrival, so that together they send exactly it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count, islice
from random import Random
from typing import Protocol

_NS = 1_000_000_000

Arrival = tuple[int, int]
"""When a request is due, in nanoseconds from the start, and the number of what it contains."""


class Arrivals(Protocol):
    """A sequence of arrivals that begins anew with each `times`. It has no end, or `seconds` is when it ends."""

    @property
    def seconds(self) -> float | None: ...

    def times(self) -> Iterator[Arrival]: ...


@dataclass(frozen=True, slots=True)
class Poisson:
    """`per_s` requests a second on average, independent of each other, as of many users."""

    per_s: float
    seed: int = 0
    seconds: None = None

    def times(self) -> Iterator[Arrival]:
        random, at_s = Random(self.seed), 0.0
        for number in count():
            at_s += random.expovariate(self.per_s)
            yield round(at_s * _NS), number


@dataclass(frozen=True, slots=True)
class Constant:
    """`per_s` requests a second, all with the same distance."""

    per_s: float
    seconds: None = None

    def times(self) -> Iterator[Arrival]:
        # Each from its number: sums would drift.
        return ((round(number * _NS / self.per_s), number) for number in count())


@dataclass(frozen=True, slots=True)
class Recorded:
    """Arrivals as they were, `speed` times as fast: ascending times in nanoseconds from the start, and the number of
    what each contains."""

    at_ns: tuple[int, ...]
    contents: tuple[int, ...]
    speed: float = 1.0

    @property
    def seconds(self) -> float:
        return (self.at_ns[-1] + 1) / self.speed / _NS

    @property
    def rate(self) -> float:
        """Requests a second. What comes after the last is unknown, so that it doesn't count."""
        return (len(self.at_ns) - 1) * _NS * self.speed / self.at_ns[-1] if self.at_ns[-1] else 0.0

    def of_length(self, requests: int) -> Recorded:
        """So many requests: those that came within the shortest time, or, if it has fewer, it again and again."""
        length, at_ns = len(self.at_ns), self.at_ns
        if length >= requests:
            begin = min(range(length - requests + 1), key=lambda at: at_ns[at + requests - 1] - at_ns[at])
            part = slice(begin, begin + requests)
            return replace(self, at_ns=tuple(one - at_ns[begin] for one in at_ns[part]), contents=self.contents[part])
        # From the last to the first again, the time that there is between two on average.
        period_ns = at_ns[-1] * length // max(1, length - 1)
        return replace(
            self,
            at_ns=tuple(at_ns[number % length] + number // length * period_ns for number in range(requests)),
            contents=tuple(self.contents[number % length] for number in range(requests)),
        )

    def times(self) -> Iterator[Arrival]:
        for at_ns, contents in zip(self.at_ns, self.contents, strict=True):
            yield round(at_ns / self.speed), contents


def share(arrivals: Arrivals, part: int, parts: int) -> Iterator[Arrival]:
    """The arrivals that process `part` of `parts` sends."""
    return islice(arrivals.times(), part, None, parts)
