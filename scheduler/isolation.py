"""Finding the requests that make a batch fail, by running its halves again.

Lives here: which requests to run again together, and when to give up. Must not: run anything. One bad row among n costs
2·log2(n) further executions; a budget of twice that finds two, and what isn't told apart by then fails together.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from scheduler.lane import Entry

__all__ = ["Suspects", "budget_for"]

T = TypeVar("T")


def budget_for(requests: int) -> int:
    """How many executions the search for culprits in a batch of `requests` requests may take."""
    return 4 * max(1, (requests - 1).bit_length())


@dataclass(slots=True)
class Budget:
    """Executions left; shared by all parts of what was one batch."""

    left: int


@dataclass(frozen=True, slots=True)
class Suspects(Generic[T]):
    """Requests that failed together and might not alone."""

    key: Hashable
    entries: Sequence[Entry[T]]
    budget: Budget

    @classmethod
    def of_batch(cls, key: Hashable, entries: Sequence[Entry[T]]) -> Suspects[T]:
        return cls(key, entries, Budget(budget_for(len(entries))))

    def narrowed(self, entries: Sequence[Entry[T]]) -> Suspects[T]:
        """Those of them that still wait for an answer."""
        return Suspects(self.key, entries, self.budget)

    def halves(self) -> list[Suspects[T]]:
        """Two groups to run again; none if there is one request left, or no budget for both."""
        if len(self.entries) < 2 or self.budget.left < 2:
            return []
        self.budget.left -= 2
        middle = len(self.entries) // 2
        return [Suspects(self.key, half, self.budget) for half in (self.entries[:middle], self.entries[middle:])]
