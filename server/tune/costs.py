"""What is spent besides executions, by how many requests share a batch.

Lives here: what was met where batches were small, and where they were large, and what that says of those between. Must
not: measure. Where batches are small, whoever waits is woken more often: by answers, by ends of executions, and by
threads that want the interpreter's lock. So a request costs more by a factor of two to three.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Costs", "alike", "costs_at", "joined"]

_ALIKE = 1.25
"""What was met with numbers of requests that are closer than this differs by chance."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Where batches have so many `requests`: processor time for a request, half before and half after its execution,
    `loop_ns` of the server's event loop, and `sender_ns` of the one process that sends all, on the same machine. While
    the event loop computes for a while, it waits `waits` times as long on average, at random: for a processor, or for
    the interpreter's lock. Executions take `slowdown` times as long as on their own."""

    loop_ns: float = 0.0
    sender_ns: float = 0.0
    waits: float = 0.0
    slowdown: float = 1.0
    requests: float = 1.0

    @property
    def held_ns(self) -> float:
        """How long a request keeps the event loop, on average."""
        return self.loop_ns * (1 + self.waits)


def alike(one: Costs, other: Costs) -> bool:
    """Whether batches had about as many requests."""
    return max(one.requests, other.requests) < _ALIKE * min(one.requests, other.requests)


def joined(found: Sequence[Costs]) -> Sequence[Costs]:
    """What was met, by ascending numbers of requests; one of what was met with about the same number."""
    groups = list[list[Costs]]()
    for one in sorted(found, key=lambda one: one.requests):
        if groups and alike(one, groups[-1][0]):
            groups[-1].append(one)
        else:
            groups.append([one])
    return [_mixed([(1 / len(group), one) for one in group]) for group in groups]


def costs_at(known: Sequence[Costs], requests: float) -> Costs:
    """With batches of so many requests: between two numbers that are known, in proportion to the logarithm; beyond
    them, as at the next one."""
    place = next((place for place, one in enumerate(known) if one.requests >= requests), len(known))
    if place in (0, len(known)):
        return known[min(place, len(known) - 1)]
    below, above = known[place - 1], known[place]
    part = math.log(requests / below.requests) / math.log(above.requests / below.requests)
    return _mixed([(1 - part, below), (part, above)])


def _mixed(parts: Sequence[tuple[float, Costs]]) -> Costs:
    return Costs(
        *(
            sum(part * float(getattr(one, name)) for part, one in parts)
            for name in ("loop_ns", "sender_ns", "waits", "slowdown", "requests")
        )
    )
