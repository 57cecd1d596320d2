"""How many rows a call had best have, and how many instances with how many threads: by trying it on real rows.

Lives here: what is tried, for how long, and what is chosen. Must not: open models or read rows; it is given both. The
rule: what is chosen is the least that is nearly the best, as memory and a job's end cost less then.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from itertools import cycle, islice
from operator import attrgetter
from time import monotonic_ns

import numpy as np

from paceline.backends.spec import Array
from paceline.clients.errors import InferenceError
from paceline.server.bulk.execution import Calls
from paceline.server.bulk.memory import memory_left, resident_bytes
from paceline.server.bulk.models import EngineModel
from paceline.server.bulk.rows import Rows
from paceline.server.bulk.values import BulkError, Computes, Places
from paceline.server.codec.codec import memory_bytes
from paceline.server.cpus import usable_cpus
from paceline.server.models.defaults import Offline
from paceline.server.models.offline import layouts

__all__ = ["MOST_ROWS", "Choice", "Measured", "Sample", "best", "choose", "measure", "sizes_of"]

MOST_ROWS = 1_024
"""Of a call to a model that sets no limit of its own."""

_NEARLY = 0.97
_LOSING, _MOST_LOSING = 0.5, 2
"""Larger batches aren't tried once so many in a row are so much slower than the best."""
_WINDOW_NS, _LONG_WINDOW_NS = 250_000_000, 1_500_000_000
_LOOK_S = 0.005
_FEW_ROWS, _SHORT_CALL_S, _FALLING = 16, 0.1, 0.9
"""Sizes below are tried after larger ones, if their calls are short, and no more once one is so much slower than the
next: of most models, no small one is worth its time."""
_LEAST_CALLS, _LONG_CALL_NS = 2, 1_000_000_000
"""Of each that can be under way, unless calls are long. With fewer, the end of a measurement, when not all are, would
count too much."""
_MOST_NS, _MOST_OF_JOB = 15_000_000_000, 0.1
"""Nothing more is tried after this, or after such a part of the time that the job itself may take."""
_MOST_MEMORY = 0.5
"""How much of what is left instances may take, going by the first."""

Clock = Callable[[], int]


@dataclass(frozen=True, slots=True)
class Sample:
    """The first rows of a job. `batches`: what calls they make if a call has so many rows at most. `job_rows`: about
    how many rows there are in all. `read` reads and converts them once more, as a job does beside its calls. Calls with
    inputs and outputs of more than `most_call_bytes` aren't tried: no chunk has so many rows."""

    rows: Rows
    outputs: Sequence[str]
    batches: Callable[[int], Sequence[Places]]
    job_rows: float = math.inf
    read: Callable[[], object] | None = None
    most_call_bytes: float = math.inf

    def most_ns(self, rows_per_s: float) -> float:
        """How long trying may take."""
        return min(_MOST_NS, _MOST_OF_JOB * self.job_rows * 1e9 / max(rows_per_s, 1e-9))


@dataclass(frozen=True, slots=True)
class Measured:
    """With calls of up to `batch_rows`, the model gives `rows_per_s`, if it has as many calls at a time as it takes.
    Outputs of a row have `output_row_bytes` on average. Of its speed, `kept` is left by the search for rows at fault,
    which `rows_per_s` takes into account."""

    batch_rows: int
    rows_per_s: float
    output_row_bytes: float
    kept: float = 1.0

    def with_faults(self, share: float, smallest: Measured) -> Measured:
        """The same if such a share of the rows makes their calls fail. A call that fails is a call lost; what was good
        in it, done again, is half a call more; and each halving on the way takes a small one, of which `smallest`
        tells. So much came out of a search through measured costs, too, to 10 %."""
        batch_s = self.batch_rows / self.rows_per_s
        halvings = math.log2(self.batch_rows / smallest.batch_rows)
        search_s = batch_s + halvings * smallest.batch_rows / smallest.rows_per_s
        kept = batch_s / (batch_s + (1 - (1 - share) ** self.batch_rows) * search_s)
        return replace(self, rows_per_s=self.rows_per_s * kept, kept=kept)


@dataclass(frozen=True, slots=True)
class Choice:
    """What to run a job with."""

    offline: Offline
    measured: Measured


