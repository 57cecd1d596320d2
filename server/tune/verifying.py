"""What was predicted, tried: which of the best settings really meets the goal.

Lives here: which loads are tried with which settings, and what follows from what they met. Must not: start servers or
make loads. What is tried is `Try`, so that equal answers give an equal choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from paceline.server.tune.choosing import Choice, Goal, Setting, Tried
from paceline.server.tune.live import Live

__all__ = ["Try", "verified"]

_LESS = (0.85, 0.7, 0.5, 0.3)
"""Shares of a load that are tried, in turn, if all of it is too much."""
_AS_GOOD = 1.05

Try = Callable[[Setting, Goal], Live]
"""What the load of a goal meets of a server with a setting."""


def verified(choice: Choice, goal: Goal, attempt: Try) -> Choice:
    """`choice` with what its settings really do, the best first: of those that hold. Each is tried with the load that
    is asked for; if that is too much for all by prediction, or isn't given, with the most that it is predicted to
    serve."""
    searches = goal.is_most or not choice.best[0].is_met

    def tried(one: Tried) -> Tried:
        most = one.most or choice.best[0].most
        load = goal.at(most) if searches and most else goal
        return replace(one, live=attempt(one.setting, load), load=load)

    best = [tried(one) for one in choice.best]
    now = next((one for one in best if one.setting == choice.now.setting), None) or tried(choice.now)
    # What changes nothing is as good as what is no better.
    candidates = best if now in best else [*best, now] if goal.rate else [now, *best]
    holding = [one for one in candidates if one.holds]
    if not holding and best[0].load is not None and choice.best[0].most:
        # With less load, the one of which most is expected.
        for share in _LESS:
            load = goal.at(best[0].load.load * share)
            less = replace(best[0], live=attempt(best[0].setting, load), load=load)
            if less.holds:
                holding = [less]
                break
    if holding and searches and not goal.is_most:
        # It wasn't expected, but may be met all the same.
        whole = replace(holding[0], live=attempt(holding[0].setting, goal), load=goal)
        holding = [whole, *holding[1:]] if whole.holds else holding
    holding = _ordered(holding, goal, searches=searches)
    if holding and holding[0].setting.layout.spins:
        # What spinning costs others shows only between executions, so it isn't simulated: it is tried with the chosen
        # setting, and with what isn't better, nothing changes.
        first = holding[0]
        still = replace(first.setting, layout=replace(first.setting.layout, spins=False))
        without = replace(first, setting=still, live=attempt(still, first.load or goal))
        holding = [without, *holding] if without.holds and _is_better(without, first, goal) else holding
    others = [one for one in best if all(one.setting != found.setting for found in holding)]
    return replace(choice, now=now, best=[*holding, *others])


def _is_better(one: Tried, other: Tried, goal: Goal) -> bool:
    """By what was tried: whether it is sooner at a given rate, or answers more."""
    assert one.live is not None
    assert other.live is not None
    if not goal.rate:
        return one.live.throughput > _AS_GOOD * other.live.throughput
    mine, theirs = (each.latencies.percentile_ns(99) or math.inf for each in (one.live, other.live))
    return mine * _AS_GOOD < theirs


def _ordered(holding: Sequence[Tried], goal: Goal, *, searches: bool) -> list[Tried]:
    """The best first. At a given rate, that is the one with most room, as it was predicted: all of them serve it."""
    if goal.rate and not searches:
        return list(holding)

    def value(one: Tried) -> float:
        assert one.live is not None
        return one.live.throughput

    least = max(map(value, holding), default=0.0) / _AS_GOOD
    others = sorted((one for one in holding if value(one) < least), key=value, reverse=True)
    return [*(one for one in holding if value(one) >= least), *others]
