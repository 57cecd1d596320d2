"""When the executing instances will finish, and what they execute next.

Lives here: from when on an instance counts as about to finish, and bookkeeping. Must not: choose batches, or call a
runner. An instance that gets its next batch only after reporting that it is done waits a millisecond or two for the
event loop and the interpreter lock: for many batches, as much as a tenth of their time. So it gets the batch shortly
before. Not earlier: as long as nothing is chosen, later, cancelled and urgent requests all fare better.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

from paceline.scheduler.executing import Batch
from paceline.scheduler.request import RequestT

__all__ = ["Ahead"]

RunnerT = TypeVar("RunnerT")

_LEAD_NS = 2_000_000
_LEAD_SHARE = 4
"""An instance counts as about to be done for the last 2 ms of an execution, but no longer than for a quarter of it."""
_WORTH_NS = 1_000_000
"""The end of shorter executions can't be predicted exactly enough."""


class _End(NamedTuple):
    """An execution is likely to end at `at_ns`. From `due_ns` on, the instance is about to be done. If it still
    executes at `over_ns`, which is as long after the end as `due_ns` is before, the prediction was wrong."""

    due_ns: int
    at_ns: int
    over_ns: int


class Ahead(Generic[RunnerT, RequestT]):
    """`next` is the batch that each instance, by its runner, goes on with."""

    def __init__(self) -> None:
        self.next: dict[RunnerT, Batch[RequestT]] = {}
        self._ends: dict[RunnerT, _End] = {}

    def __bool__(self) -> bool:
        """Whether the end of any execution can be predicted."""
        return bool(self._ends)

    # hot path
    def begin(self, runner: RunnerT, now_ns: int, expected_ns: int) -> None:
        """The runner begins an execution that is expected to take `expected_ns` (0: unknown)."""
        if expected_ns >= _WORTH_NS:
            lead_ns, at_ns = min(_LEAD_NS, expected_ns // _LEAD_SHARE), now_ns + expected_ns
            self._ends[runner] = _End(at_ns - lead_ns, at_ns, at_ns + lead_ns)

    # hot path
    def end(self, runner: RunnerT) -> Batch[RequestT] | None:
        """The runner's execution is over. Returns the batch that it goes on with, if any."""
        self._ends.pop(runner, None)
        return self.next.pop(runner, None)

    def hand_no_more(self, runner: RunnerT) -> None:
        """After its execution the runner goes on with nothing, unless it has got its next batch already."""
        if runner not in self.next:
            self._ends.pop(runner, None)

    def ends_ns(self, runner: RunnerT) -> int:
        """When the runner, one of `about_to_end`, is likely to end its execution."""
        return self._ends[runner].at_ns

    def about_to_end(self, now_ns: int) -> list[RunnerT]:
        """The runners that may get their next batch, and haven't got it; the next to end first."""
        due = [runner for runner, end in self._ends.items() if end.due_ns <= now_ns < end.over_ns]
        return sorted((runner for runner in due if runner not in self.next), key=self.ends_ns)

    def overdue(self, now_ns: int) -> list[RunnerT]:
        """The runners that have got their next batch, and should have begun it by now."""
        return [runner for runner in self.next if self._ends[runner].over_ns <= now_ns]

    def wake_ns(self, now_ns: int, *, requests: int) -> int | None:
        """When the next runner will be overdue or, if there are `requests` for it, about to end; None if none will."""
        moments = [self._ends[runner].over_ns for runner in self.next]
        if requests:
            moments += [end.due_ns for runner, end in self._ends.items() if runner not in self.next]
        return min((moment for moment in moments if moment > now_ns), default=None)
