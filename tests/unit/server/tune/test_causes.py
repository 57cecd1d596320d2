"""Why a measurement is far from its prediction, by figures of both."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from paceline.clients.load.histogram import Histogram
from paceline.scheduler.policy import BatchPolicy
from paceline.server.models.defaults import Offline
from paceline.server.tune.causes import why
from paceline.server.tune.choosing import Goal, Setting, Tried
from paceline.server.tune.costs import Costs
from paceline.server.tune.curve import Curve, Curves
from paceline.server.tune.live import Live
from paceline.server.tune.measuring import Layout
from paceline.server.tune.simulation import Simulated

MS = 1_000_000
COSTS = [Costs(loop_ns=200_000, slowdown=1.5)]
LAYOUT = Layout(Offline(), 1, Curves({1: Curve({1: [2 * MS], 4: [2 * MS]})}, 1), COSTS)
# Batches of 4, which execute for 3 ms beside the load: 1,333 requests/s at most.
FOUND = Simulated(400, 400, Histogram.of([10 * MS]), 0, {4: 100}, 0.3)
TRIED = Tried(Setting(LAYOUT, BatchPolicy(max_batch_rows=4)), FOUND, True, load=Goal(rate=400))
LIVE = Live(400, 400, Histogram.of([15 * MS] * 2_000), 0, {4: 500}, 200_000, 100_000, 3 * MS, 5.0)


def test_measurement_near_its_prediction_needs_no_cause() -> None:
    assert why(TRIED) == ""
    assert why(replace(TRIED, live=replace(LIVE, latencies=Histogram.of([11 * MS])))) == ""


@pytest.mark.parametrize(
    ("met", "cause"),
    [
        ({"others": 0.3}, "other processes, or other machines on this host, had 30% of the processors' time meanwhile"),
        ({"lag_ns": 4.0 * MS}, "requests were sent late, the last 1 % of them by 4 ms and more"),
        ({"sender_ns": 2_300_000}, "whoever sent the requests was busy for 92% of the time"),
        ({"batches": {2: 1_000}}, "batches had 2 rows, 4 were predicted"),
        ({"executed_ns": 6 * MS}, "executions took 2.00 times as long as when that was measured before"),
        ({"loop_ns": 300_000}, "a request took the server's event loop 1.50 times as long as when"),
        ({"latencies": Histogram.of([15 * MS] * 90)}, "only 90 requests were answered, too few for a 99th percentile"),
        ({"halves_ns": [10.0, 14.0]}, "the p99 of the two halves of the measurement differ by 1.40 times, too"),
        ({"refused": 100}, "5% of the requests weren't answered, though all are by prediction"),
        ({"batches": {}}, "nothing that was measured says why"),
        ({"executed_ns": 2 * MS, "loop_ns": 100_000}, "nothing that was measured says why"),
        ({}, "nothing that was measured says why"),
    ],
)
def test_cause_follows_from_what_was_met(met: dict[str, Any], cause: str) -> None:
    said = why(replace(TRIED, live=replace(LIVE, **met)))
    assert said.startswith(f"p99 is 1.50 times what was predicted: {cause}")


def test_load_near_saturation_is_a_cause_by_itself() -> None:
    near = "the load is {} of what can be served at most by prediction, and near that, waits differ most"
    fast = replace(TRIED, found=replace(FOUND, throughput=1_200), load=Goal(rate=1_200))
    said = why(replace(fast, live=replace(LIVE, throughput=1_200)))
    assert said.endswith(near.format("0.90"))
    busy = replace(TRIED, live=LIVE, found=replace(FOUND, busy=0.95))
    assert why(busy).endswith(near.format("0.95"))
    behind = replace(TRIED, live=replace(LIVE, throughput=400), found=replace(FOUND, throughput=320))
    assert why(behind).endswith(near.format("1.25"))
    # Batches can still grow, so that more is served.
    met = {"batches": {1: 400}}
    grows = replace(TRIED, live=replace(LIVE, **met), found=replace(FOUND, busy=0.95, **met))
    assert "can be served at most" not in why(grows)


def test_what_disturbs_explains_nothing_that_is_better() -> None:
    met = replace(LIVE, latencies=Histogram.of([5 * MS] * 2_000), others=0.3, lag_ns=4.0 * MS)
    assert why(replace(TRIED, live=met)) == "p99 is 0.50 times what was predicted: nothing that was measured says why"
    sooner = why(replace(TRIED, live=replace(met, executed_ns=2 * MS)))
    assert sooner.endswith("executions took 0.67 times as long as when that was measured before")
    batches = why(replace(TRIED, live=replace(met, batches={2: 1_000})))
    assert batches.endswith("batches had 2 rows, 4 were predicted")
    more = replace(met, throughput=520, latencies=Histogram.of([int(10.5 * MS)] * 2_000), executed_ns=4 * MS)
    assert why(replace(TRIED, live=more)) == (
        "throughput is 1.30 times what was predicted: nothing that was measured says why"
    )


def test_wait_that_was_only_simulated_is_the_last_cause() -> None:
    waits = replace(TRIED.setting, policy=BatchPolicy(max_batch_rows=4, max_queue_delay_ns=3 * MS))
    tried = replace(TRIED, setting=waits)
    assert why(replace(tried, live=LIVE)).endswith("what a wait of 3 ms for more requests does was only simulated")
    longer = why(replace(tried, live=replace(LIVE, executed_ns=round(3.4 * MS))))
    assert longer.endswith("executions took 1.13 times as long as when that was measured before")


def test_idle_instances_are_a_cause_of_clients() -> None:
    # 400 batches of 3 ms in 5 s.
    met = replace(LIVE, throughput=320, batches={4: 400})
    said = why(replace(TRIED, live=met, load=Goal(clients=4)))
    assert said.endswith("instances executed for 24% of the time instead of 30%, as the rest took longer")
    assert why(replace(TRIED, live=met)).endswith("nothing that was measured says why")


def test_few_that_are_held_up_are_the_last_cause() -> None:
    few = Histogram.of([*[10 * MS] * 98, *[15 * MS] * 2] * 20)
    assert why(replace(TRIED, live=replace(LIVE, latencies=few))) == (
        "p99 is 1.50 times what was predicted: "
        "the median is 1.00 times what was predicted, and what holds up a few isn't simulated"
    )
    fewer = why(replace(TRIED, live=replace(LIVE, latencies=few, throughput=280)))
    assert fewer.endswith("nothing that was measured says why")


def test_all_that_is_far_away_is_named() -> None:
    said = why(replace(TRIED, live=replace(LIVE, throughput=300, batches={2: 750})))
    assert said.startswith("p99 is 1.50 and throughput is 0.75 times what was predicted: batches had 2 rows")
