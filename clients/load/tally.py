"""What happened in slices of time, each as long as any other, counted from when the load began.

Lives here: pure counting. Must not: clocks; callers pass the time. The rule that keeps figures honest: a request, and
so its latency or its error, belongs to the slice in which it was due, whenever it ends; a slice is told only when all
requests that were due in it have ended. An answer counts for the throughput of the slice in which it came.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from paceline.clients.load.histogram import Histogram


@dataclass(slots=True)
class Reply:
    """What came for one request. Over a stream there may be many answers: when the first came, and how long it took
    from one to the next, each by token; of models without tokens, by answer."""

    answers: int = 1
    tokens: int = 0
    first_ns: int = 0
    gaps_ns: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True, eq=False)
class Counts:
    """What happened in a slice, or in several.

    `errors` are the durations of requests that failed, by status, and `reasons` what was said of one of each. `lags` is
    how late requests were sent, and `cpu_ns` what the processes that sent them used. `first` and `gaps` are of requests
    over streams.
    """

    due: int
    answered: int
    latencies: Histogram
    errors: dict[str, Histogram]
    reasons: dict[str, str]
    lags: Histogram
    cpu_ns: int
    answers: int
    tokens: int
    first: Histogram
    gaps: Histogram

    @property
    def failed(self) -> int:
        return sum(one.count for one in self.errors.values())


def merged(counts: Iterable[Counts]) -> Counts:
    """The sum of several; of none, zeros."""
    given = list(counts)
    statuses = sorted({status for one in given for status in one.errors})
    return Counts(
        due=sum(one.due for one in given),
        answered=sum(one.answered for one in given),
        latencies=Histogram.merged(one.latencies for one in given),
        errors={
            status: Histogram.merged(one.errors[status] for one in given if status in one.errors) for status in statuses
        },
        reasons={status: reason for one in reversed(given) for status, reason in one.reasons.items()},
        lags=Histogram.merged(one.lags for one in given),
        cpu_ns=sum(one.cpu_ns for one in given),
        answers=sum(one.answers for one in given),
        tokens=sum(one.tokens for one in given),
        first=Histogram.merged(one.first for one in given),
        gaps=Histogram.merged(one.gaps for one in given),
    )


def _durations() -> array[int]:
    return array("q")


@dataclass(slots=True)
class _Open:
    """A slice whose requests haven't all ended."""

    pending: int = 0
    due: int = 0
    answered: int = 0
    cpu_ns: int = 0
    answers: int = 0
    tokens: int = 0
    latencies_ns: array[int] = field(default_factory=_durations)
    lags_ns: array[int] = field(default_factory=_durations)
    first_ns: array[int] = field(default_factory=_durations)
    gaps_ns: array[int] = field(default_factory=_durations)
    errors_ns: dict[str, array[int]] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def counts(self) -> Counts:
        errors = {status: Histogram.of(durations) for status, durations in self.errors_ns.items()}
        latencies, lags, first, gaps = map(Histogram.of, (self.latencies_ns, self.lags_ns, self.first_ns, self.gaps_ns))
        return Counts(
            due=self.due,
            answered=self.answered,
            latencies=latencies,
            errors=errors,
            reasons=self.reasons,
            lags=lags,
            cpu_ns=self.cpu_ns,
            answers=self.answers,
            tokens=self.tokens,
            first=first,
            gaps=gaps,
        )


class Slices:
    """The slices of one process. Times are nanoseconds of a monotonic clock."""

    def __init__(self, begin_ns: int, slice_ns: int) -> None:
        self._begin_ns = begin_ns
        self._slice_ns = slice_ns
        self._open: dict[int, _Open] = {}
        self._next = 0

    def begin(self, due_ns: int) -> Any:
        """A request is due. Returns what the other methods take until it ends."""
        # hot path: with `succeed`, 1 us of the 100 and more that a call takes
        one = self._at(due_ns)
        one.pending += 1
        one.due += 1
        return one

    def sent(self, one: Any, lag_ns: int) -> None:
        """It was sent `lag_ns` after it was due."""
        one.lags_ns.append(lag_ns)

    def succeed(self, one: Any, due_ns: int, now_ns: int, reply: Reply | None) -> None:
        one.pending -= 1
        one.latencies_ns.append(now_ns - due_ns)
        self._at(now_ns).answered += 1
        if reply is not None:
            one.answers += reply.answers
            one.tokens += reply.tokens
            one.first_ns.append(reply.first_ns - due_ns)
            one.gaps_ns.extend(reply.gaps_ns)

    def fail(self, one: Any, due_ns: int, now_ns: int, status: str, reason: str) -> None:
        one.pending -= 1
        one.reasons.setdefault(status, reason)
        one.errors_ns.setdefault(status, _durations()).append(now_ns - due_ns)

    def use(self, cpu_ns: int, now_ns: int) -> None:
        """The process has used so much processor time, which counts for the slice of that time."""
        self._at(now_ns).cpu_ns += cpu_ns

    def settled(self, until_ns: int) -> Iterator[tuple[int, Counts]]:
        """The slices, by number, that ended before `until_ns`, before which no more requests are due, and all of whose
        requests have ended; each once, in order."""
        while self._begin_ns + (self._next + 1) * self._slice_ns <= until_ns:
            one = self._open.get(self._next, _Open())
            if one.pending:
                return
            self._open.pop(self._next, None)
            self._next += 1
            yield self._next - 1, one.counts()

    def rest(self) -> Iterator[tuple[int, Counts]]:
        """Those that haven't been told: nothing more is sent, and all requests have ended."""
        for number in range(self._next, max(self._open, default=-1) + 1):
            yield number, self._open.get(number, _Open()).counts()

    def _at(self, at_ns: int) -> _Open:
        # What comes before the beginning, or for a slice that was told, counts for the first that wasn't.
        number = max(self._next, (at_ns - self._begin_ns) // self._slice_ns)
        one = self._open.get(number)
        if one is None:
            one = self._open[number] = _Open()
        return one


def blocks(counts: Sequence[Counts], most: int) -> list[tuple[int, Counts]]:
    """The same in at most `most` blocks of neighbours, each with how many it has; the last may have fewer."""
    each = max(1, -(-len(counts) // most))
    parts = (counts[first : first + each] for first in range(0, len(counts), each))
    return [(len(part), merged(part)) for part in parts]
