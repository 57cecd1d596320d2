"""Which settings serve a load best, by simulating it with many.

Lives here: the settings that are tried, what a user wants of them, and the choice. Must not: measure, or write files.
The rule: equal measurements and an equal seed give the same choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from paceline.clients.load.arrivals import Arrivals, Poisson, Recorded
from paceline.clients.load.histogram import Histogram
from paceline.scheduler.policy import BatchPolicy
from paceline.server.tune.live import Live
from paceline.server.tune.measuring import Layout
from paceline.server.tune.simulation import Closed, Contents, Open, Served, Simulated, simulate

__all__ = ["Choice", "Found", "Goal", "Needs", "Setting", "Tried", "choose", "settings_of"]

_PART, _PART_OF_MORE = 4, 2
"""All settings are simulated with so much fewer requests than the best of them, and those with other loads."""
_EACH, _BEST = 3, 3
"""How many are tried again for each of two reasons, and how many are told."""
_SUSTAINED = 0.97
"""Of a load that isn't too much, at least this share is answered as fast as it comes."""
_LESS_LIVE, _DEVIATIONS = 0.07, 3
"""In a few seconds, at whose end more answers may be due than at their beginning, so much less will do, or as many
standard deviations of that number."""
_LEAST, _CLOSE = 1e-4, 1.03
"""Of a load that is too much, so small a part is tried whether any isn't; what is met, and what isn't, become so near
to each other."""
_LONGEST_S = 1e9
"""No simulation is of more time than this, about."""
_AS_GOOD = 1.05
"""A difference up to this may be chance."""
_MORE_DEVICES, _FASTER = (2, 3, 4, 8, 16), (1.25, 1.5, 2, 3, 5, 10, 20, 50)
"""Times that are tried where the goal can't be met."""

Show = Callable[[int, int], None]
"""Told how many simulations are done, of how many."""


