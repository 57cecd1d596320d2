"""How many rows a batch may have while memory is short.

Lives here: one number, halved when an execution runs out of memory and doubled again as time passes without a shortage.
Must not: batches, or a clock. If memory runs out again right after the number grew, the next attempt waits twice as
long, so that a `max_batch_rows` which never fits costs one execution every ten minutes, while a neighbour on the device
that was large for a moment costs ten seconds of smaller batches. If one request alone turns out to need too much, the
shortage is forgiven: it says nothing about other requests, whose batches would become small because of it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from paceline.scheduler.policy import NEVER

__all__ = ["LONGEST_PAUSE_NS", "PAUSE_NS", "Allowance", "Allowed"]

PAUSE_NS = 10_000_000_000
"""How long memory has to suffice until twice as many rows are tried."""
LONGEST_PAUSE_NS = 600_000_000_000


class Allowed(NamedTuple):
    """The state of an `Allowance` at some moment."""

    rows: int
    pause_ns: int
    grew: bool
    due_ns: int


class Allowance:
    """`rows` is how many rows a batch may have: `most`, or fewer for a while. `sizes` are the only sizes there are
    (empty: any)."""

    __slots__ = ("_grew", "_most", "_pause_ns", "_sizes", "due_ns", "rows")

    def __init__(self, most: int, sizes: Sequence[int] = ()) -> None:
        self._most = most
        self._sizes = sizes
        self._pause_ns = PAUSE_NS
        self._grew = False
        self.rows = most
        self.due_ns = NEVER

    def exhausted(self, rows: int, now_ns: int) -> Allowed:
        """Learn that memory wasn't enough for `rows` rows. An execution that ran at the same time and failed likewise
        is the same shortage: it doesn't halve anything twice. Returns the state from before."""
        self.grow(now_ns)
        before = Allowed(self.rows, self._pause_ns, self._grew, self.due_ns)
        if self._grew:
            self._pause_ns = min(2 * self._pause_ns, LONGEST_PAUSE_NS)
            self._grew = False
        self.rows = min(self.rows, self._allowed(max(1, rows // 2)))
        self.due_ns = now_ns + self._pause_ns
        return before

    def forgive(self, before: Allowed) -> None:
        """Learn that the shortage was none: return to `before`, unless more is allowed by now, as when two at a time
        were none."""
        if before.rows >= self.rows:
            self.rows, self._pause_ns, self._grew, self.due_ns = before

    def grow(self, now_ns: int) -> None:
        """Double `rows` as often as that is due, and forget the shortage once the full size has been allowed for a
        whole pause."""
        while self.due_ns <= now_ns:
            self.due_ns += self._pause_ns
            if self.rows < self._most:
                self._grew = True
                self.rows = self._allowed(max(2 * self.rows, self._next_size()))
            else:
                self._grew = False
                self._pause_ns, self.due_ns = PAUSE_NS, NEVER

    def _allowed(self, rows: int) -> int:
        """The largest size that isn't above `rows`, or the smallest."""
        rows = min(rows, self._most)
        return self._sizes[max(0, bisect_right(self._sizes, rows) - 1)] if self._sizes else rows

    def _next_size(self) -> int:
        """The least to grow to, where sizes are further apart than by a factor of two; 0 if there is no larger one."""
        place = bisect_right(self._sizes, self.rows)
        return self._sizes[place] if place < len(self._sizes) else 0
