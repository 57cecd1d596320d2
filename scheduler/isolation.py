"""What becomes of a failed batch's requests: which of them run again together, and when to give up.

Lives here: what may be at fault, and the groups. Must not: run anything.

If some request may be at fault, halves run again: one bad row among n costs 2·log2(n) further executions, and the
budget of twice that finds two. Requests not told apart by then run one by one: none fails because of others, and a
model that always fails has hardly more to do than without batching. If the batch was too large for the memory, no
request is at fault and none has to fail: all run again, in batches as small as necessary, since whatever failed once is
only tried with fewer rows. Only a request that is too large alone fails for good. If the batch ended the instance, each
request runs again by itself, on another instance: a new instance costs more than a few executions, and one batch may
end only a few.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Generic

from paceline.scheduler.allowance import Allowed
from paceline.scheduler.executing import Batch
from paceline.scheduler.policy import NEVER
from paceline.scheduler.request import RequestT
from paceline.scheduler.runner import ThreadLost
from paceline.scheduler.waiting import Waiting

__all__ = ["LONGEST_WAIT_NS", "SHORTEST_WAIT_NS", "Blame", "Retries", "Search", "Suspects", "budget_for"]

_log = logging.getLogger("paceline.scheduler")

_MAX_ENDS = 4
"""When this many instances have ended because of one batch's requests, the rest of these fail, as everything else waits
meanwhile. With two culprits, all other requests are still answered."""

SHORTEST_WAIT_NS, LONGEST_WAIT_NS = 1_000_000_000, 10_000_000_000
"""Bounds of the wait for another instance, which is as long as an execution may take: then the one that had no memory
is tried again."""


class Blame(Enum):
    """Whose fault a failed execution may be."""

    REQUESTS = auto()
    """Some of the requests: without these, the others may succeed."""
    SIZE = auto()
    """No request's: there wasn't enough memory for so many rows."""
    INSTANCE = auto()
    """The instance's: nothing will succeed on it any more."""
    INSTANCE_BEFORE = auto()
    """The instance's, before it began on the batch, which another instance may execute."""
    FATAL = auto()
    """Some of the requests ended the instance, which may be replaced: the others may succeed on another one."""
    NOBODY = auto()
    """None of these: running anything again would gain nothing."""


def budget_for(requests: int) -> int:
    """How many executions the search for culprits in a batch of `requests` requests may take before it goes on one by
    one."""
    return 4 * max(1, (requests - 1).bit_length())


@dataclass(slots=True)
class Search:
    """State that all parts of one failed batch share: `budget` is how many executions of halves may still be run,
    `most_rows` how many rows a part may have if memory wasn't enough for more (else 0), `before` what batches were
    allowed to have when that began, and `ends` how many instances have ended because of these requests."""

    budget: int
    most_rows: int = 0
    before: Allowed | None = None
    ends: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Suspects(Generic[RequestT]):
    """Requests that failed together and might not fail alone. `left` are instances that had no memory for them; until
    `until_ns` they wait for another one."""

    key: Hashable
    requests: Sequence[RequestT]
    search: Search
    left: frozenset[Hashable] = frozenset()
    until_ns: int = 0

    @classmethod
    def of_batch(cls, key: Hashable, requests: Sequence[RequestT]) -> Suspects[RequestT]:
        return cls(key, requests, Search(budget_for(len(requests))))

    def avoided(self, now_ns: int) -> Collection[Hashable]:
        """The instances on which they aren't to run at `now_ns`, if there are others."""
        return self.left if now_ns < self.until_ns else ()

    def narrowed(self, requests: Sequence[RequestT]) -> Suspects[RequestT]:
        """These suspects, narrowed to `requests`: those that still wait for an answer."""
        return replace(self, requests=requests)

    def again(self, blame: Blame, rows: int) -> list[Suspects[RequestT]]:
        """The groups to run again after these failed together, as `rows` rows; none if they fail for good. A group that
        is larger than it may be runs in parts."""
        if blame is Blame.REQUESTS:
            return self.halves()
        if blame is Blame.FATAL:
            return self.alone()
        smaller = blame is Blame.SIZE and len(self.requests) > 1 and self.search.most_rows < rows
        return [self] if smaller else []

    def halves(self) -> list[Suspects[RequestT]]:
        """Two groups to run again or, without the budget for these, one for each request; none if only one request is
        left."""
        if len(self.requests) < 2:
            return []
        if self.search.budget >= 2:
            self.search.budget -= 2
            middle = len(self.requests) // 2
            return [self.narrowed(half) for half in (self.requests[:middle], self.requests[middle:])]
        return self.alone()

    def alone(self) -> list[Suspects[RequestT]]:
        """A group for each request; none if only one is left."""
        return [self.narrowed([request]) for request in self.requests] if len(self.requests) > 1 else []