class Found(Protocol):
    """What requests have met, as `Simulated` says."""

    @property
    def offered(self) -> float: ...
    @property
    def throughput(self) -> float: ...
    @property
    def latencies(self) -> Histogram: ...
    @property
    def refused(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Goal:
    """Requests come at `rate` a second, or from so many `clients`. `p99_ns`: how long all but 1 % of them may take at
    most; 0: any time. They have the `contents`, in turn. `recorded`: when they came once, and what each had, rather
    than at random; `rate` is then how many came a second. `is_most`: the load isn't given, and as much is wanted as can
    be had."""

    rate: float = 0.0
    clients: int = 0
    p99_ns: int = 0
    contents: Sequence[Contents] = (Contents(),)
    recorded: Recorded | None = None
    is_most: bool = False

    @property
    def load(self) -> float:
        """Requests a second, or clients."""
        return self.rate or self.clients

    @property
    def most_rows(self) -> int:
        return max(one.rows for one in self.contents)

    @property
    def mean_rows(self) -> float:
        """Of the requests of a recording, or of those that come in turn."""
        numbers = self.recorded.contents if self.recorded is not None else range(len(self.contents))
        return sum(self.contents[number % len(self.contents)].rows for number in numbers) / len(numbers)

    def arrivals(self, seed: int, requests: int, seconds: float = 0.0) -> Arrivals | None:
        """Of an open load, at least so many, in at least so many seconds; None for clients."""
        # In batchers, a time after `NEVER` (292 years) is none. So rare, each request is alone in any case.
        rate = max(self.rate, requests / _LONGEST_S)
        if self.recorded is None:
            return Poisson(rate, seed) if self.rate else None
        found = replace(self.recorded.of_length(requests), speed=rate / self.recorded.rate)
        # As many as come in this time on average may have come within a moment.
        return found if found.seconds >= seconds else self.arrivals(seed, 2 * requests, seconds)

    def at(self, most: float) -> Goal:
        """With another load: so many requests a second, or clients."""
        return replace(self, rate=most) if self.rate else replace(self, clients=max(1, int(most)))

    def is_met(self, found: Found, sustained: float = _SUSTAINED) -> bool:
        """Whether `found` answers all of the load, as fast as it is to, and at least the share `sustained` of it as
        fast as it came."""
        p99_ns = found.latencies.percentile_ns(99)
        in_time = p99_ns is not None and (not self.p99_ns or p99_ns <= self.p99_ns)
        return in_time and not found.refused and (not self.rate or found.throughput >= sustained * found.offered)


@dataclass(frozen=True, slots=True)
class Setting:
    """What can be set for a model."""

    layout: Layout
    policy: BatchPolicy

    @property
    def capacity(self) -> float:
        """Rows a second, if all batches were as large as is best."""
        slowdown = min(one.slowdown for one in self.layout.costs)
        return self.layout.rows_per_s(self.policy.max_batch_rows) / slowdown

    @property
    def for_any_sender(self) -> Setting:
        """Without what whoever sends from this machine takes: what the server could serve of others."""
        costs = [replace(one, sender_ns=0.0) for one in self.layout.costs]
        return replace(self, layout=replace(self.layout, costs=costs))

    @property
    def served(self) -> Served:
        """As it is simulated."""
        layout = self.layout
        return Served(self.policy, layout.instances, layout.curves.cost, layout.costs, layout.slots, layout.prepared)

    def most_per_s(self, rows: float) -> float:
        """Requests of so many rows a second that executions, the event loop and whoever sends could have at most."""
        least_ns = [min(one.held_ns for one in self.layout.costs), min(one.sender_ns for one in self.layout.costs)]
        return min(self.capacity / rows, *(1e9 / max(1.0, ns) for ns in least_ns))


@dataclass(frozen=True, slots=True)
class Tried:
    """What a setting makes of the load. `most`: the largest rate at which the goal would be met, or the most clients;
    0: none, or not looked for; `rising`: the loads that were looked at for it, and their 99th percentiles. `live` is
    what `load` met of a server with this setting, if that was tried; `failure` says why it couldn't be. `room`: what of
    `most` was tried, too, and served as it is to be; 0: nothing, and `too_much` was the least that wasn't."""

    setting: Setting
    found: Simulated
    is_met: bool
    most: float = 0.0
    rising: Sequence[tuple[float, float]] = ()
    live: Live | None = None
    load: Goal | None = None
    failure: str = ""
    room: float = 0.0
    too_much: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether the load that was tried was served as it is to be."""
        live = self.live
        if live is None or self.load is None or live.not_sent:
            return False
        # As many are under way at a time as come while one is answered, and their number varies with its root.
        under_way = live.offered * (live.latencies.mean_ns or 0.0) / 1e9
        due = _DEVIATIONS * math.sqrt(2 * under_way) / max(1.0, live.offered * live.seconds)
        return self.load.is_met(live, 1 - max(_LESS_LIVE, due))

    @property
    def p99_ns(self) -> float:
        return self.found.latencies.percentile_ns(99) or float("inf")


@dataclass(frozen=True, slots=True)
class Choice:
    """The setting as it is `now`, the `best` ones, of which the first is chosen, and how many were tried.
    `simulated` are all of these, with fewer requests. `needs`: what
    would help if none meets the goal."""

    now: Tried
    best: Sequence[Tried]
    tried: int
    simulated: Sequence[Tried] = ()
    needs: Needs | None = None


@dataclass(frozen=True, slots=True)
class Needs:
    """So many times the CPUs, or GPUs, would do, and executions that are so many times as fast; 0: not even the most
    that was tried."""

    devices: float
    speed: float


def settings_of(layouts: Sequence[Layout], policy: BatchPolicy, goal: Goal) -> list[Setting]:
    """All that may be best: `policy` with other sizes of batches, and longer waits for more requests."""
    found = []
    for layout in layouts:
        # Larger batches may not have been measured, as they lose, or take too long.
        sizes = [size for size in layout.curve.sizes if size >= goal.most_rows] or [goal.most_rows]
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
    requests: int = 4_000,
) -> Choice:
    """Simulate all of `settings`, the best again with `requests`, and the very best with ever more a second."""
    done, total = 0, len(settings) + 2 * _EACH + 1

    async def each(some: Iterable[Setting], requests: int) -> list[Tried]:
        nonlocal done
        tried = []
        for one in some:
            tried.append(await _loaded(one, goal, requests, seed))
            done += 1
            show(done, total)
        return sorted(tried, key=lambda one: _rank(one, goal))

    # What can't serve the load at all needn't be simulated, if something can.
    able = [one for one in settings if one.most_per_s(goal.mean_rows) >= goal.rate] or settings
    done += len(settings) - len(able)
    first = await each(able, requests // _PART)
    # Those that answer soonest, those that have most room for more, and what is served now.
    apart = _apart(first)
    roomy = sorted([one for one in apart if one.is_met] or apart, key=lambda one: -one.setting.capacity)
    some = [one.setting for one in (*apart[:_EACH], *roomy[:_EACH])] + [now]
    best = await each([one for place, one in enumerate(some) if one not in some[:place]], requests)
    current = next(one for one in best if one.setting == now)
    most, needs = max(one.for_any_sender.most_per_s(goal.mean_rows) for one in some), None
    if met := [one for one in best if one.is_met]:
        if goal.rate:
            best = [await _with_most(one, goal, goal.rate, most, requests // _PART_OF_MORE, seed) for one in met]
    else:
        high = min(most, goal.rate) or goal.load
        best = [await _with_most(one, goal, 0.0, high, requests // _PART_OF_MORE, seed) for one in best]
        needs = await _needs(max(best, key=lambda one: one.most).setting, goal, requests // _PART_OF_MORE, seed)
    show(total, total)
    current = next((one for one in best if one.setting == now), current)
    return Choice(current, _apart(_fewest_changes(best, now, goal))[:_BEST], len(settings), first, needs)


def _apart(tried: Sequence[Tried]) -> list[Tried]:
    """Of `tried`, the best first, those that are worth a trial on a server: the best wait for each size of batches, and
    first the best of each layout. Predictions are further off than other waits are apart."""
    ways: dict[tuple[int, int], Tried] = {}
    for one in tried:
        ways.setdefault((id(one.setting.layout), one.setting.policy.max_batch_rows), one)
    firsts = {id(one.setting.layout): one for one in reversed(ways.values())}
    return sorted(ways.values(), key=lambda one: one is not firsts[id(one.setting.layout)])


async def set_back(chosen: Setting, now: Setting, goal: Goal, seed: int, requests: int) -> dict[str, Tried]:
    """What each of the changes is worth, by its name: `chosen` if only that were as it is `now`; and all of them. But
    for allowed sizes: what they save doesn't show here."""
    mine, policy = replace(chosen.policy, batch_sizes=now.policy.batch_sizes), now.policy
    chosen = replace(chosen, policy=mine)
    sizes = replace(mine, max_batch_rows=policy.max_batch_rows, preferred_batch_rows=policy.preferred_batch_rows)
    settings = {
        "instances and threads": replace(chosen, layout=now.layout),
        "sizes of batches": replace(chosen, policy=sizes),
        "wait for more requests": replace(chosen, policy=replace(mine, max_queue_delay_ns=policy.max_queue_delay_ns)),
        "all": now,
    }
    found = {}
    for name, setting in settings.items():
        if setting != chosen:
            one = await _loaded(setting, goal, requests, seed)
            if goal.rate and one.is_met:
                most = setting.for_any_sender.most_per_s(goal.mean_rows)
                one = await _with_most(one, goal, goal.rate, most, requests // _PART_OF_MORE, seed)
            found[name] = one
    return found


def _fewest_changes(tried: Sequence[Tried], now: Setting, goal: Goal) -> list[Tried]:
    """The best first; of those that are as good, the one that differs least from what is served now."""

    # Room for more requests is worth more than a latency that is short enough, but what that is has to be said.
    in_time = all(one.is_met for one in tried) and goal.rate and not goal.p99_ns
    of_most = any(one.most for one in tried) and not in_time

    def value(one: Tried) -> float:
        if of_most:
            return one.most
        return one.found.throughput if one.is_met and not in_time else 1e9 / one.p99_ns

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
        is_worse = value(one) < best / _AS_GOOD
        return one.is_met is not met, is_worse, differences(one) if not is_worse else 0, -value(one)

    return sorted(tried, key=key)


def _rank(one: Tried, goal: Goal) -> tuple[bool, float]:
    """The best first."""
    if not one.is_met or goal.rate:
        return not one.is_met, one.p99_ns
    return False, -one.found.throughput


async def _loaded(setting: Setting, goal: Goal, requests: int, seed: int) -> Tried:
    arrivals = goal.arrivals(seed, requests)
    load = Closed(goal.clients) if arrivals is None else Open(arrivals)
    found = await simulate(setting.served, load, requests=requests, contents=goal.contents, seed=seed)
    return Tried(setting, found, goal.is_met(found))


async def _with_most(one: Tried, goal: Goal, low: float, high: float, requests: int, seed: int) -> Tried:
    """`one` with the largest load below `high` at which the goal is met, about, which it is at `low`; 0: if it is at
    any."""
    setting = one.setting.for_any_sender if goal.rate else one.setting
    rising = [(goal.load, one.p99_ns)]

    async def is_met(load: float) -> bool:
        tried = await _loaded(setting, goal.at(load), requests, seed)
        rising.append((load, tried.p99_ns))
        return tried.is_met

    if not low:
        low = goal.at(high * _LEAST).load
        if not await is_met(low):
            return one
    while high > _CLOSE * low:
        load = math.sqrt(low * high)
        if not goal.rate:
            load = max(low + 1, math.floor(load))
            if load >= high:
                break
        low, high = (load, high) if await is_met(load) else (low, load)
    return replace(one, most=low, rising=sorted(rising))


async def _needs(setting: Setting, goal: Goal, requests: int, seed: int) -> Needs:
    layout = setting.layout

    async def least(changed: Callable[[float], Layout], factors: Sequence[float]) -> float:
        async def is_met(factor: float) -> bool:
            return (await _loaded(replace(setting, layout=changed(factor)), goal, requests, seed)).is_met

        if await is_met(factors[-1]):
            for factor in factors[:-1]:
                if await is_met(factor):
                    return factor
            return factors[-1]
        return 0.0

    def faster(factor: float) -> Layout:
        return replace(layout, curves=layout.curves.scaled(1 / factor))

    def more(factor: float) -> Layout:
        return replace(layout, instances=layout.instances * int(factor))

    return Needs(devices=await least(more, _MORE_DEVICES), speed=await least(faster, _FASTER))
