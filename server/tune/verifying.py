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
from paceline.server.tune.measuring import TuneError, sizes_to_try

__all__ = ["Try", "verified"]

_LESS = (0.85, 0.7, 0.5, 0.3)
"""Shares of a load that are tried, in turn, if all of it is too much."""
_ROOM = (1.0, 0.7, 0.5)
"""Shares of the most that a setting should serve, which are tried in turn until it does."""
_AS_GOOD = 1.05
_ANSWERS_AS_MANY = 1.03
"""Of what was tried, whatever has a smaller throughput by more than that isn't as good."""

Try = Callable[[Setting, Goal], Live]
"""What the load of a goal meets of a server with a setting. Raises TuneError if that can't be tried."""


def verified(choice: Choice, goal: Goal, attempt: Try, least_per_s: float = 0.0) -> Choice:
    """`choice` with what its settings really do, the best first: of those that hold. Each is tried with the load that
    is asked for; if that is too much for all by prediction, or isn't given, with the most that it is predicted to
    serve, or `least_per_s`: a lower rate can't be tried. What can't be tried doesn't hold. Raises TuneError if nothing
    can."""
    searches = goal.is_most or not choice.best[0].is_met
    # All that serve the rate in time are ordered by the room that they leave, by prediction.
    by_room = bool(goal.rate and goal.p99_ns) and not searches
    by_p99 = bool(goal.rate and not goal.p99_ns) and not searches

    def with_load(one: Tried, load: Goal) -> Tried:
        try:
            return replace(one, live=attempt(one.setting, load), load=load)
        except TuneError as error:
            return replace(one, live=None, load=load, failure=str(error))

    def tried(one: Tried) -> Tried:
        # What can't be served at all can't be sent either.
        most = one.most or choice.best[0].most or min(goal.rate, one.setting.most_per_s(goal.mean_rows))
        return with_load(one, goal.at(max(most, least_per_s)) if searches and most else goal)

    best = [tried(one) for one in choice.best]
    now = next((one for one in best if one.setting == choice.now.setting), None) or tried(choice.now)
    # What changes nothing is as good as what is no better.
    others = [one for one in best if one is not now]
    candidates = [now, *others] if not by_room else best if now in best else [*best, now]
    if all(one.failure for one in candidates):
        raise TuneError(best[0].failure)
    holding = [one for one in candidates if one.holds]
    held = max((one.load.load for one in holding if one.load is not None), default=0.0)
    first = next((one for one in best if not one.failure), now)
    if not first.holds and first.load is not None and (choice.best[0].most or choice.best[0].is_met):
        # With less load, the one of which most is expected. Clients are whole, so that some shares may be the same.
        whole = first.load.load
        for load in dict.fromkeys(goal.at(share * whole).load for share in _LESS):
            if load <= held or load < least_per_s:
                break
            less = with_load(first, goal.at(load)) if load < whole else first
            if less.holds:
                holding = [less, *holding]
                break
    if not holding:  # then by what they were
        by_p99_ns = sorted((one for one in candidates if not one.failure), key=_p99_ns)
        failures = [one for one in candidates if one.failure]
        return replace(choice, now=now, best=[*_ordered(by_p99_ns, _slowness, _ANSWERS_AS_MANY), *failures])
    if not by_room:
        holding = _ordered(holding, *((_p99_ns, _AS_GOOD) if by_p99 else (_slowness, _ANSWERS_AS_MANY)))
    first = holding[0]
    if searches and not goal.is_most and first.load is not None and _LESS[-1] * goal.load <= first.load.load:
        # It wasn't expected, but may be met all the same.
        all_of_it = with_load(first, goal)
        holding = [all_of_it, *holding[1:]] if all_of_it.holds else holding
    # A shorter wait may leave less room for more, which shows at no rate that is given.
    for change in (_without_spinning, _with_sizes) if by_room else (_without_wait, _without_spinning, _with_sizes):
        first = holding[0]
        setting = change(first.setting)
        if all(setting != one.setting for one in (*candidates, *holding)):
            known = next((one for one in choice.simulated if one.setting == setting), first)
            varied = with_load(replace(known, setting=setting), first.load or goal)
            holding = [varied, *holding] if varied.holds and _is_better(varied, first, goal) else holding
    if goal.rate and not searches and holding[0].load == goal:
        # Much more than the load that was asked for is easily predicted wrong.
        first = holding[0]
        for load in [share * first.most for share in _ROOM if share * first.most > _AS_GOOD * goal.rate]:
            more = with_load(first, goal.at(load))
            if more.holds:
                first = replace(first, room=load)
                break
            if not more.failure:
                first = replace(first, too_much=load)
        holding = [first, *holding[1:]]
    others = [one for one in best if all(one.setting != found.setting for found in holding)]
    return replace(choice, now=now, best=[*holding, *sorted(others, key=lambda one: bool(one.failure))])


# What is worth more or less than a simulation shows, so that it is tried or not known.


def _without_wait(setting: Setting) -> Setting:
    """Costs are measured without one."""
    return replace(setting, policy=replace(setting.policy, max_queue_delay_ns=0))


def _without_spinning(setting: Setting) -> Setting:
    """What that costs others shows only between executions."""
    layout = setting.layout
    return replace(setting, layout=replace(layout, allow_spinning=False)) if layout.spins else setting


def _with_sizes(setting: Setting) -> Setting:
    """Filling batches up only costs, by what was measured. But each new shape may cost a GPU more."""
    policy = setting.policy
    if not setting.layout.gpus or policy.max_batch_rows == 1 or policy.max_batch_requests == 1 or policy.batch_sizes:
        return setting
    return replace(setting, policy=replace(policy, batch_sizes=tuple(sizes_to_try(policy.max_batch_rows))))


def _is_better(one: Tried, other: Tried, goal: Goal) -> bool:
    """By what was tried: whether it is sooner at a given rate, or answers more."""
    if not goal.rate:
        return _slowness(one) * _ANSWERS_AS_MANY < _slowness(other)
    return _p99_ns(one) * _AS_GOOD < _p99_ns(other)


def _p99_ns(one: Tried) -> float:
    """As it was met."""
    return (one.live.latencies.percentile_ns(99) if one.live is not None else None) or math.inf


def _slowness(one: Tried) -> float:
    """Seconds for an answer, as it was met."""
    return 1 / one.live.throughput if one.live is not None and one.live.throughput else math.inf


def _ordered(some: Sequence[Tried], cost: Callable[[Tried], float], as_good: float) -> list[Tried]:
    """As they are, those that cost `as_good` times the least at most; then the others, the best first."""
    most = as_good * min(map(cost, some))
    return [*(one for one in some if cost(one) <= most), *sorted((one for one in some if cost(one) > most), key=cost)]
