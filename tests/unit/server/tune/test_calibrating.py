"""What a load that was met says of executions and requests beside it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from paceline.clients.load.histogram import Histogram
from paceline.scheduler.policy import BatchPolicy
from paceline.server.models.defaults import Offline
from paceline.server.tune.calibrating import calibrated
from paceline.server.tune.choosing import Goal, Setting
from paceline.server.tune.costs import Costs, costs_at, joined
from paceline.server.tune.curve import Curve, Curves
from paceline.server.tune.live import Live
from paceline.server.tune.measuring import Layout, TuneError
from paceline.server.tune.simulation import Closed, Open, simulate

MS = 1_000_000
CURVES = Curves({1: Curve({1: [2 * MS], 8: [4 * MS]})}, 1)
SETTING = Setting(Layout(Offline(), 1, CURVES), BatchPolicy(max_batch_rows=8))
COSTS = Costs(loop_ns=200_000, sender_ns=100_000, waits=1.5, slowdown=1.5)


@pytest.mark.parametrize("goal", [Goal(rate=300), Goal(clients=16)])
async def test_costs_beside_a_load_are_found_again(goal: Goal) -> None:
    arrivals = goal.arrivals(1, 4_000)
    load = Closed(goal.clients) if arrivals is None else Open(arrivals)
    served = replace(SETTING, layout=replace(SETTING.layout, costs=[COSTS])).served
    met = await simulate(served, load, requests=2_000, warmup=0.1)
    answered, rows_ns = 1_800, {rows: 1.5 * CURVES.typical.mean_ns(rows) for rows in met.batches}
    # Something has held up one request of a hundred: what they usually take says what they cost.
    latencies = Histogram.merged([met.latencies, Histogram.of([500 * MS] * 18)])
    live = Live(
        met.offered, met.throughput, latencies, 0, met.batches, COSTS.loop_ns, COSTS.sender_ns,
        round(sum(number * rows * rows_ns[rows] for rows, number in met.batches.items()) / answered),
        answered / met.throughput,
    )  # fmt: skip
    (found,) = await calibrated(SETTING, goal, arrivals, live, live.seconds / 9, lambda one: [one])
    assert found.slowdown == pytest.approx(1.5, rel=0.02)
    assert (found.loop_ns, found.sender_ns) == (COSTS.loop_ns, COSTS.sender_ns)
    assert found.waits == pytest.approx(COSTS.waits, rel=0.2)
    assert found.requests == pytest.approx(met.rows_per_batch, rel=0.02)


async def test_costs_of_other_batches_are_known_when_the_rest_is_found() -> None:
    goal = Goal(rate=500)
    arrivals = goal.arrivals(1, 4_000)
    assert arrivals is not None
    small = Costs(loop_ns=600_000, sender_ns=100_000, waits=2.0, slowdown=1.5)
    large = Costs(loop_ns=200_000, sender_ns=100_000, waits=0.5, slowdown=1.5, requests=2)
    served = replace(SETTING, layout=replace(SETTING.layout, costs=[small, large])).served
    met = await simulate(served, Open(arrivals), requests=2_000, warmup=0.1)
    rows_ns = sum(number * rows * 1.5 * CURVES.typical.mean_ns(rows) for rows, number in met.batches.items())
    live = Live(
        met.offered, met.throughput, met.latencies, 0, met.batches, large.loop_ns, large.sender_ns,
        round(rows_ns / 1_800), 1_800 / met.throughput,
    )  # fmt: skip
    among = partial(calibrated, SETTING, goal, arrivals, live, live.seconds / 9)
    (alone,) = await among(lambda one: [one])
    _, found = await among(lambda one: [small, one])
    # Alone, they would have to explain what the smaller batches cost, too.
    assert abs(found.waits - large.waits) < 0.7 * abs(alone.waits - large.waits)


async def test_load_without_answers_calibrates_nothing() -> None:
    live = Live(10, 0, Histogram.of([]), 3, {}, 0, 0, 0, 1.0)
    with pytest.raises(TuneError, match="answers no request in time"):
        await calibrated(SETTING, Goal(clients=1), None, live, 0.1, lambda one: [one])


def test_costs_lie_between_those_of_smaller_and_larger_batches() -> None:
    known = joined([Costs(100, requests=16), Costs(400, requests=1.0), Costs(300, requests=1.1)])
    assert [costs_at(known, requests).loop_ns for requests in (0.5, 1, 16, 99)] == [350, 350, 100, 100]
    assert costs_at(known, (1.05 * 16) ** 0.5).loop_ns == pytest.approx(225)
