"""How many rows a call had best have, and how many instances with how many threads: by trying it on real rows.

Lives here: what is tried, for how long, and what is chosen. Must not: open models or read rows; it is given both. The
rule: what is close takes turns with the same rows, so that neither these nor what else the machine does favours one.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from itertools import cycle
from time import monotonic_ns

import numpy as np

from paceline.backends.spec import Array
from paceline.clients.errors import InferenceError
from paceline.server.bulk.execution import Calls
from paceline.server.bulk.memory import memory_left, resident_bytes
from paceline.server.bulk.models import EngineModel
from paceline.server.bulk.rows import Rows
from paceline.server.bulk.values import Computes, Places
from paceline.server.codec.codec import memory_bytes
from paceline.server.cpus import usable_cpus
from paceline.server.models.defaults import Offline
from paceline.server.models.offline import layouts

__all__ = ["PLAIN_ROWS", "Choice", "Measured", "Sample", "choose", "measure", "sizes_of"]

PLAIN_ROWS = 32
"""Of a call, where nothing could be found out."""

_LOSING, _MOST_LOSING = 0.5, 2
"""Larger batches aren't tried once so many in a row are so much slower than the best."""
_FEW_ROWS, _SHORT_CALL_S, _FALLING = 16, 0.1, 0.9
"""Sizes below are tried after larger ones, if their calls are short, and no more once one is so much slower than the
next: of most models, no small one is worth its time."""
_TURNS, _MARGIN = 10, 0.1
"""Of what takes turns, that stays which loses at most the margin after the first, half of it after the second, and so
on. The smallest of those within a tenth of it is chosen in the end."""
_STEP = (5**0.5 - 1) / 2
"""From turn to turn, of all the work in the sample: so the rows of any number of turns are spread evenly over it."""
_MOST_NS, _MOST_OF_JOB = 15_000_000_000, 0.1
"""Trying takes no longer than this, or than such a part of the time that the job itself may take."""
_WINDOWS, _LONG_WINDOW_NS, _LOOK_S = 64, 1_500_000_000, 0.005
"""Turns of sizes, in the time there is; the long one of a layout; how often is looked whether to read more rows."""
_FEW_FAILS = 2
"""Calls that fail, of each that can be under way, once the time is over."""
_NEARLY, _MOST_MEMORY = 0.97, 0.5
"""The first layout that is so fast as the best is chosen; instances may take so much of the memory that is left."""

Clock = Callable[[], int]


@dataclass(slots=True)
class Faults:
    """How many calls with rows of the sample have failed, of how many rows in all calls."""

    failed_calls: int = 0
    tried_rows: int = 0


@dataclass(frozen=True, slots=True)
class Sample:
    """The first rows of a job. `batches`: what calls they make if a call has so many rows at most. `job_rows`: about
    how many rows there are in all. `read` reads and converts them once more, as a job does beside its calls. Calls with
    inputs and outputs of more than `most_call_bytes` aren't tried: no chunk has so many rows. `faults` counts those
    that are found. `share`: of the part of the job's time that trying may take, and of the time for turns, which this
    may; others have taken `spent_ns`."""

    rows: Rows
    outputs: Sequence[str]
    batches: Callable[[int], Sequence[Places]]
    job_rows: float = math.inf
    read: Callable[[], object] | None = None
    most_call_bytes: float = math.inf
    faults: Faults = field(default_factory=Faults)
    share: float = 1.0
    spent_ns: int = 0

    def most_ns(self, rows_per_s: float) -> float:
        """How long this may take."""
        return min(_MOST_NS - self.spent_ns, self.share * _MOST_OF_JOB * self.job_rows * 1e9 / max(rows_per_s, 1e-9))

    def window_ns(self, rows_per_s: float) -> int:
        """How long a turn takes, or at least a call for each that can be under way."""
        return int(max(0, min(self.share * _MOST_NS, self.most_ns(rows_per_s))) / _WINDOWS)


