"""When requests are due, whether or not answers come: at random, at regular intervals, or as they were recorded.

Lives here: pure sequences of times, determined by a seed or a file. Must not: clocks, sending. Several processes share
one sequence: of N, each takes every N-th arrival, so that together they send exactly it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice
from random import Random
from typing import Any, Protocol

__all__ = ["Arrivals", "Constant", "Poisson", "RecordError", "Recorded", "Recording", "read_recording", "share"]

_NS = 1_000_000_000

Arrival = tuple[int, int]
"""When a request is due, in nanoseconds from the start, and the number of what it contains."""

Shapes = Mapping[str, tuple[int, ...]]


class RecordError(ValueError):
    """A recording can't be used; the message is one line and names the line of the file."""


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

    def times(self) -> Iterator[Arrival]:
        for at_ns, contents in zip(self.at_ns, self.contents, strict=True):
            yield round(at_ns / self.speed), contents


def share(arrivals: Arrivals, part: int, parts: int) -> Iterator[Arrival]:
    """The arrivals that process `part` of `parts` sends."""
    return islice(arrivals.times(), part, None, parts)


@dataclass(frozen=True, slots=True)
class Recording:
    """What a file says: when requests came, in nanoseconds from the first, and which shapes each had by the place in
    `shapes`; the shapes of inputs that it doesn't say are for the reader to choose."""

    at_ns: tuple[int, ...]
    contents: tuple[int, ...]
    shapes: tuple[Shapes, ...]


def read_recording(lines: Iterable[str]) -> Recording:
    """Lines of JSON, `{"at_s": 0.25, "shapes": {"ids": [1, 37]}}`, in any order; `shapes` may be left out. Blank lines
    are skipped. Raises RecordError."""
    found: list[tuple[float, tuple[tuple[str, tuple[int, ...]], ...]]] = []
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                found.append(_parsed(json.loads(line)))
            except (ValueError, RecursionError, OverflowError) as error:
                what = str(error) if isinstance(error, RecordError) else "not JSON"
                raise RecordError(f"line {number}: {what}") from None
    if not found:
        raise RecordError("no arrivals")
    found.sort(key=lambda one: one[0])
    first_s, kinds = found[0][0], {shapes: place for place, shapes in enumerate(dict.fromkeys(one[1] for one in found))}
    return Recording(
        tuple(round((at_s - first_s) * _NS) for at_s, _ in found),
        tuple(kinds[shapes] for _, shapes in found),
        tuple(map(dict, kinds)),
    )


def _parsed(document: Any) -> tuple[float, tuple[tuple[str, tuple[int, ...]], ...]]:
    at_s = document.get("at_s") if isinstance(document, dict) else None
    if isinstance(at_s, bool) or not isinstance(at_s, int | float) or not math.isfinite(at_s):
        raise RecordError('expected an object with the seconds "at_s"')
    shapes = document.get("shapes", {})
    if not isinstance(shapes, dict) or not all(map(_is_shape, shapes.values())):
        raise RecordError('expected "shapes" to be lists of sizes, by the names of inputs')
    return float(at_s), tuple(sorted((name, tuple(shape)) for name, shape in shapes.items()))


def _is_shape(shape: object) -> bool:
    return isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
