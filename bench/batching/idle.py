"""Should an idle instance wait for more requests? The rules of bench/batching/release.py compared.

Lives here: the study in virtual time. Must not: rules. No delay and no deadline is configured; batches hold up to 32
rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.batching.arrivals import Clients, OnOff, Poisson, Source
from bench.batching.costs import MS, Linear, capacity_per_s
from bench.batching.release import Greedy, RateTimesBase, Returning, Rule, Target
from bench.batching.simulate import Outcome, simulate
from bench.report import table
from bench.stats import spread
from paceline.scheduler.policy import BatchPolicy

__all__ = ["CLIENTS", "LOADS", "Point", "measure_closed", "measure_open", "text"]

LOADS = (0.1, 0.2, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98)
CLIENTS = (1, 4, 8, 16, 32, 64, 128)
THINK = (0.02, 0.1, 0.5, 2.0)
"""Mean time between an answer and the client's next request, as a multiple of `base_ns`."""
ROWS = 32
COSTS: Mapping[str, Linear] = {
    "mostly per batch (10 ms + 0.25 ms a row)": Linear(10 * MS, MS // 4),
    "mostly per row (2 ms + 1 ms a row)": Linear(2 * MS, MS),
}
_STRETCH = 10
_TARGETS = (2, 4)
_RULES = ("greedy", "rate x base", "returning", *(f"target {times} x alone" for times in _TARGETS))


@dataclass(frozen=True, slots=True)
class Point:
    """One rule under one load: medians over the seeds. `load` is a share of the capacity, or, for clients with `think`,
    their number; throughput is a share of the capacity."""

    cost: str
    arrivals: str
    load: float
    rule: str
    throughput: float
    mean_ms: float
    p50_ms: float
    p99_ms: float
    batches_per_s: float
    rows_per_batch: float
    think: float = 0.0


def measure_open(requests: int, seeds: int, loads: Sequence[float] = LOADS) -> list[Point]:
    """Open loop: requests that arrive whether or not answers come, evenly at random and in bursts."""
    found = []
    for name, cost in COSTS.items():
        capacity = capacity_per_s(cost, ROWS)
        for load in loads:
            per_s = load * capacity
            sources: dict[str, Callable[[int], Source]] = {
                "Poisson": lambda seed, per_s=per_s: Poisson(per_s, seed),  # type: ignore[misc]
                "bursts": lambda seed, per_s=per_s, cost=cost: OnOff(per_s, seed, _STRETCH * cost.base_ns),  # type: ignore[misc]
            }
            until_ns = int(requests / per_s * 1e9)
            for arrivals, source in sources.items():
                for rule in _RULES:
                    runs = [_run(cost, rule, source(seed), until_ns) for seed in range(seeds)]
                    found.append(_point(runs, name, cost, arrivals, load, rule))
    return found


def measure_closed(batches: int, seeds: int, clients: Sequence[int] = CLIENTS) -> list[Point]:
    """Closed loop: as many clients as `clients` says, one number after the other, each with one request at a time."""
    found = []
    for name, cost in COSTS.items():
        until_ns = batches * cost(ROWS)
        for think in THINK:
            for count in clients:
                for rule in _RULES:
                    think_ns = int(think * cost.base_ns)
                    runs = [_run(cost, rule, Clients(count, think_ns, seed), until_ns) for seed in range(seeds)]
                    found.append(_point(runs, name, cost, "clients", count, rule, think))
    return found


def text(points: Sequence[Point]) -> str:
    """Every rule over greedy: for open loops, mean latency, its 99th percentile and executions per second; for closed
    loops, throughput, mean latency and its 99th percentile."""
    rules = [rule for rule in _RULES if rule != "greedy"]
    found = {(*_case(one), one.rule): one for one in points}
    parts = []
    for title, keys, closed in (
        ("mean latency / p99 / executions per second", ("mean_ms", "p99_ms", "batches_per_s"), False),
        ("throughput / mean latency / p99", ("throughput", "mean_ms", "p99_ms"), True),
    ):
        mine = [one for one in points if one.rule == "greedy" and (one.arrivals == "clients") == closed]
        rows = [
            [_label(one), *(_over(found[(*_case(one), rule)], one, keys) for rule in rules), f"{one.mean_ms:.1f}"]
            for one in mine
        ]
        parts.append(table([[title, *rules, "greedy: mean ms"], *rows]))
    return "\n\n".join(parts)


def _over(one: Point, greedy: Point, keys: Sequence[str]) -> str:
    return " / ".join(f"{getattr(one, key) / getattr(greedy, key):.2f}" for key in keys)


def _case(one: Point) -> tuple[str, str, float, float]:
    return one.cost, one.arrivals, one.load, one.think


def _label(one: Point) -> str:
    think = f", think {one.think:g} x base" if one.arrivals == "clients" else ""
    return f"{one.cost.partition(' (')[0]}, {one.arrivals}{think}, {one.load:g}"


def _rule(name: str, cost: Linear) -> Rule:
    if name == "greedy":
        return Greedy()
    if name == "rate x base":
        return RateTimesBase(cost, cost.base_ns)
    if name == "returning":
        return Returning(cost, cost.base_ns)
    times = _TARGETS[_RULES.index(name) - 3]
    return Target(cost, times * cost(1), name)


def _run(cost: Linear, rule: str, source: Source, until_ns: int) -> Outcome:
    policy = BatchPolicy(max_batch_rows=ROWS)
    return simulate(policy, cost, source, until_ns, rule=_rule(rule, cost), warmup_ns=until_ns // 10)


def _point(
    runs: Sequence[Outcome], name: str, cost: Linear, arrivals: str, load: float, rule: str, think: float = 0.0
) -> Point:
    capacity = capacity_per_s(cost, ROWS)
    return Point(
        cost=name,
        arrivals=arrivals,
        load=load,
        rule=rule,
        think=think,
        throughput=spread([one.answers_per_s / capacity for one in runs]).median,
        mean_ms=spread([one.mean_ms for one in runs]).median,
        p50_ms=spread([one.percentile_ms(50) for one in runs]).median,
        p99_ms=spread([one.percentile_ms(99) for one in runs]).median,
        batches_per_s=spread([one.batches_per_s for one in runs]).median,
        rows_per_batch=spread([one.rows_per_batch for one in runs]).median,
    )