class Retries(Generic[RequestT]):
    """The `groups` that wait to run again. `blames(error)` classifies an error: who may be at fault. Unless `isolates`,
    no group runs again. Groups that wait for another instance, while others are served, are counted in `waiting`."""

    def __init__(self, blames: Callable[[BaseException], Blame], waiting: Waiting, *, isolates: bool) -> None:
        self._blames = blames
        self._waiting = waiting
        self._isolates = isolates
        self.groups: deque[Suspects[RequestT]] = deque()

    def wake_ns(self, now_ns: int) -> int | None:
        """When the first deadline of a waiting request passes, or a group stops waiting for another instance; None if
        neither will."""
        deadlines_ns = [request.deadline_ns for group in self.groups for request in group.requests]
        moments_ns = [group.until_ns for group in self.groups if group.until_ns > now_ns]
        first_ns = min([*deadlines_ns, *moments_ns, NEVER])
        return None if first_ns == NEVER else first_ns

    def requests(self, level: int | None = None) -> int:
        """How many requests wait here and aren't counted elsewhere, of priority `level` or (None) of all levels."""
        requests = [request for group in self.groups if not group.left for request in group.requests]
        return len(requests) if level is None else sum(request.level == level for request in requests)

    def blame_for(self, error: BaseException) -> Blame:
        if isinstance(error, ThreadLost):
            return Blame.INSTANCE_BEFORE
        try:
            return self._blames(error)
        except Exception:  # noqa: BLE001 - the requests must get an answer
            _log.exception("can't tell which requests made a batch fail, so all of it fails")
            return Blame.NOBODY

    def plan(self, batch: Batch[RequestT], blame: Blame, suspects: Suspects[RequestT]) -> Sequence[RequestT]:
        """Have those of `suspects`, the requests of a failed batch, that may succeed wait here. Returns the requests
        that fail for good."""
        if not self._isolates:
            return batch.requests
        if blame is Blame.FATAL:
            suspects.search.ends += 1
            if suspects.search.ends >= _MAX_ENDS:
                return [*batch.requests, *self._take_others(suspects)]
        # Fewer of them may well run on an instance that had no memory for all.
        groups = replace(suspects, left=frozenset()).again(blame, batch.padded_rows)
        for group in groups:
            self.wait(group)
        return () if groups else batch.requests

    def plan_elsewhere(
        self, batch: Batch[RequestT], suspects: Suspects[RequestT], instance: Hashable, now_ns: int, longest_ns: int
    ) -> Sequence[RequestT]:
        """Like `plan`, if the batch's `instance` is at fault, and rests. Another one is free once it is done with what
        it executes, for which `longest_ns` are enough."""
        if not self._isolates:
            return batch.requests
        until_ns = now_ns + min(max(longest_ns, SHORTEST_WAIT_NS), LONGEST_WAIT_NS)
        self.wait(replace(suspects, left=suspects.left | {instance}, until_ns=until_ns))
        return ()

    def wait(self, group: Suspects[RequestT], *, first: bool = False) -> None:
        """Add `group` at the end or, if `first`, at the front; an empty one isn't added."""
        if not group.requests:
            return
        (self.groups.appendleft if first else self.groups.append)(group)
        self._count(group, 1)

    def take(self, group: Suspects[RequestT]) -> None:
        """Remove `group`: it waits no more."""
        self.groups.remove(group)
        self._count(group, -1)

    def take_all(self) -> Sequence[RequestT]:
        """Remove all groups. Returns their requests."""
        groups = [*self.groups]
        for group in groups:
            self.take(group)
        return [request for group in groups for request in group.requests]

    def _take_others(self, suspects: Suspects[RequestT]) -> Sequence[RequestT]:
        """Remove the other groups of the same batch. Returns their requests."""
        others = [group for group in self.groups if group.search is suspects.search]
        for group in others:
            self.take(group)
        return [request for group in others for request in group.requests]

    def _count(self, group: Suspects[RequestT], sign: int) -> None:
        for request in group.requests if group.left else ():
            self._waiting.reserve(request, sign)
