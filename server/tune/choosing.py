"""Which settings serve a load best, by simulating it with many.

Lives here: the settings that are tried, what a user wants of them, and the choice. Must not: measure, or write files.
The rule: equal measurements and an equal seed give the same choice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from paceline.clients.load.arrivals import Poisson, Recorded
from paceline.scheduler.policy import BatchPolicy
from paceline.server.tune.measuring import Layout
from paceline.server.tune.simulation import Closed, Contents, Open, Served, Simulated, simulate

__all__ = ["Choice", "Goal", "Setting", "Tried", "choose", "settings_of"]

_PART = 4
"""All settings are tried with so much fewer requests than the best of them."""
_EACH, _BEST = 3, 3
"""How many are tried again for each of two reasons, and how many are told."""
_SUSTAINED = 0.97
"""Of a load that isn't too much, at least this share is answered as fast as it comes."""
_HALVINGS = 5
_AS_GOOD = 1.05
"""A difference up to this may be chance."""

Show = Callable[[int, int], None]
"""Told how many simulations are done, of how many."""


@dataclass(frozen=True, slots=True)
class Goal:
    """Requests come at `rate` a second, or from so many `clients`. `p99_ns`: how long all but 1 % of them may take at
    most; 0: any time. They have the `contents`, in turn. `recorded`: when they came once, and what each had, rather
    than at random; `rate` is then how many came a second."""

    rate: float = 0.0
    clients: int = 0
    p99_ns: int = 0
    contents: Sequence[Contents] = (Contents(),)
    recorded: Recorded | None = None

    @property
    def most_rows(self) -> int:
        return max(one.rows for one in self.contents)

    @property
    def mean_rows(self) -> float:
        """Of the requests of a recording, or of those that come in turn."""
        numbers = self.recorded.contents if self.recorded is not None else range(len(self.contents))
        return sum(self.contents[number % len(self.contents)].rows for number in numbers) / len(numbers)

    def is_met(self, found: Simulated) -> bool:
        """Whether `found` answers all of the load, as fast as it is to."""
        p99_ns = found.latencies.percentile_ns(99)
        return not found.refused and p99_ns is not None and (not self.p99_ns or p99_ns <= self.p99_ns)


@dataclass(frozen=True, slots=True)
class Setting:
    """What can be set for a model."""

    layout: Layout
    policy: BatchPolicy

    @property
    def capacity(self) -> float:
        """Rows a second, if all batches were as large as is best."""
        return self.layout.instances * self.layout.curve.rows_per_s(self.policy.max_batch_rows)


@dataclass(frozen=True, slots=True)
class Tried:
    """What a setting makes of the load. `sustained`: the largest rate at which the goal would be met; 0: it isn't
    met, or there is no rate."""

    setting: Setting
    found: Simulated
    is_met: bool
    sustained: float = 0.0

    @property
    def p99_ns(self) -> float:
        return self.found.latencies.percentile_ns(99) or float("inf")


@dataclass(frozen=True, slots=True)
class Choice:
    """The setting as it is `now`, the `best` ones, of which the first is chosen, and how many were tried."""

    now: Tried
    best: Sequence[Tried]
    tried: int


