"""What is told of a choice: the reason is what decided."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.clients.load.histogram import Histogram
from paceline.scheduler.policy import BatchPolicy
from paceline.server.models.defaults import Offline
from paceline.server.tune.choosing import Choice, Goal, Setting, Tried
from paceline.server.tune.curve import Curve, Curves
from paceline.server.tune.live import Live
from paceline.server.tune.measuring import Layout
from paceline.server.tune.report import Tuned
from paceline.server.tune.simulation import Simulated

MS = 1_000_000
LAYOUT = Layout(Offline(), 1, Curves({1: Curve({1: [MS]})}, 1))
RATE = Goal(rate=100, p99_ns=20 * MS)
CLIENTS = Goal(clients=4)


def tried(rows: int, goal: Goal, p99_ms: float, per_s: float, most: float, live_ms: float, live_per_s: float) -> Tried:
    """As predicted, and as it was met, if that isn't 0."""
    found = Simulated(per_s, per_s, Histogram.of([int(p99_ms * MS)]), 0, {}, 0.5)
    one = Tried(Setting(LAYOUT, BatchPolicy(max_batch_rows=rows)), found, p99_ms <= 20, most)
    met = Live(live_per_s, live_per_s, Histogram.of([int(live_ms * MS)]), 0, {}, 0, 0, 0, 5.0)
    return replace(one, live=met, load=goal) if live_ms else one


@pytest.mark.parametrize(
    ("goal", "now", "best", "said"),
    [
        (RATE, (9, 100, 200, 0, 0), (10, 100, 300, 0, 0), "by prediction, up to 300 requests/s would be served"),
        (RATE, (9, 100, 200, 8, 100), (10, 100, 300, 9, 100), "would be served as asked for, up to 200 requests/s as"),
        (RATE, (9, 100, 400, 30, 100), (10, 100, 300, 9, 100), "didn't serve 100 requests/s as asked for when tried"),
        (RATE, (30, 100, 0, 8, 100), (10, 100, 300, 9, 100), "by prediction, what is served now wouldn't serve"),
        (RATE, (9, 100, 300, 12, 100), (9, 100, 300, 10, 100), "p99 was 10 ms when tried, 12 ms as it is now"),
        (Goal(rate=100), (9, 100, 400, 8, 100), (8, 100, 300, 9, 100), "by prediction, p99 is 8 ms, 9 ms as it is now"),
        (CLIENTS, (9, 500, 0, 9, 300), (9, 400, 0, 9, 350), "350 requests/s were answered when tried, 300 as it"),
        (CLIENTS, (9, 400, 0, 0, 0), (9, 500, 0, 0, 0), "by prediction, 500 requests/s are answered, 400 as it is now"),
    ],
)  # fmt: skip
def test_reason_is_what_decided_for_a_setting(
    goal: Goal, now: tuple[float, ...], best: tuple[float, ...], said: str
) -> None:
    served, chosen = tried(1, goal, *now), tried(2, goal, *best)
    assert said in Tuned("m", goal, Choice(served, [chosen, served], 9), (), 0).reason()
    assert Tuned("m", goal, Choice(served, [served, chosen], 9), (), 0).reason() == ""
