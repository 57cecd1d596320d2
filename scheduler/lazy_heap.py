"""A heap whose items may die inside it.

Removing from the middle of a binary heap is linear, so dead items stay until they surface or outnumber the living.

Lives here: the heap and its cleaning. Must not: know what items are. The rule: once `alive(item, token)` is false, it
stays false. Live items have unique tokens; dead ones need none, if items can be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

__all__ = ["LazyHeap"]

T = TypeVar("T")
_SLACK = 64


class LazyHeap(Generic[T]):
    """Items by ascending `(rank, token)`.

    push and pop are O(log n) amortised; the sweep at doubled size keeps the dead from outnumbering the living. `items`
    lets others see whether there are any at all, dead ones included.
    """

    __slots__ = ("_alive", "_limit", "items")

    def __init__(self, alive: Callable[[T, int], bool]) -> None:
        self._alive = alive
        self.items: list[tuple[int, int, T]] = []
        self._limit = _SLACK

    def push(self, rank: int, token: int, item: T) -> None:
        items = self.items
        heappush(items, (rank, token, item))
        if len(items) > self._limit:
            self._sweep()

    def first_rank(self) -> int | None:
        """The lowest rank of a live item; None when there is none."""
        items = self.items
        while items:
            rank, token, item = items[0]
            if self._alive(item, token):
                return rank
            heappop(items)
        return None

    def pop(self) -> T:
        """Remove and return the item whose rank `first_rank` has just returned."""
        return heappop(self.items)[2]

    def pop_living(self) -> T | None:
        """Remove and return the live item of the lowest rank; None when there is none."""
        items = self.items
        while items:
            _, token, item = heappop(items)
            if self._alive(item, token):
                return item
        return None

    def _sweep(self) -> None:
        self.items = [one for one in self.items if self._alive(one[2], one[1])]
        heapify(self.items)
        self._limit = 2 * len(self.items) + _SLACK