@dataclass(frozen=True, slots=True)
class Measured:
    """With calls of up to `batch_rows`, the model gives `rows_per_s`, if it has as many calls at a time as it takes.
    Outputs of a row have `output_row_bytes` on average. `smallest`: the same of the smallest calls that were tried.
    `reason`: why no row that was tried could be computed, if that is so; `rows_per_s` is 0 then. There wasn't time to
    try `untried_rows` of the sample."""

    batch_rows: int
    rows_per_s: float
    output_row_bytes: float
    smallest: Measured | None = None
    reason: str = ""
    untried_rows: int = 0

    def with_faults(self, faults: Faults) -> Measured:
        """The same if so many rows of a job are at fault. A call that fails is a call lost; what was good in it, done
        again, is half a call more; and each halving on the way takes one of the smallest. Jobs with 64, 128 and 256
        rows a call took so much more processor time, to 4 % of it."""
        if not self.rows_per_s:
            return self
        share, small = faults.failed_calls / max(1, faults.tried_rows), self.smallest or self
        batch_s = self.batch_rows / self.rows_per_s
        search_s = 1.5 * batch_s + math.log2(self.batch_rows / small.batch_rows) * small.batch_rows / small.rows_per_s
        slower = 1 + (1 - (1 - share) ** self.batch_rows) * search_s / batch_s
        return replace(self, rows_per_s=self.rows_per_s / slower)


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
    fast it is changes nothing, a few calls are made and no more. Raises BulkError if the model can't be opened."""
    choices: list[Choice] = []
    faults, instance_bytes, tried_ns = Faults(), 0, 0
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
                large = choices[0].measured.batch_rows / 4
                sizes = [size for size in sizes if size >= large or size == sizes[0]]
            sample, began_ns = replace(sample_of(model), faults=faults), clock()
            # Half of a layout's time is for its sizes, unless there is nothing else to find out.
            share = (1 if instances else 0.5) / (len(tries) if model.on_cpus else 1)
            shared = replace(sample, share=share, spent_ns=tried_ns)
            chosen = await measure(model, shared, sizes, rates=rates, clock=clock)
            if rates and not instances and chosen.rows_per_s:
                # Rows are read while layouts are compared, as that slows some more: an instance whose threads have all
                # CPUs waits whole for the one that is interrupted.
                window_ns = min(_LONG_WINDOW_NS, int(shared.most_ns(chosen.rows_per_s)))
                run = _Run(model, sample, chosen.batch_rows, 0, clock)
                rate = await run.turn(window_ns=window_ns, read=sample.read)
                chosen = replace(chosen, rows_per_s=rate or chosen.rows_per_s)
            if not choices:
                instance_bytes = max(0, resident_bytes() - began_bytes)
            choices.append(Choice(offline, chosen))
            tried_ns += clock() - began_ns
        if not model.on_cpus or not chosen.rows_per_s or tried_ns >= sample.most_ns(chosen.rows_per_s):
            break
    choices = [replace(choice, measured=choice.measured.with_faults(faults)) for choice in choices]
    # The first unless others are better by more than chance.
    most = max(choice.measured.rows_per_s for choice in choices)
    return next(choice for choice in choices if choice.measured.rows_per_s >= _NEARLY * most)


def sizes_of(model: Computes) -> Sequence[int]:
    """Numbers of rows that a model may be best with: those that its batches are filled up to, or powers of two."""
    if model.batch_sizes:
        return model.batch_sizes
    most = max(1, model.max_rows)
    return sorted({*(1 << power for power in range(most.bit_length())), most})


