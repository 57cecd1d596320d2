"""What is told of a choice: the reason is what decided."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.clients.load.histogram import Histogram
from paceline.scheduler.policy import BatchPolicy
from paceline.server.models.defaults import Offline
from paceline.server.tune.choosing import Choice, Goal, Needs, Setting, Tried
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
        (RATE, (30, 100, 0, 8, 100), (10, 100, 300, 9, 100), "by prediction, up to 300 requests/s would be served"),
        (RATE, (30, 100, 0, 30, 100), (10, 100, 300, 0, 0), "by prediction, what is served now wouldn't serve"),
        (RATE, (9, 100, 300, 12, 100), (9, 100, 300, 10, 100), "p99 was 10 ms when tried, 12 ms as it is now"),
        (Goal(rate=100), (9, 100, 400, 8, 100), (8, 100, 300, 9, 100), "by prediction, p99 is 8 ms, 9 ms as it is now"),
        (Goal(rate=100), (9, 100, 400, 15, 100), (8, 100, 300, 9, 100), "p99 was 9 ms when tried, 15 ms as it is now"),
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


def test_each_setting_that_could_not_be_tried_is_named() -> None:
    now, *best = (tried(rows, RATE, 9, 100, 200, 9, 100) for rows in range(1, 6))
    failed = replace(tried(6, RATE, 9, 100, 200, 0, 0), failure="no memory for it")
    told = Tuned("m", RATE, Choice(now, [*best, failed, replace(now, failure="once more")], 9), (), 0)
    assert told.caution().endswith("No. 5 couldn't be tried: no memory for it.")
    assert [row[0] for row in told.table()[1:]] == ["now", "best", "second", "third", "no. 5"]


HELP = (
    "It takes about 2 times the CPUs, or executions that are 3 times as fast: a smaller model, a faster CPU or a GPU."
)
LONGER = "By prediction, p99 is longer than now, 15 ms after 10 ms."
MORE = "would be up to 125 requests/s (+25%) by prediction, which wasn't tried"
EXPECTED = "should be met by prediction,"
LESS = "By prediction, up to 60 requests/s would be met."
NONE = "With less load it wouldn't, either, by prediction."
UNMET = "can't be met here: with the best setting, p99 is"


@pytest.mark.parametrize(
    ("now", "best", "said"),
    [
        ((10, 100, 120, 12, 100), (15, 100, 125, 9, 100), f"is met (p99 was 9 ms when it was tried), and {MORE}"),
        ((10, 100, 120, 0, 0), (15, 100, 125, 0, 0), f"is met, and {MORE}. {LONGER}"),
        ((10, 100, 120, 0, 0), (15, 100, 104, 0, 0), f"is met. {LONGER}"),
        ((9, 100, 120, 0, 0), (9, 100, 104, 9, 100), "is met (p99 was 9 ms when it was tried)"),
        ((9, 100, 0, 40, 100), (9, 100, 0, 30, 100), f"{EXPECTED} with p99 9 ms, but wasn't when it was tried."),
        ((40, 9, 0, 0, 0), (30, 9, 60, 0, 0), f"{UNMET} 30 ms at 9 requests/s. {LESS} {HELP}"),
        ((40, 9, 0, 40, 9), (1_200, 9, 0, 30, 9), f"{UNMET} 1.2 s at 9 requests/s. {NONE} {HELP}"),
    ],
)  # fmt: skip
def test_verdict_tells_what_was_met_from_predictions(
    now: tuple[float, ...], best: tuple[float, ...], said: str
) -> None:
    choice = Choice(tried(1, RATE, *now), [tried(2, RATE, *best)], 9, needs=Needs(2, 3))
    assert Tuned("m", RATE, choice, (), 0).verdict() == f"100 requests/s with p99 within 20 ms {said}"
