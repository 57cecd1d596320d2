"""Which waiting requests of different sizes share a batch.

Requests of a batch are filled up to a common size, so each one shorter than the longest costs more than alone. In
return, a batch saves what executions cost whatever is in them. Both are measured: a batch is worth as many elements
(rows times sizes) as could be computed in the time that one more execution costs, see `latency`.

Lives here: splitting waiting requests into batches so that all of them together cost least, and which of these batches
goes first. Must not: know times, deadlines or priorities; requests come in the order of service.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple

from paceline.scheduler.request import RequestT

Sizes = tuple[int, ...]

_MAX_SIZES = 128
"""How many common sizes are looked at; requests of others share a later batch. These take 10 ms; 2,000 took 1.6 s."""


class Bounds(NamedTuple):
    """The most rows, requests and elements of a batch. A request that has more is a batch of its own."""

    rows: int
    requests: int
    elements: int


@dataclass(slots=True, eq=False)
class _SameSizes(Generic[RequestT]):
    """Requests of equal common sizes, with `rows` rows together."""

    sizes: Sizes
    requests: list[RequestT] = field(default_factory=list)
    rows: int = 0


def common_sizes(lengths: Sequence[Callable[[int], int]], requests: Iterable[RequestT]) -> Sizes:
    """The sizes that `requests` are filled up to if they share a batch, one for each of `lengths`."""
    longest = map(max, zip(*[request.sizes for request in requests], strict=True))
    return tuple([padded(size) for padded, size in zip(lengths, longest, strict=True)])


def sharing(
    waiting: Sequence[RequestT], lengths: Sequence[Callable[[int], int]], most: Bounds, worth: float
) -> list[RequestT]:
    """The requests that the first one of `waiting` shares its batch with, itself included, in their order; a batch is
    `worth` elements.

    Linear in the requests, and in their different sizes, of which there is a limit, quadratic at worst.
    """
    groups: dict[Sizes, _SameSizes[RequestT]] = {}
    for request in waiting:
        sizes = tuple([padded(size) for padded, size in zip(lengths, request.sizes, strict=True)])
        if (group := groups.get(sizes)) is None:
            if len(groups) == _MAX_SIZES:
                continue
            group = groups[sizes] = _SameSizes(sizes)
        group.requests.append(request)
        group.rows += request.rows
    first = next(iter(groups))
    if worth > 0 and len(groups) > 1:
        near = [group for group in groups.values() if _may_share(group, groups[first], worth)]
        ordered = sorted(near, key=lambda group: (math.prod(group.sizes), group.sizes))
        begin, end = _cheapest(ordered, most, worth, ordered.index(groups[first]))
        chosen = {id(request) for group in ordered[begin:end] for request in group.requests}
        candidates: Sequence[RequestT] = [request for request in waiting if id(request) in chosen]
    else:
        candidates = groups[first].requests
    return _fitting(candidates, lengths, most)


def _may_share(one: _SameSizes[RequestT], two: _SameSizes[RequestT], worth: float) -> bool:
    """Whether a batch of both may be one of the cheapest. Not if a batch of its own costs either of them less than to
    be filled up to the other. Of a single length this is left to `_cheapest`, which sees what else waits."""
    if len(one.sizes) == 1:
        return True
    size = math.prod(map(max, one.sizes, two.sizes))
    return all(group.rows * (size - math.prod(group.sizes)) <= worth for group in (one, two))


def _cheapest(groups: Sequence[_SameSizes[RequestT]], most: Bounds, worth: float, place: int) -> tuple[int, int]:
    """The begin and end of the groups that share batches with the one at `place`, if all `groups`, in ascending order,
    are split so that they cost least."""
    # best[n]: the least cost, in elements, of the first n groups, the last batches of which begin with group
    # begins[n]. Batches of neighbours suffice: to exchange two requests so that a batch gets closer sizes never adds
    # padding. (Of several lengths, neighbours are only likely to be close.)
    best, begins = [0.0], [0]
    own = [math.prod(group.sizes) for group in groups]
    several = len(groups[0].sizes) > 1
    for last, longest in enumerate(groups):
        sizes, size = longest.sizes, own[last]
        rows = requests = real = 0
        limit = max(1, min(most.rows, most.elements // max(1, size)))
        least, begin_of_least, may_save = math.inf, last, 0.0
        for begin in range(last, -1, -1):
            group = groups[begin]
            if several:
                sizes = tuple(map(max, sizes, group.sizes))
                size = math.prod(sizes)
                limit = max(1, min(most.rows, most.elements // max(1, size)))
            rows += group.rows
            requests += len(group.requests)
            real += group.rows * own[begin]
            cost = best[begin] + worth + rows * size
            if rows > limit or requests > most.requests:
                cost += worth * (max(-(-rows // limit), -(-requests // most.requests)) - 1)
            if cost < least:
                least, begin_of_least = cost, begin
            may_save += worth
            if rows * size - real > may_save:
                break  # more groups add more padding than the batches that they save are worth
        best.append(least)
        begins.append(begin_of_least)
    end = len(groups)
    while begins[end] > place:
        end = begins[end]
    return begins[end], end


def _fitting(requests: Sequence[RequestT], lengths: Sequence[Callable[[int], int]], most: Bounds) -> list[RequestT]:
    """As many of `requests`, in their order, as fit into a batch, at least the first. One that doesn't is skipped."""
    fitting, sizes, rows = [requests[0]], requests[0].sizes, requests[0].rows
    for request in requests[1:]:
        if len(fitting) >= most.requests or rows >= most.rows:
            break
        longest = tuple(map(max, sizes, request.sizes))
        common = math.prod([padded(size) for padded, size in zip(lengths, longest, strict=True)])
        if rows + request.rows <= most.rows and (rows + request.rows) * common <= most.elements:
            fitting.append(request)
            sizes, rows = longest, rows + request.rows
    return fitting
