"""How long requests wait in a queue that wastes nothing: what a bound on latencies can tell about a server.

Lives here: that simulation. Must not: the product's queue, which has reasons to decide otherwise. Everything is pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from bench.stats import percentile

__all__ = ["ideal_p99"]

_REQUESTS = 100_000


def ideal_p99(rows: int, sizes: Sequence[int], load: float, fixed: float, seed: int = 1) -> float:
    """The 99th percentile of the time from a request's arrival to its answer, in times of a full batch.

    Requests of `rows` rows arrive at random (Poisson), so many that full batches, one after the other, would take
    `load` of the time. A batch starts as soon as the last one has ended, with all that waits, in order, up to the
    largest of `sizes`, which ascend and are multiples of `rows`; it is padded to one of them. A full one takes 1,
    others take `fixed` of that, and the rest in proportion to their size. Takes 0.2 s.
    """
    random, largest = Random(seed), sizes[-1]
    costs = {size: fixed + (1 - fixed) * size / largest for size in sizes}
    per_batch, now, arrivals, times, free_at = largest // rows, 0.0, [], [], 0.0
    for _ in range(_REQUESTS):
        now += random.expovariate(load * largest / rows)
        arrivals.append(now)
    first = 0
    while first < len(arrivals):
        start, end = max(free_at, arrivals[first]), first + 1
        while end < min(first + per_batch, len(arrivals)) and arrivals[end] <= start:
            end += 1
        free_at = start + costs[next(size for size in sizes if size >= rows * (end - first))]
        times += [free_at - arrival for arrival in arrivals[first:end]]
        first = end
    return percentile(sorted(times), 99)
