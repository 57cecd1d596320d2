"""What becomes of a failed batch's requests: which of them run again together, and when to give up.

Lives here: whose fault a failure may be, and the groups. Must not: run anything.

Where some request may be at fault, halves run again: one bad row among n costs 2·log2(n) further executions; a budget
of twice that finds two, and what isn't told apart by then fails together. Where the batch was too large for the
memory, no request is at fault and nobody has to fail: all of them run again, in batches as small as it takes, since
whatever failed once is only tried with fewer rows. What fails for good is a request that is too large alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Generic, TypeVar

from scheduler.lane import Entry

__all__ = ["Blame", "Suspects", "budget_for"]

T = TypeVar("T")


class Blame(Enum):
    """Whose fault a failed execution may be."""

    REQUESTS = auto()
    """Some of them: without these the others may succeed."""
    SIZE = auto()
    """Nobody's: there wasn't memory enough for so many rows."""
    INSTANCE = auto()
    """The instance's: nothing will succeed on it any more."""
    NOBODY = auto()
    """None of these; nothing is to be gained by running anything again."""


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

    def again(self, blame: Blame, rows: int, allowed_rows: int) -> list[Suspects[T]]:
        """The groups to run again after they failed together, as `rows` rows, now that so many are allowed; none if
        they fail for good. A group that is larger than that runs in parts."""
        if blame is Blame.REQUESTS:
            return self.halves()
        smaller = blame is Blame.SIZE and len(self.entries) > 1 and allowed_rows < rows
        return [self] if smaller else []

    def halves(self) -> list[Suspects[T]]:
        """Two groups to run again; none if there is one request left, or no budget for both."""
        if len(self.entries) < 2 or self.budget.left < 2:
            return []
        self.budget.left -= 2
        middle = len(self.entries) // 2
        return [Suspects(self.key, half, self.budget) for half in (self.entries[:middle], self.entries[middle:])]
