"""What executions and requests take beside a load, by comparing what the load met on a server with what is simulated.

Lives here: that comparison. Must not: start servers, or make loads. On their own, executions have all processors.
Beside a load, the event loop, gRPC and whoever sends take their share of these, of caches, and of the interpreter's
lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import geometric_mean

from paceline.clients.load.arrivals import Arrivals
from paceline.clients.load.histogram import Histogram
from paceline.server.tune.choosing import Goal, Setting
from paceline.server.tune.costs import Costs
from paceline.server.tune.live import Live
from paceline.server.tune.measuring import TuneError
from paceline.server.tune.simulation import Closed, Open, simulate

__all__ = ["calibrated"]

_LEAST_REQUESTS, _MOST_REQUESTS = 50, 3_000
_PERCENTS = (25, 50, 75, 90)
_MOST_WAITS, _STEPS = 16.0, 9
"""The event loop's waits are found to a 512th of the most that is looked for."""


async def calibrated(
    setting: Setting,
    goal: Goal,
    arrivals: Arrivals | None,
    live: Live,
    warmup_s: float,
    among: Callable[[Costs], Sequence[Costs]],
) -> Sequence[Costs]:
    """What the load of `goal` costs with `setting`, of which `live` is what that met, after a warm-up of `warmup_s`.
    `among` says what all costs are, with these: batches aren't all as large as on average. Raises TuneError if it met
    nothing.

    How much longer executions take is known, and so is what a request costs the event loop and the sender. What is left
    of the latencies, the event loop has waited: so long that the same load, simulated, takes as long.
    """
    if not live.latencies.count:
        raise TuneError("the model is served, but answers no request in time")
    layout = setting.layout
    own_ns = sum(number * rows * layout.curve.mean_ns(rows) for rows, number in live.batches.items())
    rows = sum(number * rows for rows, number in live.batches.items())
    slowdown = live.executed_ns * rows / own_ns if own_ns and live.executed_ns else 1.0
    requests = 1 / live.batches_per_request if rows else 1.0
    costs = Costs(live.loop_ns, live.sender_ns, slowdown=slowdown, requests=requests)
    whole_s = warmup_s + live.seconds
    load = Closed(goal.clients) if arrivals is None else Open(arrivals)
    expected = round((live.throughput if arrivals is None else live.offered) * whole_s)
    count = min(_MOST_REQUESTS, max(_LEAST_REQUESTS, expected))
    low, high = 0.0, _MOST_WAITS
    for _ in range(_STEPS):
        costs = replace(costs, waits=(low + high) / 2)
        served = replace(setting, layout=replace(layout, costs=among(costs))).served
        found = await simulate(served, load, requests=count, contents=goal.contents, warmup=warmup_s / whole_s)
        is_longer = _usual_ns(found.latencies) > _usual_ns(live.latencies)
        low, high = (low, costs.waits) if is_longer else (costs.waits, high)
    return among(replace(costs, waits=low))


def _usual_ns(latencies: Histogram) -> float:
    """A mean in which the few that something held up for long count no more than others."""
    return geometric_mean([latencies.percentile_ns(percent) or 1.0 for percent in _PERCENTS])