async def choose(
    open_model: Callable[[Offline], AbstractAsyncContextManager[EngineModel]],
    sample_of: Callable[[EngineModel], Sample],
    *,
    batch_rows: int = 0,
    instances: int = 0,
    cpus: int = 0,
    rates: bool = True,
    clock: Clock = monotonic_ns,
    left_bytes: Callable[[], float] = memory_left,
) -> Choice:
    """Try the model as `open_model` opens it, one layout after the other. `batch_rows` and `instances`: as asked for;
    0: to be found out, as far as there is memory for more instances, on so many `cpus`; 0: all. Without `rates`, if how
    fast it is changes nothing, a few calls are made and no more. Raises BulkError if all rows of the sample are at
    fault, or the model can't be opened."""
    choices: list[Choice] = []
    instance_bytes, tried_ns = 0, 0
    usable = usable_cpus().count
    cpus = min(cpus or usable, usable)
    tries = layouts(instances, cpus, whole_threads=cpus if cpus < usable else 0)
    for offline in tries:
        if choices and offline.instances * instance_bytes >= _MOST_MEMORY * left_bytes():
            continue
        began_bytes = resident_bytes()
        async with open_model(offline) as model:
            sizes = [batch_rows] if batch_rows else sizes_of(model)
            if choices:
                sizes = [size for size in sizes if 4 * size >= choices[0].measured.batch_rows]
            sample, began_ns = sample_of(model), clock()
            share = replace(sample, job_rows=sample.job_rows / len(tries))
            chosen = best(await measure(model, share, sizes, rates=rates, clock=clock))
            if rates and not instances:
                # What has been the best of many may have been lucky: layouts are compared by one long measurement each.
                # Rows are read meanwhile, as that slows some more: an instance whose threads have all CPUs waits whole
                # for the one that is interrupted.
                batches, most_ns = sample.batches(chosen.batch_rows), share.most_ns(chosen.rows_per_s)
                window_ns = min(_LONG_WINDOW_NS, int(most_ns / 2))
                run = await _run(model, sample, batches, clock, window_ns=window_ns, read=sample.read)
                rate = run.measured(chosen.batch_rows).rows_per_s
                chosen = replace(chosen, rows_per_s=rate * chosen.kept)
            if not choices:
                instance_bytes = max(0, resident_bytes() - began_bytes)
            choices.append(Choice(offline, chosen))
            tried_ns += clock() - began_ns
        if not model.on_cpus or tried_ns >= sample.most_ns(chosen.rows_per_s):
            break
    # The first unless others are better by more than chance.
    most = _best_rate(choice.measured for choice in choices)
    return next(choice for choice in choices if choice.measured.rows_per_s >= _NEARLY * most)


def best(tried: Sequence[Measured]) -> Measured:
    """The smallest batch within 3 % of the fastest."""
    return next(one for one in tried if one.rows_per_s >= _NEARLY * _best_rate(tried))


def sizes_of(model: Computes) -> Sequence[int]:
    """Numbers of rows that a model may be best with: those that its batches are filled up to, or powers of two."""
    if model.batch_sizes:
        return model.batch_sizes
    most = max(1, model.max_rows)
    return sorted({*(1 << power for power in range(most.bit_length())), most})


async def measure(
    model: Computes, sample: Sample, sizes: Sequence[int], *, rates: bool = True, clock: Clock = monotonic_ns
) -> Sequence[Measured]:
    """Those of `sizes`, which ascend, that are worth a try: the smallest, then one of a few rows, larger ones, and
    smaller ones as long as they lose little. Raises BulkError if no row can be computed."""
    tried: dict[int, Measured] = {}
    began_ns, largest, losing, failed_calls, tried_rows = clock(), 0, 0, 0, 0
    reason = next((row.reason for row in sample.rows.bad), "there are none")
    window_ns = _WINDOW_NS // 10 if rates else 0
    larger, smaller, next_rate = deque(sizes), deque[int](), 0.0
    while larger or smaller:
        rises = bool(larger)
        size = (larger or smaller).popleft()
        batches = sample.batches(size)
        if rises and (rows := max(map(len, batches), default=0)) <= largest:
            larger.clear()  # there are no more rows that could share a call
            continue
        largest = max(largest, rows)
        run = await _run(model, sample, batches, clock, window_ns=window_ns)
        reason = run.reason or reason
        failed_calls, tried_rows = failed_calls + len(run.failed), tried_rows + run.tried_rows
        rate = 0.0
        if run.computed_rows:
            tried[size] = run.measured(size)
            rate = tried[size].rows_per_s
            losing = losing + 1 if rate < _LOSING * _best_rate(tried.values()) else 0
        most_ns = sample.most_ns(_best_rate(tried.values())) if tried else _MOST_NS
        # In a small job all sizes share the little time there is.
        window_ns = min(_WINDOW_NS, int(most_ns / (2 * len(sizes)))) if rates else 0
        fitting = sample.most_call_bytes * rows / max(1, run.call_bytes)
        larger = deque(one for one in larger if losing < _MOST_LOSING and one <= fitting)
        if clock() - began_ns > most_ns:
            break
        if size == sizes[0]:  # from here on, sizes of which a call is still short are left for later
            few = min(_FEW_ROWS, len(sample.rows.good), _SHORT_CALL_S * rate)
            while len(larger) > 1 and larger[0] < few:
                smaller.appendleft(larger.popleft())
        elif not rises and rate < _FALLING * next_rate:
            break
        if size != sizes[0] and (not rises or not next_rate):
            next_rate = rate
    if not tried and sizes[0] > 1:
        # Each batch may have a row at fault. Rows alone tell that it works, and about how fast it is.
        run = await _run(model, sample, sample.batches(1), clock)
        reason = run.reason or reason
        if run.computed_rows:
            return [run.measured(sizes[0])]
    if not tried:
        rows = len(sample.rows.good) + len(sample.rows.bad)
        raise BulkError(f"none of the first {rows} rows could be computed: {reason}")
    # Once more, as something else may have kept the machine busy.
    for size, first in sorted(tried.items(), reverse=True) if len(tried) > 1 else ():
        if clock() - began_ns < sample.most_ns(_best_rate(tried.values())):
            run = await _run(model, sample, sample.batches(size), clock, window_ns=window_ns)
            tried[size] = max(first, run.measured(size), key=attrgetter("rows_per_s"))
    bad_share = failed_calls / tried_rows
    return [tried[size].with_faults(bad_share, tried[min(tried)]) for size in sorted(tried)]


