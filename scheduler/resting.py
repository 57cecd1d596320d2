"""Instances that get nothing for a while, as they had no memory for a request alone.

Lives here: which those are, and for how long. Must not: free runners, or what becomes of the request. An instance that
fails is the first to be free again: it would draw all requests, and refuse them, while others do their work. It rests
for a moment, as it may be that request which is too large, and longer each time unless it has executed something
meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = ["LONGEST_REST_NS", "SHORTEST_REST_NS", "Rest", "Resting"]

RunnerT = TypeVar("RunnerT")

SHORTEST_REST_NS, LONGEST_REST_NS = 10_000_000, 1_000_000_000


@dataclass(frozen=True, slots=True, eq=False)
class Rest(Generic[RunnerT]):
    """`runners`, of one instance, rest until then."""

    runners: Sequence[RunnerT]
    until_ns: int


class Resting(Generic[RunnerT]):
    """Those of one batcher."""

    def __init__(self) -> None:
        self._rests: dict[RunnerT, Rest[RunnerT]] = {}
        self._pauses_ns: dict[RunnerT, int] = {}

    def __bool__(self) -> bool:
        """Whether any rests, or has since when nothing was executed on it."""
        return bool(self._rests or self._pauses_ns)

    def __contains__(self, runner: RunnerT) -> bool:
        return runner in self._rests

    def begin(self, runners: Sequence[RunnerT], now_ns: int) -> None:
        """These, none of which rests, do so from now on."""
        pause_ns = max(SHORTEST_REST_NS, *(2 * self._pauses_ns.get(one, 0) for one in runners))
        rest = Rest(runners, now_ns + min(pause_ns, LONGEST_REST_NS))
        for one in runners:
            self._rests[one] = rest
            self._pauses_ns[one] = min(pause_ns, LONGEST_REST_NS)

    def executed(self, runner: RunnerT) -> None:
        """It has memory after all: the next time it rests is the first again."""
        self._pauses_ns.pop(runner, None)

    def forget(self, runner: RunnerT) -> bool:
        """It is gone. Whether it rested."""
        self._pauses_ns.pop(runner, None)
        return self._rests.pop(runner, None) is not None

    def due(self, now_ns: int) -> Sequence[Rest[RunnerT]]:
        """Those that have rested long enough."""
        return [rest for rest in {*self._rests.values()} if rest.until_ns <= now_ns]

    def end(self, rest: Rest[RunnerT]) -> Sequence[RunnerT]:
        """It is over. Returns who rested, but for those that are gone."""
        return [one for one in rest.runners if self._rests.pop(one, None) is not None]

    def wake_ns(self, now_ns: int) -> int | None:
        """When the next one is due."""
        return min((one.until_ns for one in self._rests.values() if one.until_ns > now_ns), default=None)
