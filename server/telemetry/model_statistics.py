"""What one loaded version of a model has done so far, in plain integers.

Lives here: the numbers that ModelStatistics and the metrics both read, and the two ways in: client requests, counted
once each by `server.requests.inference`, and the batcher's reports. Must not: names of messages or metrics. The rule:
written on the event loop alone, but for `generations`; other threads may read, and copy what they iterate over.
"""

from __future__ import annotations

import asyncio
import math
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar, Self

from paceline.backends.base import Execution
from paceline.backends.errors import BackendError, OutOfMemory
from paceline.backends.generation_totals import GenerationTotals
from paceline.scheduler.errors import BatcherClosed, DeadlineExceeded, ExecutionFailed, NoInstance, QueueFull
from paceline.scheduler.observer import BatchReport, Drop
from paceline.scheduler.sequence import SequenceEnd
from paceline.server.errors import AnswerTooLarge, ModelNotReady, StepFailed

_US = 1_000
_MOST_ANSWERS = 256
"""Answers to one request that are counted by their number; a stream may have any number of them."""
DURATION_BOUNDS_NS = tuple(
    us * _US
    for us in (100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 1_000_000, 10_000_000)
)


class Sums:
    """Numbers that add up, except for `no_sums`."""

    __slots__ = ()
    no_sums: ClassVar[tuple[str, ...]] = ()

    def merge(self, other: Self) -> None:
        """Add what `other` has counted so far. May be called on any thread if nothing else writes to these numbers."""
        for name in {*(self.__slots__ or vars(self))}.difference(self.no_sums):
            mine, others = getattr(self, name), getattr(other, name)
            if isinstance(mine, Sums):
                mine.merge(others)
            elif isinstance(mine, Counter):
                mine.update(others.copy())
            elif isinstance(mine, defaultdict):
                for key, one in others.copy().items():
                    mine[key].merge(one)
            elif isinstance(mine, list):
                setattr(self, name, [sum(pair) for pair in zip(mine, others, strict=True)])
            else:
                setattr(self, name, mine + others)


class DurationHistogram(Sums):
    """How many durations were up to each of `DURATION_BOUNDS_NS`, or above all of them, and their sum."""

    __slots__ = ("counts", "total_ns")

    def __init__(self) -> None:
        self.counts = [0] * (len(DURATION_BOUNDS_NS) + 1)
        self.total_ns = 0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def add(self, duration_ns: int) -> None:
        self.counts[bisect_left(DURATION_BOUNDS_NS, duration_ns)] += 1
        self.total_ns += duration_ns

    def add_all(self, durations_ns: Sequence[int]) -> None:
        counts = self.counts
        for duration_ns in durations_ns:
            counts[bisect_left(DURATION_BOUNDS_NS, duration_ns)] += 1
        self.total_ns += sum(durations_ns)


class FailureReason(Enum):
    """Triton's four: the scheduler refused it, its caller went away, the model failed, anything else."""

    REJECTED = "REJECTED"
    CANCELED = "CANCELED"
    BACKEND = "BACKEND"
    OTHER = "OTHER"


_REASON_OF: Mapping[type[BaseException], FailureReason] = {
    QueueFull: FailureReason.REJECTED,
    DeadlineExceeded: FailureReason.REJECTED,
    BatcherClosed: FailureReason.REJECTED,
    ModelNotReady: FailureReason.REJECTED,
    asyncio.CancelledError: FailureReason.CANCELED,
    ExecutionFailed: FailureReason.BACKEND,
    BackendError: FailureReason.BACKEND,
    NoInstance: FailureReason.BACKEND,
    AnswerTooLarge: FailureReason.BACKEND,
}


def reason_of(error: BaseException) -> FailureReason:
    """The reason under which a request that ended with `error` counts. A step of an ensemble counts with its model."""
    if isinstance(error.__cause__, StepFailed):
        return FailureReason.OTHER
    return next((_REASON_OF[kind] for kind in type(error).__mro__ if kind in _REASON_OF), FailureReason.OTHER)


@dataclass(slots=True)
class BatchTotals(Sums):
    """Executions of one size: how many, and the time that they took, each counted once."""

    count: int = 0
    input_ns: int = 0
    infer_ns: int = 0
    output_ns: int = 0


@dataclass(slots=True)
class Total(Sums):
    """How often something was done, and the time that it took in all."""

    count: int = 0
    ns: int = 0

    def add(self, duration_ns: int) -> None:
        self.count += 1
        self.ns += duration_ns


@dataclass(slots=True)
class AnswerTotals(Sums):
    """Answers of one number within their requests: those with outputs, with an error, ends without anything, and those
    that hadn't come when the request was cancelled."""

    succeeded: Total = field(default_factory=Total)
    failed: Total = field(default_factory=Total)
    empty: Total = field(default_factory=Total)
    cancelled: Total = field(default_factory=Total)

    @property
    def all(self) -> Total:
        """Those that have come."""
        total = Total()
        for one in (self.succeeded, self.failed, self.empty):
            total.merge(one)
        return total