def _best_rate(tried: Iterable[Measured]) -> float:
    return max(one.rows_per_s for one in tried)


async def _run(
    model: Computes,
    sample: Sample,
    batches: Sequence[Places],
    clock: Clock,
    *,
    window_ns: int = _WINDOW_NS,
    read: Callable[[], object] | None = None,
) -> _Run:
    run = _Run(Calls(model, sample.outputs), sample.rows, batches, clock)
    reading = [asyncio.create_task(run.read_along(read))] if read else []
    try:
        await run.execute(model.at_once, window_ns)
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)  # what can't be read, the job itself finds again
    return run


class _Run:
    """Calls with `batches`, again and again, but for those that have `failed`; `reason` says why the last of these has.
    `tried_rows` are in either kind. What else is counted has succeeded, and `took_ns` without the others."""

    def __init__(self, calls: Calls, rows: Rows, batches: Sequence[Places], clock: Clock) -> None:
        self._calls, self._rows, self._batches, self._clock = calls, rows, batches, clock
        self.failed: set[int] = set()
        self._tried: set[int] = set()
        self._failed_ns = self._computed_elements = 0
        # Filled up: few calls that happen to have long rows would make a size look slow.
        self._elements = [len(places) * max(1, math.prod(rows.common_sizes(places))) for places in batches]
        # In a mixed order, but always the same: those of short rows may come first, and time for few.
        self._numbers = cycle(np.random.default_rng(0).permutation(len(batches)).tolist())
        self.computed_rows = self.output_bytes = self.call_bytes = self.took_ns = 0
        self.reason = ""

    @property
    def tried_rows(self) -> int:
        return sum(len(self._batches[number]) for number in self._tried)

    def measured(self, size: int) -> Measured:
        rows_per_element = sum(map(len, self._batches)) / sum(self._elements)
        rate = self._computed_elements * rows_per_element * 1e9 / max(1, self.took_ns)
        return Measured(size, rate, self.output_bytes / max(1, self.computed_rows))

    async def execute(self, at_once: int, window_ns: int) -> None:
        """`window_ns`: for how long to measure; 0: a call for each that can be under way is enough, if any succeeds."""
        await asyncio.gather(*(self._call() for _ in range(at_once)))  # first calls allocate, and maybe compile
        if not window_ns and self.computed_rows:
            return
        self.computed_rows = self.output_bytes = self._failed_ns = self._computed_elements = 0
        began_ns = self._clock()
        await asyncio.gather(*(self._work(began_ns + window_ns) for _ in range(at_once)))
        self.took_ns = self._clock() - began_ns - self._failed_ns // at_once

    async def read_along(self, read: Callable[[], object]) -> None:
        """Have the rows read as often as they are computed."""
        rounds = 0
        while True:
            if self.computed_rows < rounds * len(self._rows.sizes):
                await asyncio.sleep(_LOOK_S)
            else:
                await asyncio.to_thread(read)
                rounds += 1

    async def _work(self, until_ns: int) -> None:
        calls, longest_ns = 0, 0
        while len(self.failed) < len(self._batches):
            began_ns = self._clock()
            await self._call()
            now_ns, calls = self._clock(), calls + 1
            longest_ns = max(longest_ns, now_ns - began_ns)
            if now_ns >= until_ns and (calls >= _LEAST_CALLS or longest_ns >= _LONG_CALL_NS):
                return

    async def _call(self) -> None:
        left = (number for number in islice(self._numbers, len(self._batches)) if number not in self.failed)
        if (number := next(left, None)) is None:
            return
        places, rows, began_ns = self._batches[number], self._rows, self._clock()
        self._tried.add(number)
        inputs = rows.take(places, rows.common_sizes(places))
        try:
            outputs = await self._calls(0, lambda: inputs)
        except InferenceError as error:
            self.failed.add(number)
            self._failed_ns += self._clock() - began_ns
            self.reason = error.message
            return
        output_bytes = _bytes_of(outputs)
        self.call_bytes = max(self.call_bytes, _bytes_of(inputs) + output_bytes)
        self.output_bytes += output_bytes
        self.computed_rows += len(places)
        self._computed_elements += self._elements[number]


def _bytes_of(tensors: Mapping[str, Array]) -> int:
    return sum(map(memory_bytes, tensors.values()))
