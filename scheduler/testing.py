"""A manual clock, and instances that finish when told to: they make tests of the batcher deterministic.

Lives here: these stand-ins, shipped because they are needed to change a policy. Must not: threads, sleeps or real time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic

from paceline.scheduler.observer import BatchReport, Drop
from paceline.scheduler.request import P, R
from paceline.scheduler.runner import Done, NoAnswer, Outcome


class ManualClock:
    """Time that moves when told. Alarms ring inside `advance`, at their own moments, in order."""

    def __init__(self, now_ns: int = 0) -> None:
        self._now_ns = now_ns
        self._alarms: list[_ManualAlarm] = []

    def now_ns(self) -> int:
        return self._now_ns

    def busy_ns(self) -> int:
        """As if the thread were always busy."""
        return self._now_ns

    @property
    def alarms(self) -> int:
        """How many alarms haven't been closed."""
        return len(self._alarms)

    def alarm(self, ring: Callable[[], None]) -> _ManualAlarm:
        alarm = _ManualAlarm(self._alarms, ring)
        self._alarms.append(alarm)
        return alarm

    def advance(self, by_ns: int) -> None:
        """Move time forward by `by_ns`, ringing what becomes due on the way."""
        end_ns = self._now_ns + by_ns
        while due := [alarm for alarm in self._alarms if alarm.at_ns is not None and alarm.at_ns <= end_ns]:
            alarm = min(due, key=lambda alarm: alarm.at_ns or 0)
            self._now_ns = max(self._now_ns, alarm.at_ns or 0)
            alarm.at_ns = None
            alarm.ring()
        self._now_ns = end_ns

    def freeze(self, by_ns: int) -> None:
        """Move time forward by `by_ns` while nothing runs: what becomes due on the way rings at the end."""
        self._now_ns += by_ns
        self.advance(0)


class _ManualAlarm:
    def __init__(self, registry: list[_ManualAlarm], ring: Callable[[], None]) -> None:
        self._registry = registry
        self.ring = ring
        self.at_ns: int | None = None

    def set(self, at_ns: int) -> None:
        if self not in self._registry:
            raise AssertionError("a closed alarm was set")
        self.at_ns = at_ns

    def clear(self) -> None:
        self.at_ns = None

    def close(self) -> None:
        self._registry.remove(self)


@dataclass(frozen=True, slots=True)
class Results(Generic[R]):
    """The least that an instance may return, and whether anything ran."""

    results: Sequence[R | Exception | NoAnswer]
    ran: bool = True


class StepRunner(Generic[P, R]):
    """An instance without a thread: holds each batch until the test finishes it. `batches` records all it was given,
    `padded_rows` the rows of each as the model would see them, `called_off` those that it was told to end early. A
    runner that `stages` takes the next batch while it holds one, and begins it when that is finished; until then it can
    be taken back if `gives_back`."""

    def __init__(self, clock: ManualClock, *, stages: bool = False) -> None:
        self.stages, self.gives_back = stages, True
        self._clock = clock
        self._current: tuple[Sequence[P], Done[R], int] | None = None
        self._next: tuple[Sequence[P], Done[R]] | None = None
        self.batches: list[Sequence[P]] = []
        self.padded_rows: list[int] = []
        self.called_off: list[Sequence[P]] = []
        self.started = self.stopped = False

    @property
    def busy(self) -> bool:
        return self._current is not None

    @property
    def next(self) -> Sequence[P] | None:
        """The next batch, which was handed over ahead."""
        return self._next[0] if self._next is not None else None

    def start(self) -> None:
        self.started = True

    def stop(self) -> None:
        self.stopped = True

    def run(self, payloads: Sequence[P], padded_rows: int, done: Done[R]) -> None:
        if self._next is not None or (self._current is not None and not self.stages):
            raise AssertionError("a batch was handed over while another one runs")
        self.batches.append(payloads)
        self.padded_rows.append(padded_rows)
        if self._current is None:
            self._current = (payloads, done, self._clock.now_ns())
        else:
            self._next = (payloads, done)

    def take_back(self) -> bool:
        if self.gives_back:
            self._next = None
        return self.gives_back

    def call_off(self) -> None:
        self.called_off.append(self.batches[-1])

    def answer_with(self, results: Sequence[R | NoAnswer]) -> None:
        """Give requests of the running batch answers that aren't their last."""
        assert self._current is not None
        _, done, started_ns = self._current
        done(Outcome(started_ns, self._clock.now_ns(), executed=Results(results), more=True))

    def finish(self, answer: Callable[[P], R]) -> None:
        """End the running batch with `answer(payload)` as each request's result."""
        payloads = self._current[0] if self._current is not None else ()
        self.finish_with([answer(payload) for payload in payloads])

    def finish_with(self, results: Sequence[R | Exception | NoAnswer], *, ran: bool = True) -> None:
        """End the running batch with these results, one for each request."""
        _, done, started_ns = self._take()
        done(Outcome(started_ns, self._clock.now_ns(), executed=Results(results, ran)))

    def fail(self, error: BaseException) -> None:
        """End the running batch with `error`."""
        _, done, started_ns = self._take()
        done(Outcome(started_ns, self._clock.now_ns(), error=error))

    def _take(self) -> tuple[Sequence[P], Done[R], int]:
        if self._current is None:
            raise AssertionError("no batch is running")
        current, self._current = self._current, None
        if self._next is not None:
            self._current, self._next = (*self._next, self._clock.now_ns()), None
        return current


class RecordingObserver:
    """Keeps everything that it is told."""

    def __init__(self) -> None:
        self.drops: list[Drop] = []
        self.reports: list[BatchReport] = []

    def on_drop(self, drop: Drop) -> None:
        self.drops.append(drop)

    def on_batch(self, report: BatchReport) -> None:
        self.reports.append(report)

    def count(self, drop: Drop) -> int:
        return self.drops.count(drop)

    @property
    def rows(self) -> list[int]:
        """Rows of each batch, in order of completion."""
        return [report.rows for report in self.reports]