def settings_of(layouts: Sequence[Layout], policy: BatchPolicy, goal: Goal) -> list[Setting]:
    """All that may be best: `policy` with other sizes of batches, and longer waits for more requests."""
    found = []
    for layout in layouts:
        sizes = [size for size in layout.curve.sizes if size >= goal.most_rows]
        alone = policy.max_batch_requests == 1
        if alone or policy.batch_sizes:  # what batches are filled up to has to end with the largest
            sizes = [policy.max_batch_rows]
        once_us = round(layout.curve.mean_ns(layout.curve.sizes[0]) / 1_000)
        # A wait is long if an execution could have been made meanwhile; rounded, as people read them.
        delays_us = sorted({0, *(max(100, int(once_us * part) // 100 * 100) for part in (0.5, 1, 2))})
        for size in sizes:
            for delay_us in delays_us if size > goal.most_rows and not alone else [0]:
                if not goal.p99_ns or delay_us * 2_000 <= goal.p99_ns:
                    changed = replace(
                        policy, max_batch_rows=size, max_queue_delay_ns=delay_us * 1_000, preferred_batch_rows=()
                    )
                    found.append(Setting(layout, changed))
    return found


async def choose(
    now: Setting,
    settings: Sequence[Setting],
    goal: Goal,
    seed: int,
    show: Show = lambda done, of: None,
    requests: int = 8_000,
) -> Choice:
    """Simulate all of `settings`, the best again with `requests`, and the very best with ever more a second."""
    done, total = 0, len(settings) + 2 * _EACH + 1

    async def each(some: Iterable[Setting], requests: int) -> list[Tried]:
        nonlocal done
        tried = []
        for one in some:
            tried.append(await _loaded(one, goal, goal.rate, requests, seed))
            done += 1
            show(done, total)
        return sorted(tried, key=lambda one: _rank(one, goal))

    first = await each(settings, requests // _PART)
    # Those that answer soonest, those that have most room for more, and what is served now.
    roomy = sorted((one for one in first if one.is_met), key=lambda one: -one.setting.capacity)
    some = [one.setting for one in (*first[:_EACH], *roomy[:_EACH])] + [now]
    best = await each([one for place, one in enumerate(some) if one not in some[:place]], requests)
    current = next(one for one in best if one.setting == now)
    if goal.rate:
        most = max(one.capacity for one in some) / goal.mean_rows
        best = [
            replace(one, sustained=await _sustained(one.setting, goal, most, requests // _PART, seed))
            for one in best
            if one.is_met
        ] or best
    show(total, total)
    return Choice(current, _fewest_changes(best, now)[:_BEST], len(settings))


def _fewest_changes(tried: Sequence[Tried], now: Setting) -> list[Tried]:
    """The best first; of those that are as good, the one that differs least from what is served now."""

    def value(one: Tried) -> float:
        if not one.is_met:
            return -one.p99_ns
        # Room for more requests is worth more than a latency that is short enough.
        return one.sustained or one.found.throughput

    def differences(one: Tried) -> int:
        mine, policy = one.setting.policy, now.policy
        return (
            2 * (one.setting.layout is not now.layout)
            + (mine.max_queue_delay_ns != policy.max_queue_delay_ns)
            + (mine.max_batch_rows != policy.max_batch_rows)
        )

    met = any(one.is_met for one in tried)
    best = max(value(one) for one in tried if one.is_met is met)

    def key(one: Tried) -> tuple[bool, bool, int, float]:
        is_worse = value(one) < (best / _AS_GOOD if met else best * _AS_GOOD)
        return one.is_met is not met, is_worse, differences(one) if not is_worse else 0, -value(one)

    return sorted(tried, key=key)


def _rank(one: Tried, goal: Goal) -> tuple[bool, float]:
    """The best first."""
    if not one.is_met or goal.rate:
        return not one.is_met, one.p99_ns
    return False, -one.found.throughput


async def _loaded(setting: Setting, goal: Goal, rate: float, requests: int, seed: int) -> Tried:
    layout = setting.layout
    served = Served(setting.policy, layout.instances, layout.curves.cost, layout.handling_ns)
    load: Open | Closed = Open(Poisson(rate, seed)) if rate else Closed(goal.clients)
    if goal.recorded is not None:
        load = Open(replace(goal.recorded.of_length(requests), speed=rate / goal.rate))
    found = await simulate(served, load, requests=requests, contents=goal.contents, seed=seed)
    is_met = goal.is_met(found) and (not rate or found.throughput >= _SUSTAINED * found.offered)
    return Tried(setting, found, is_met)


async def _sustained(setting: Setting, goal: Goal, most: float, requests: int, seed: int) -> float:
    """The largest rate at which the goal is met, from the one at which it is, to a 32nd of the way to `most`."""
    low, high = goal.rate, max(goal.rate, most)
    for _ in range(_HALVINGS):
        rate = (low + high) / 2
        low, high = (rate, high) if (await _loaded(setting, goal, rate, requests, seed)).is_met else (low, rate)
    return low
