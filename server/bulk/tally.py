"""How far a job is and how fast: what its parts count, what follows from that at a time, and when rows at fault end it.

Lives here: the counts, and pure arithmetic. Must not: clocks, output (foreground.py, report.py), or finding such rows.
The rule: what earlier starts have finished is progress, but never speed.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from paceline.server.bulk.settings import BulkSettings
from paceline.server.bulk.values import BadRow, BulkError, Source, Unit

__all__ = ["Figures", "Judge", "Pace", "Reasons", "Tally"]

_WINDOW_NS = 30_000_000_000
_MOST_REASONS = 1_000
_NUMBER = re.compile(r"\d+")


class Reasons:
    """Why rows are at fault, and how many of them for each reason. Reasons that differ in numbers alone are one, told
    by its first. Of more than a thousand, the later ones are only counted, together."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[str, int]] = {}
        self._others = 0

    def add(self, reason: str, rows: int = 1) -> None:
        key = _NUMBER.sub("0", reason)
        first, count = self._found.get(key, (reason, 0))
        if count or len(self._found) < _MOST_REASONS:
            self._found[key] = (first, count + rows)
        else:
            self._others += rows

    def update(self, other: Reasons) -> None:
        """Add all of them."""
        for reason, rows in other._found.values():
            self.add(reason, rows)
        self._others += other._others

    def commonest(self, most: int) -> list[tuple[str, int]]:
        """At most so many, with their numbers of rows, and what is left as one more of them: "other reasons"."""
        ordered = sorted(self._found.values(), key=lambda one: -one[1])
        others = self._others + sum(count for _, count in ordered[most:])
        return [*ordered[:most], *([("other reasons", others)] if others else [])]


@dataclass(slots=True)
class Tally:
    """A job's counts so far, which those who do it raise, on the event loop's thread. Those after `rows_bad_before`
    are this start's own. What is done again, because it wasn't finished, is counted once."""

    doing: str = "starting"
    """What the job does now, for people."""
    waiting: str = ""
    """Why calls are being repeated, for people, as long as they are."""
    units: int = 0
    """Those planned so far, of this shard, whoever does or did them; and `rows`: theirs."""
    rows: int = 0
    planned_share: float = 0.0
    """Which share of the input's bytes the planned units come from. 1: there are no other units."""
    units_before: int = 0
    """Those of `units` that earlier starts have finished; `rows_before` and `rows_bad_before`: theirs."""
    rows_before: int = 0
    rows_bad_before: int = 0

    units_done: int = 0
    rows_read: int = 0
    """With those at fault."""
    rows_written: int = 0
    """Of finished units."""
    rows_bad: int = 0
    """Raised by `add_bad`."""
    reasons: Reasons = field(default_factory=Reasons)

    executions: int = 0
    """Of the model, those that failed not among them."""
    rows_executed: int = 0
    """Raised as soon as an execution has ended, so that a job of few large units is seen to move."""
    elements: int = 0
    """Of inputs, as executed; and `filled_elements`: those of them that filled rows up to a common size."""
    filled_elements: int = 0

    def add(self, other: Tally) -> None:
        """What somebody else has read and computed of the job."""
        self.rows_read += other.rows_read
        self.rows_bad += other.rows_bad
        self.reasons.update(other.reasons)
        self.executions += other.executions
        self.rows_executed += other.rows_executed
        self.elements += other.elements
        self.filled_elements += other.filled_elements

    def add_bad(self, rows: Iterable[BadRow]) -> None:
        for row in rows:
            self.rows_bad += 1
            self.reasons.add(row.reason)

    @property
    def rows_computed(self) -> int:
        """Those that have their outputs or a reason why not. A row may have both, if its outputs can't be written."""
        return min(self.rows_executed + self.rows_bad, self.rows_read)

    @property
    def rows_per_batch(self) -> float | None:
        return self.rows_executed / self.executions if self.executions else None

    @property
    def padding(self) -> float | None:
        """The share of the executed elements that only filled up."""
        return self.filled_elements / self.elements if self.elements else None


