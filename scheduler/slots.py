"""Which runners are free, where several may share what computes.

Lives here: counting. Must not: batches. Runners of one group are the *slots* of one instance. They execute side by
side, but only one at a time computes; what another is given meanwhile is only prepared. So the first batch of an
instance computes at once, and a further one is prepared before it can.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable
from typing import Generic, TypeVar

__all__ = ["Slots"]

R = TypeVar("R")


class Slots(Generic[R]):
    """Free runners. `group_of(runner)` is the instance that a runner is, or is a slot of. `free` is how many are free,
    over all instances."""

    def __init__(self, group_of: Callable[[R], Hashable]) -> None:
        self._group_of = group_of
        self._free: dict[Hashable, list[R]] = {}
        self._taken: dict[Hashable, int] = {}
        # Groups that have free runners: those of which none executes, most recent last, and the others, in the order in
        # which they will be done.
        self._idle: dict[Hashable, None] = {}
        self._busy: dict[Hashable, None] = {}
        self.free = 0

    @property
    def idle(self) -> int:
        """How many instances execute nothing."""
        return len(self._idle)

    @property
    def spare(self) -> int:
        """Free runners besides one for each idle instance: batches that could be prepared before it is their turn."""
        return self.free - len(self._idle)

    def add(self, runner: R) -> None:
        """Add `runner`, which is free."""
        group = self._group_of(runner)
        self._free.setdefault(group, []).append(runner)
        self.free += 1
        self._file(group)

    # hot path: 1 us with `take`
    def back(self, runner: R) -> None:
        """Return `runner`, which `take` gave: it is free again."""
        self._end(self._group_of(runner))
        self.add(runner)

    # hot path
    def take(self) -> R:
        """A runner of the instance that became idle last, as its caches are warm; else one of a busy instance. There
        has to be one."""
        return self._take(self._idle.popitem()[0] if self._idle else next(iter(self._busy)))

    def take_excluding(self, groups: Collection[Hashable]) -> R:
        """Like `take`, but of no instance among `groups`. There has to be one: `has_excluding`."""
        group = next(one for one in (*reversed(self._idle), *self._busy) if one not in groups)
        self._idle.pop(group, None)
        return self._take(group)

    def has_excluding(self, groups: Collection[Hashable]) -> bool:
        """Whether a runner of an instance not among `groups` is free."""
        return any(group not in groups for group in self._free)

    # hot path
    def _take(self, group: Hashable) -> R:
        free = self._free[group]
        runner = free.pop()
        self.free -= 1
        self._taken[group] = self._taken.get(group, 0) + 1
        if free:
            self._busy[group] = None
        else:
            del self._free[group]
            self._busy.pop(group, None)
        return runner

    def put_last(self, runner: R) -> None:
        """If `runner` is free, have all others taken before it, and their instances before its own."""
        group = self._group_of(runner)
        free = self._free.get(group, [])
        if runner in free:
            free.remove(runner)
            free.insert(0, runner)
        if group in self._idle:
            self._idle = {group: None, **self._idle}

    def remove(self, runner: R) -> None:
        """Remove `runner`, free or not: it gets nothing more."""
        group = self._group_of(runner)
        free = self._free.get(group, [])
        if runner not in free:
            self._end(group)
        else:
            free.remove(runner)
            self.free -= 1
        if not free:
            self._free.pop(group, None)
            self._idle.pop(group, None)
            self._busy.pop(group, None)
        else:
            self._file(group)

    def _end(self, group: Hashable) -> None:
        taken = self._taken.pop(group) - 1
        if taken:
            self._taken[group] = taken

    def _file(self, group: Hashable) -> None:
        if group in self._taken:
            self._idle.pop(group, None)
            self._busy.setdefault(group)
        else:
            self._busy.pop(group, None)
            self._idle[group] = None