async def measure(
    model: Computes, sample: Sample, sizes: Sequence[int], *, rates: bool = True, clock: Clock = monotonic_ns
) -> Measured:
    """The best of `sizes`, which ascend: those that are close after a look at each take turns, until the time is over
    or all others have lost. If no row can be computed, a plain one."""
    turn, patience_ns = 1, int(sample.most_ns(0.0)) if rates else 0
    runs, began_ns = await _looked_at(model, sample, sizes, rates, clock() + patience_ns, clock)
    close = sorted((run for run in runs if run.rates), key=lambda run: run.size)
    if not close:
        # Each batch may have a row at fault. Rows alone tell that it works, and about how fast it is.
        alone = runs[0] if sizes[0] == 1 and runs else _Run(model, sample, 1, clock() + patience_ns, clock)
        if sizes[0] > 1 and (rate := await alone.turn()):
            return replace(alone.measured, batch_rows=sizes[0], rows_per_s=rate)
        reasons = [*(run.reason for run in (*runs, alone)), *(row.reason for row in sample.rows.bad)]
        reason = next(filter(None, reasons), "no reason was given")
        plain = max((size for size in sizes if size <= PLAIN_ROWS), default=sizes[0])
        return Measured(plain, 0.0, 0.0, reason=reason, untried_rows=len(sample.rows.good) - alone.tried_rows)
    # Of those that are still close: rows per second of the look at first, then the median of what they had in each turn
    # beside the fastest of it, so that what disturbs a turn disturbs all alike.
    speeds, smallest = [run.rates[0] for run in close], close[0].measured
    while True:
        scores = dict[_Run, float]()
        for run, speed in zip(close, speeds, strict=True):
            one = replace(run.measured, smallest=smallest)
            waits = model.at_once * run.size / 2 / sample.job_rows  # at its end, for half of what is under way
            scores[run] = speed * one.with_faults(sample.faults).rows_per_s / one.rows_per_s / (1 + waits)
        best = max(scores.values())
        close = [run for run in close if scores[run] >= (1 - _MARGIN / turn) * best]
        rate = max(run.measured.rows_per_s for run in close)
        # If there isn't time for all, it is for the best. Turns may only take a share: layouts are worth more.
        left_rows = (sample.window_ns(rate) * _WINDOWS + began_ns - clock()) * 1e-9 * rate
        while len(close) > 1 and len(close) * model.at_once * close[-1].size > left_rows:
            close.remove(min(reversed(close), key=scores.__getitem__))
        if len(close) == 1 or turn > _TURNS:
            chosen = next(run for run in close if scores[run] >= (1 - _MARGIN / _TURNS) * best)
            return replace(chosen.measured, smallest=smallest)
        for run in close:
            calls, window_ns = close[-1].size // run.size, sample.window_ns(rate)
            rate_now = await run.turn(turn, calls=calls, window_ns=window_ns)
            run.rates += [rate_now] if rate_now else []
        going = [run for run in close if len(run.rates) > turn]
        if not going:  # all that is left of them fails: what was known before decides
            return replace(max(close, key=scores.__getitem__).measured, smallest=smallest)
        close = going
        taken = np.array([run.rates[1:] for run in close])
        speeds, turn = np.median(taken / taken.max(axis=0), axis=1).tolist(), turn + 1


async def _looked_at(
    model: Computes, sample: Sample, sizes: Sequence[int], rates: bool, until_ns: int, clock: Clock
) -> tuple[list[_Run], int]:
    """Of `sizes` the smallest, then one of a few rows, larger ones, and smaller ones as long as they lose little. With
    them: since when their time counts."""
    runs, began_ns, best_rate = list[_Run](), clock(), 0.0

    def left_ns() -> float:
        return sample.most_ns(best_rate) + began_ns - clock()

    async def look(run: _Run) -> float:
        """A turn of at least a call for each that can be under way; where it decides, the better of two."""
        nonlocal began_ns, best_rate
        runs.append(run)
        is_first = not best_rate
        rate = await run.turn(window_ns=0 if is_first else sample.window_ns(best_rate))
        best_rate = max(best_rate, rate)
        if is_first and rate:
            began_ns = clock()  # first calls may compile or load for long
        if rates and rate and (is_first or rate < _FALLING * best_rate) and left_ns() > 0:
            rate = max(rate, await run.turn(window_ns=0 if is_first else sample.window_ns(best_rate)))
            best_rate = max(best_rate, rate)
        run.rates += [rate] if rate else []
        return rate

    rising, falling, losing, rate = deque(sizes), deque[int](), 0, 0.0
    while rising:
        run, before, is_first = _Run(model, sample, rising.popleft(), until_ns, clock), rate, not best_rate
        if run.most_rows <= max((one.most_rows for one in runs), default=0):
            break  # there are no more rows that could share a call
        rate = await look(run)
        if (not rate and run.size == 1) or left_ns() < 0:
            return runs, began_ns
        losing = losing + 1 if rate < _LOSING * best_rate else 0
        # How many rows a call may have that is made next, also if it gains as this one did.
        left_rows = left_ns() * 1e-9 * best_rate / model.at_once
        fitting = sample.most_call_bytes * run.most_rows / max(1, run.call_bytes)
        most = min(fitting, left_rows / 2 * rate / before if before else math.inf)
        if losing >= _MOST_LOSING or (rising and rising[0] > most):
            break
        if rate and is_first:  # from here on, sizes of which a call is still short are left for later
            few = min(_FEW_ROWS, len(sample.rows.good), _SHORT_CALL_S * rate, left_rows / 8)
            while len(rising) > 1 and rising[0] < few:
                falling.appendleft(rising.popleft())
    for size in falling:
        rate = await look(_Run(model, sample, size, until_ns, clock))
        if left_ns() < 0 or rate < _FALLING * best_rate:
            break
    return runs, began_ns