@dataclass(frozen=True, slots=True)
class Figures:
    """What a tally says at a time. None: it can't be known yet."""

    elapsed_s: float
    rows_done: int
    """Rows that have their outputs or a reason why not, with those of earlier starts."""
    rows_total: int | None
    rows_are_estimated: bool
    """Whether `rows_total` is, because not all of the input has been looked at yet."""
    rows_per_s: float | None
    rows_per_batch: float | None
    padding: float | None
    left_s: float | None

    @property
    def share(self) -> float | None:
        if self.rows_total is None:
            return None
        return min(1.0, self.rows_done / self.rows_total) if self.rows_total else 1.0


class Pace:
    """How fast rows have been done lately. Look as often as you like: a look costs a microsecond."""

    def __init__(self, now_ns: int) -> None:
        self._began_ns = now_ns
        # When how many rows were done, each time that a look found more. Speed is from the first of these to now, and
        # so neither the time before the first row counts, nor is a unit that is told of as a whole a burst.
        self._seen: deque[tuple[int, int]] = deque()

    def figures(self, tally: Tally, now_ns: int) -> Figures:
        done = tally.rows_computed
        last_ns, last_rows = self._seen[-1] if self._seen else (now_ns - 1, 0)
        if done > last_rows and now_ns > last_ns:
            self._seen.append((now_ns, done))
        # At least two stay, so that a job whose rows are done in leaps further apart than the window has a speed too.
        while len(self._seen) > 2 and self._seen[1][0] <= now_ns - _WINDOW_NS:
            self._seen.popleft()
        first_ns, first_rows = self._seen[0] if self._seen else (now_ns, 0)
        rows_per_s = (done - first_rows) * 1e9 / (now_ns - first_ns) if len(self._seen) > 1 else None
        total = round(tally.rows / tally.planned_share) if tally.planned_share else None
        rows_done = tally.rows_before + done
        return Figures(
            elapsed_s=(now_ns - self._began_ns) / 1e9,
            rows_done=rows_done,
            rows_total=total,
            rows_are_estimated=tally.planned_share < 1,
            rows_per_s=rows_per_s,
            rows_per_batch=tally.rows_per_batch,
            padding=tally.padding,
            left_s=max(0, total - rows_done) / rows_per_s if rows_per_s and total is not None else None,
        )


class Judge:
    """By what `settings` allow, and what `tally` has counted so far."""

    def __init__(self, settings: BulkSettings, tally: Tally, source: Source) -> None:
        self._settings, self._tally, self._source = settings, tally, source

    def __call__(self, unit: Unit, bad: Sequence[BadRow]) -> None:
        """Raises BulkError if the job ends because of rows at fault, of which `bad` are new."""
        if not bad:
            return
        settings, tally = self._settings, self._tally
        file, row = self._source.place(unit.file, bad[0].number)
        if settings.fails_on_bad:
            raise BulkError(f"{file}, row {row}: {bad[0].reason}")
        count, read = tally.rows_bad_before + tally.rows_bad, tally.rows_before + tally.rows_read
        if settings.max_bad.is_exceeded(count, read):
            raise BulkError(
                f"more rows are at fault than the {settings.max_bad} of --max-bad; one of them, "
                f"{file}, row {row}: {bad[0].reason}"
            )

    def of_all(self, bad: int, rows: int) -> None:
        """Raises BulkError if so many are at fault of all the `rows` of the job, those of other shards included, that
        it isn't finished."""
        max_bad = self._settings.max_bad
        if max_bad.is_exceeded(bad, rows, are_all=True):
            raise BulkError(
                f"of all {rows:,} rows, {bad:,} are at fault, more than the {max_bad} of --max-bad; every part is "
                "written: start it again with a --max-bad that allows as many, or with --retry-bad"
            )
