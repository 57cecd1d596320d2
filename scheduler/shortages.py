"""Which instances are short of memory that others have, and rest.

Lives here: whether the instance or the request is at fault when memory runs out, and how long a rest is. Must not:
runners, or what becomes of requests. An instance that fails is the first to be free again, so it would attract requests
and refuse them while others do their work. It is at fault if others have recently executed the same shape key. That may
be wrong, as memory can depend on a tensor's contents; so the first rest is short, and an instance that served as such
evidence no longer does once it, too, has no memory for such a request.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

__all__ = ["LONGEST_REST_NS", "SHORTEST_REST_NS", "Shortages"]

InstanceT = TypeVar("InstanceT", bound=Hashable)

SHORTEST_REST_NS, LONGEST_REST_NS = 10_000_000, 10_000_000_000
"""A rest is twice as long as the one before, up to the longest. A rest that has been over for that long is
forgotten."""
_MAX_KEYS = 1024


class _Short(NamedTuple):
    """An instance had no memory for `key`, a hash, and hasn't executed a batch of it since. Its last rest takes
    `rest_ns`, until `until_ns`."""

    key: int
    rest_ns: int
    until_ns: int


class Shortages(Generic[InstanceT]):
    """Shortages of the instances of one model. Only the hashes of keys are kept: keys may be large."""

    def __init__(self) -> None:
        # By key's hash, the instances that have memory for such a request alone, as far as is known.
        self._able: dict[int, set[InstanceT]] = {}
        self._short: dict[InstanceT, _Short] = {}
        self._resting: set[InstanceT] = set()

    @property
    def resting(self) -> int:
        """How many instances rest."""
        return len(self._resting)

    def rests(self, instance: InstanceT) -> bool:
        return instance in self._resting

    @property
    def wake_ns(self) -> int | None:
        """When the next rest is over."""
        return min((self._short[one].until_ns for one in self._resting), default=None)

    # hot path
    def executed(self, instance: InstanceT, key: Hashable) -> None:
        """Learn that an instance has executed a batch of `key`."""
        hashed = hash(key)
        able = self._able.get(hashed)
        if able is None:
            able = self._able[hashed] = set()
            if len(self._able) > _MAX_KEYS:
                del self._able[next(iter(self._able))]
        able.add(instance)
        if self._short:
            short = self._short.get(instance)
            if short is not None and short.key == hashed and instance not in self._resting:
                del self._short[instance]

    def failed(self, instance: InstanceT, key: Hashable, *, alone: bool, instances: int, now_ns: int) -> bool:
        """Learn that an instance, one of `instances`, had no memory for a batch, of one request (`alone`) or of
        several. Returns whether it rests now, so that others are to execute the batch. Never more than half of all
        instances rest."""
        hashed = hash(key)
        if alone and (able := self._able.get(hashed)):
            able.discard(instance)
        if instance in self._resting:
            return True
        short = self._short.get(instance)
        if short is not None and now_ns - short.until_ns <= LONGEST_REST_NS:
            hashed, rest_ns = short.key, min(2 * short.rest_ns, LONGEST_REST_NS)
        elif alone:
            rest_ns = SHORTEST_REST_NS
        else:
            return False
        others = self._able.get(hashed, set()) - {instance}
        if not others or 2 * (self.resting + 1) > instances:
            return False
        self._short[instance] = _Short(hashed, rest_ns, now_ns + rest_ns)
        self._resting.add(instance)
        return True

    def wake(self, now_ns: int, instances: int) -> list[InstanceT]:
        """End the rests that are over, and, if more instances rest than half of `instances`, those that would end next.
        Returns whose."""
        order = sorted(self._resting, key=lambda one: self._short[one].until_ns)
        too_many = max(0, len(order) - instances // 2)
        awake = [one for place, one in enumerate(order) if place < too_many or self._short[one].until_ns <= now_ns]
        self._resting.difference_update(awake)
        return awake

    def forget(self, instance: InstanceT) -> None:
        """Forget an instance that is gone: another may get the same identity."""
        self._resting.discard(instance)
        self._short.pop(instance, None)
        for able in self._able.values():
            able.discard(instance)
