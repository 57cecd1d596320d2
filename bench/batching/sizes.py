"""Batches of any size, or only of some sizes, padded up to or cut down to these?

Lives here: two studies in virtual time. In the first, the first execution of every size costs extra, as where a runtime
prepares for each new shape; both sides start cold. In the second, the cost has steps, and batches between two sizes are
always padded up, or cut down where measured times say that this costs less per row. Must not: decide.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from bench.batching.arrivals import Clients, Poisson
from bench.batching.costs import MS, Cost, FirstUse, Linear, Stepped, capacity_per_s
from bench.batching.simulate import Outcome, simulate
from bench.report import table
from bench.stats import spread
from paceline.scheduler.policy import BatchPolicy

__all__ = ["Cold", "Cut", "measure_cold", "measure_cut", "text_cold", "text_cut"]

ROWS = 32
POWERS = (1, 2, 4, 8, 16, 32)
COST = Linear(5 * MS, MS // 10)
FIRST_USE_NS = 300 * MS
STEPS = {8: 8 * MS, 16: 10 * MS, 32: 30 * MS}
CLIENTS = (8, 12, 16, 20, 24, 28, 32, 40, 48)
_LOADS = (0.3, 0.6, 0.9)
_THINK_NS = MS // 2


@dataclass(frozen=True, slots=True)
class Cold:
    """The first `seconds` after a cold start under a load (a share of the capacity with full batches); medians."""

    sizes: str
    load: float
    seconds: float
    throughput: float
    mean_ms: float
    p99_ms: float
    preparing: float
    padding: float


@dataclass(frozen=True, slots=True)
class Cut:
    """`clients` closed-loop clients on the stepped cost; medians."""

    by_cost: bool
    clients: int
    answers_per_s: float
    mean_ms: float
    rows_per_batch: float
    padding: float


def measure_cold(seconds: float, seeds: int) -> list[Cold]:
    """Free and padded sizes, at some loads."""
    found = []
    for load in _LOADS:
        per_s = load * capacity_per_s(COST, ROWS)
        for name, sizes in (("free", ()), ("padded", POWERS)):
            runs = [_cold(sizes, per_s, seconds, seed) for seed in range(seeds)]
            found.append(
                Cold(
                    sizes=name,
                    load=load,
                    seconds=seconds,
                    throughput=spread([one.answers_per_s / per_s for one, _ in runs]).median,
                    mean_ms=spread([one.mean_ms for one, _ in runs]).median,
                    p99_ms=spread([one.percentile_ms(99) for one, _ in runs]).median,
                    preparing=spread([cost.sizes * FIRST_USE_NS / 1e9 / seconds for _, cost in runs]).median,
                    padding=spread([one.padding for one, _ in runs]).median,
                )
            )
    return found


def measure_cut(seconds: float, seeds: int) -> list[Cut]:
    """Cutting by cost and always padding up, with some numbers of clients."""
    found = []
    for by_cost in (True, False):
        for clients in CLIENTS:
            runs = [_cut(by_cost, clients, seconds, seed) for seed in range(seeds)]
            found.append(
                Cut(
                    by_cost=by_cost,
                    clients=clients,
                    answers_per_s=spread([one.answers_per_s for one in runs]).median,
                    mean_ms=spread([one.mean_ms for one in runs]).median,
                    rows_per_batch=spread([one.rows_per_batch for one in runs]).median,
                    padding=spread([one.padding for one in runs]).median,
                )
            )
    return found


def text_cold(found: Sequence[Cold]) -> str:
    """One line per load and kind of sizes."""
    head = ["load, sizes", "answered / offered", "mean ms", "p99 ms", "time preparing", "padding"]
    rows = [
        [
            f"{one.load:g} x, {one.sizes}",
            f"{one.throughput:.2f}",
            f"{one.mean_ms:,.1f}",
            f"{one.p99_ms:,.1f}",
            f"{one.preparing:.0%}",
            f"{one.padding:.0%}",
        ]
        for one in found
    ]
    return table([head, *rows])


def text_cut(found: Sequence[Cut]) -> str:
    """Cutting by cost over always padding up, one line per number of clients."""
    padded = {one.clients: one for one in found if not one.by_cost}
    head = ["clients", "throughput, by cost / pad up", "mean latency", "padding by cost", "padding pad up"]
    rows = [
        [
            str(one.clients),
            f"{one.answers_per_s / padded[one.clients].answers_per_s:.2f}",
            f"{one.mean_ms / padded[one.clients].mean_ms:.2f}",
            f"{one.padding:.0%}",
            f"{padded[one.clients].padding:.0%}",
        ]
        for one in found
        if one.by_cost
    ]
    return table([head, *rows])


class _CountedFirstUse(FirstUse):
    @property
    def sizes(self) -> int:
        return len(self._seen)


def _cold(sizes: tuple[int, ...], per_s: float, seconds: float, seed: int) -> tuple[Outcome, _CountedFirstUse]:
    cost = _CountedFirstUse(COST, FIRST_USE_NS)
    policy = BatchPolicy(max_batch_rows=ROWS, batch_sizes=sizes)
    return simulate(policy, cost, Poisson(per_s, seed), int(seconds * 1e9)), cost


def _cut(by_cost: bool, clients: int, seconds: float, seed: int) -> Outcome:
    cost: Cost = Stepped(STEPS)
    policy = BatchPolicy(max_batch_rows=ROWS, batch_sizes=tuple(STEPS))
    source = Clients(clients, _THINK_NS, seed)
    return simulate(policy, cost, source, int(seconds * 1e9), warmup_ns=int(seconds * 1e8), learns=by_cost)
