"""What executions and requests take beside a load, by comparing what the load met on a server with what is simulated.

Lives here: that comparison. Must not: start servers, or make loads. On their own, executions have all processors.
Beside a load, the event loop, gRPC and whoever sends take their share of these, of caches, and of the interpreter's
lock.
"""

from __future__ import annotations

from dataclasses import replace

from paceline.clients.load.arrivals import Arrivals
from paceline.server.tune.choosing import Goal, Setting
from paceline.server.tune.live import Live
from paceline.server.tune.measuring import Layout, TuneError
from paceline.server.tune.simulation import Closed, Costs, Open, simulate

__all__ = ["calibrated"]

_LEAST_REQUESTS = 50
_MOST_WAITS, _STEPS = 16.0, 9
"""The event loop's waits are found to a 512th of the most that is looked for."""


async def calibrated(
    setting: Setting, goal: Goal, arrivals: Arrivals | None, live: Live, batch_ns: int, warmup_s: float
) -> Layout:
    """The layout of `setting`, of which `live` is what the load of `goal` met, after a warm-up of `warmup_s`. Raises
    TuneError if it met nothing.

    How much longer executions take is known, and so is what a request costs the event loop and the sender. What is left
    of the mean latency, the event loop has waited: so long that the same load, simulated, takes as long on average.
    """
    mean_ns = live.latencies.mean_ns
    if not mean_ns:
        raise TuneError("the model is served, but answers no request in time")
    layout = setting.layout
    own_ns = sum(number * rows * layout.curve.mean_ns(rows) for rows, number in live.batches.items())
    rows = sum(number * rows for rows, number in live.batches.items())
    slowdown = live.executed_ns * rows / own_ns if own_ns and live.executed_ns else 1.0
    batches_each = live.batches_per_request
    batch_ns = min(batch_ns, round(live.loop_ns / batches_each)) if batches_each else 0
    costs = Costs(live.loop_ns - round(batch_ns * batches_each), live.sender_ns, batch_ns)
    slowed = replace(layout, curves=layout.curves.scaled(slowdown), costs=costs, slowdown=slowdown)
    whole_s = warmup_s + live.seconds
    load = Closed(goal.clients) if arrivals is None else Open(arrivals)
    count = max(_LEAST_REQUESTS, round((live.throughput if arrivals is None else live.offered) * whole_s))

    def waiting(waits: float) -> Layout:
        return replace(slowed, costs=replace(costs, waits=waits))

    low, high = 0.0, _MOST_WAITS
    for _ in range(_STEPS):
        middle = (low + high) / 2
        served = replace(setting, layout=waiting(middle)).served
        found = await simulate(served, load, requests=count, contents=goal.contents, warmup=warmup_s / whole_s)
        low, high = (low, middle) if (found.latencies.mean_ns or 0.0) > mean_ns else (middle, high)
    return waiting(low)