class _Run:
    """Calls with the batches of one `size`, in turns, but for those that have failed; `reason` says why the last of
    these has. After `until_ns` it gives up after a few that fail. `rates`: rows per second of the turns that count."""

    def __init__(self, model: Computes, sample: Sample, size: int, until_ns: int, clock: Clock) -> None:
        self._model, self._sample, self.size, self._until_ns, self._clock = model, sample, size, until_ns, clock
        self._calls, self._batches = Calls(model, sample.outputs), sample.batches(size)
        self.most_rows = max(map(len, self._batches), default=0)
        # Filled up: few calls that happen to have long rows would make a size look slow.
        volumes = [math.prod(sample.rows.common_sizes(places)) for places in self._batches]
        self._elements = np.array([len(places) for places in self._batches]) * np.maximum(volumes, 1)
        self._tried, self._failed, self.reason = set[int](), set[int](), ""
        self.rates = list[float]()
        self.call_bytes = self._computed_rows = self._output_bytes = self._turn_elements = self._failed_ns = 0

    @property
    def tried_rows(self) -> int:
        return sum(len(self._batches[number]) for number in self._tried)

    @property
    def measured(self) -> Measured:
        rate = float(np.median(self.rates[1:] or self.rates or [0.0]))
        return Measured(self.size, rate, self._output_bytes / max(1, self._computed_rows))

    async def turn(
        self, number: int = 0, *, calls: int = 1, window_ns: int = 0, read: Callable[[], object] | None = None
    ) -> float:
        """Rows per second of so many `calls` or more for each that can be under way, for as long as `window_ns` or
        longer; 0.0 if all fail, or all there is time for. Turns of one `number` begin at the same place, the first in
        the middle of the work."""
        shares = (self._elements.cumsum() - self._elements / 2) / max(1, self._elements.sum())
        first = int(shares.searchsorted((0.5 + number * _STEP) % 1))
        numbers = cycle([*range(first, len(shares)), *range(first)])
        self._turn_elements = self._failed_ns = 0
        began_ns = self._clock()
        reading = [asyncio.create_task(self._read_along(read))] if read else []
        try:
            await asyncio.gather(
                *(self._work(numbers, calls, began_ns + window_ns) for _ in range(self._model.at_once))
            )
            took_ns = self._clock() - began_ns - self._failed_ns // self._model.at_once
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)  # what can't be read, the job itself finds again
        rows_per_element = sum(map(len, self._batches)) / max(1, self._elements.sum())
        return float(self._turn_elements * rows_per_element * 1e9 / max(1, took_ns))

    async def _read_along(self, read: Callable[[], object]) -> None:
        """Have the rows read as often as they are computed."""
        rounds = 0
        while True:
            if self._computed_rows < rounds * len(self._sample.rows.sizes):
                await asyncio.sleep(_LOOK_S)
            else:
                await asyncio.to_thread(read)
                rounds += 1

    async def _work(self, numbers: Iterator[int], calls: int, until_ns: int) -> None:
        fails = 0
        while len(self._failed) < len(self._batches) and (calls > 0 or self._clock() < until_ns):
            if fails >= _FEW_FAILS and self._clock() >= max(until_ns, self._until_ns):
                break
            number = next(number for number in numbers if number not in self._failed)
            succeeds = await self._call(number)
            calls, fails = calls - succeeds, fails + (not succeeds)

    async def _call(self, number: int) -> bool:
        """Whether it succeeds."""
        places, rows, began_ns = self._batches[number], self._sample.rows, self._clock()
        self._sample.faults.tried_rows += len(places) * (number not in self._tried)
        self._tried.add(number)
        inputs = rows.take(places, rows.common_sizes(places))
        try:
            outputs = await self._calls(0, lambda: inputs)
        except InferenceError as error:
            self._sample.faults.failed_calls += number not in self._failed
            self._failed.add(number)
            self._failed_ns += self._clock() - began_ns
            self.reason = error.message
            return False
        output_bytes = _bytes_of(outputs)
        self.call_bytes = max(self.call_bytes, _bytes_of(inputs) + output_bytes)
        self._output_bytes += output_bytes
        self._computed_rows += len(places)
        self._turn_elements += int(self._elements[number])
        return True


def _bytes_of(tensors: Mapping[str, Array]) -> int:
    return sum(map(memory_bytes, tensors.values()))