class VersionStatistics(Sums):
    """The numbers of one version since it was loaded; an `Observer` of its batcher.

    `requests` has the durations of clients' requests that succeeded, from when each was taken up until its answer was
    ready. A request that is executed in parts is one request there and in `failures`. `queue` has the waits of what was
    executed and answered, of each part by itself; `input_ns`, `infer_ns` and `output_ns` add up the whole batch's times
    once for each of these. `batches` has executions by their rows without padding; `executions` has their durations, by
    the power of two that covers the rows that the model saw. `hung_executions`: those given up, each of which cost an
    instance. `lost_instances`: those on which nothing could be executed any more. `shortages`: executions that memory
    wasn't enough for. `answers`: of decoupled models, by their number within a request, with the time since the one
    before, or since the request was handed over; `first_answers` has how long requests waited for their first.

    Where requests differ in `lengths`, `elements` are rows times sizes without padding, `padding_elements` what the
    model saw besides. `padded_sizes` has executions by length and the power of two that covers the size that it was
    filled up to, `padded_size_sums` these sizes' sums. `ended_sequences` are those that are over, by why. `cache_hit`:
    requests that were answered without an execution of their own, with the time that looking took; `cache_miss`: all
    others that looked, also with the time that keeping their answers took. `generations`: of a model that generates,
    what its instances have counted.
    """

    no_sums = ("lengths", "generations", "last_inference_ms")

    def __init__(self, lengths: tuple[str, ...] = (), generations: GenerationTotals | None = None) -> None:
        self.generations = generations
        self.requests = DurationHistogram()
        self.failures = Counter(dict.fromkeys(FailureReason, 0))
        self.failure_ns = 0
        self.drops = Counter(dict.fromkeys(Drop, 0))
        self.queue = DurationHistogram()
        self.input_ns = self.infer_ns = self.output_ns = 0
        self.padding_rows = self.unfinished_rows = 0
        self.lengths = lengths
        self.elements = self.padding_elements = 0
        self.padded_sizes: Counter[tuple[str, int]] = Counter()
        self.padded_size_sums: Counter[str] = Counter()
        self.ended_sequences: Counter[SequenceEnd] = Counter()
        self.hung_executions = self.lost_instances = self.shortages = 0
        self.cache_hit, self.cache_miss = Total(), Total()
        self.first_answers = DurationHistogram()
        self.answers: defaultdict[int, AnswerTotals] = defaultdict(AnswerTotals)
        self.batches: defaultdict[int, BatchTotals] = defaultdict(BatchTotals)
        self.executions: defaultdict[int, DurationHistogram] = defaultdict(DurationHistogram)
        self.last_inference_ms = 0

    @property
    def execution_count(self) -> int:
        return sum(totals.count for totals in self.by_rows().values())

    @property
    def rows(self) -> int:
        """Rows executed, padding left out; of requests that were executed several times, only once."""
        return sum(rows * totals.count for rows, totals in self.by_rows().items()) - self.unfinished_rows

    @property
    def failed(self) -> int:
        return sum(self.failures.values())

    def by_rows(self) -> dict[int, BatchTotals]:
        """`batches` in ascending order; a copy, for any thread."""
        return dict(sorted(self.batches.copy().items()))

    def by_size(self) -> dict[int, DurationHistogram]:
        """`executions` in ascending order; a copy, for any thread."""
        return dict(sorted(self.executions.copy().items()))

    def by_answer(self) -> dict[int, AnswerTotals]:
        """`answers` in ascending order; a copy, for any thread."""
        return dict(sorted(self.answers.copy().items()))

    def merge(self, other: VersionStatistics) -> None:
        super().merge(other)
        self.lengths = other.lengths or self.lengths
        self.last_inference_ms = max(self.last_inference_ms, other.last_inference_ms)
        if other.generations is not None:
            self.generations = self.generations or GenerationTotals()
            self.generations.merge(other.generations)

    # hot path: 0.3 us a request and 1.5 us a batch; see bench/micro.py
    def on_success(self, *durations_ns: int) -> None:
        """Clients' requests have their answers, each that long after it was taken up."""
        self.requests.add_all(durations_ns)

    def on_failure(self, error: BaseException, duration_ns: int) -> None:
        """A client's request has ended with `error`."""
        self.failures[reason_of(error)] += 1
        self.failure_ns += duration_ns

    def answers_of(self, number: int) -> AnswerTotals:
        """What answers `number`, from 0, to requests of decoupled models are counted in. Those beyond a few hundred
        count as one."""
        return self.answers[min(number, _MOST_ANSWERS)]

    def on_drop(self, drop: Drop) -> None:
        self.drops[drop] += 1

    # hot path
    def on_batch(self, report: BatchReport) -> None:
        if report.error is not None:
            self.shortages += isinstance(report.error, (OutOfMemory, MemoryError))
            return
        execution: Execution = report.execution
        if not execution.ran:
            return
        input_ns, infer_ns, output_ns = execution.input_ns, execution.infer_ns, execution.output_ns
        answered = len(report.waits_ns)
        self.queue.add_all(report.waits_ns)
        self.input_ns += answered * input_ns
        self.infer_ns += answered * infer_ns
        self.output_ns += answered * output_ns
        self.padding_rows += report.padded_rows - report.rows
        self.unfinished_rows += report.unfinished_rows
        if report.sizes:
            self.elements += report.elements
            self.padding_elements += report.padded_rows * math.prod(report.sizes) - report.elements
            for name, padded_size in zip(self.lengths, report.sizes, strict=True):
                self.padded_sizes[name, 1 << (padded_size - 1).bit_length()] += 1
                self.padded_size_sums[name] += padded_size
        totals = self.batches[report.rows]
        totals.count += 1
        totals.input_ns += input_ns
        totals.infer_ns += infer_ns
        totals.output_ns += output_ns
        # By powers of two rather than by size, which would be up to `max_batch_size` series.
        size = 1 << (report.padded_rows - 1).bit_length()
        self.executions[size].add(report.finished_ns - report.started_ns)
        self.last_inference_ms = time.time_ns() // 1_000_000
