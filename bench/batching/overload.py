"""More requests than the model can answer, each with a deadline: how many are answered in time?

Lives here: the study in virtual time, deadline-aware against not. Must not: decide anything itself; every decision is
that of the product's queue. Execution times vary by 5 %, because an estimate that is always right would prove little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from bench.batching.arrivals import Poisson
from bench.batching.costs import MS, FirstUse, Jittered, Linear, capacity_per_s
from bench.batching.simulate import Outcome, simulate
from bench.report import table
from bench.stats import spread
from paceline.scheduler.policy import BatchPolicy

__all__ = ["LOADS", "Point", "Settings", "measure", "text"]

LOADS = (0.5, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0)
ROWS = 32
COST = Linear(10 * MS, MS // 4)
BATCH_NS = COST(ROWS)
CAPACITY_PER_S = capacity_per_s(COST, ROWS)
_SIGMA = 0.05
_FIRST_USE_NS = 20 * BATCH_NS


@dataclass(frozen=True, slots=True)
class Settings:
    """Virtual seconds per run, after `warmup_s` of warm-up, for each of `seeds` seeds."""

    seconds: float
    seeds: int
    warmup_s: float = 2.0


@dataclass(frozen=True, slots=True)
class Point:
    """One load (relative to the capacity) and one deadline (in times of a full batch): medians over the seeds, as
    shares of the capacity, except for `rows_per_batch` and `answered`, the share of the requests that were answered in
    time."""

    aware: bool
    load: float
    deadline: float
    first_use: bool
    goodput: float
    late: float
    refused: float
    given_up: float
    expired: float
    answered: float
    rows_per_batch: float


def measure(
    settings: Settings,
    deadlines: Sequence[float] = (1.5, 2.0, 3.0, 5.0),
    loads: Sequence[float] = LOADS,
    *,
    first_use: bool = False,
    awareness: Sequence[bool] = (True, False),
) -> list[Point]:
    """Every combination; `first_use`: the first execution of each size takes twenty full batches longer."""
    return [
        _point(
            [_run(aware, load, deadline, seed, settings, first_use) for seed in range(settings.seeds)],
            aware,
            load,
            deadline,
            first_use,
        )
        for aware in awareness
        for deadline in deadlines
        for load in loads
    ]


def text(points: Sequence[Point]) -> str:
    """Goodput over capacity, one line per deadline, one column per load."""
    loads = sorted({point.load for point in points})
    head = ["deadline_aware, deadline in full batches", *(f"{load:g} x" for load in loads)]
    found = {(one.aware, one.deadline, one.load): one for one in points}
    rows = [
        [
            f"{str(aware).lower()}, {deadline:g}",
            *(f"{found[aware, deadline, load].goodput:.2f}" for load in loads),
        ]
        for aware in (True, False)
        for deadline in sorted({point.deadline for point in points})
    ]
    return table([head, *rows])


def _run(aware: bool, load: float, deadline: float, seed: int, settings: Settings, first_use: bool) -> Outcome:
    policy = BatchPolicy(max_batch_rows=ROWS, deadline_aware=aware)
    jittered = Jittered(COST, _SIGMA, Random(1_000 + seed))
    cost = FirstUse(jittered, _FIRST_USE_NS) if first_use else jittered
    source = Poisson(load * CAPACITY_PER_S, seed, timeout_ns=int(deadline * BATCH_NS))
    warmup_ns = int(settings.warmup_s * 1e9)
    return simulate(policy, cost, source, warmup_ns + int(settings.seconds * 1e9), warmup_ns=warmup_ns)


def _point(outcomes: Sequence[Outcome], aware: bool, load: float, deadline: float, first_use: bool) -> Point:
    def part(counts: Sequence[int]) -> float:
        elapsed_s = outcomes[0].elapsed_ns / 1e9
        return spread([count / elapsed_s / CAPACITY_PER_S for count in counts]).median

    return Point(
        aware=aware,
        load=load,
        deadline=deadline,
        first_use=first_use,
        goodput=part([one.in_time for one in outcomes]),
        late=part([one.late for one in outcomes]),
        refused=part([one.refused for one in outcomes]),
        given_up=part([one.given_up for one in outcomes]),
        expired=part([one.expired for one in outcomes]),
        answered=spread([one.in_time / one.offered for one in outcomes]).median,
        rows_per_batch=spread([one.rows_per_batch for one in outcomes]).median,
    )
