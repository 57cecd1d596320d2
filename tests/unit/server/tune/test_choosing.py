"""Which settings are chosen for which load, of models whose executions take as long as is said here."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paceline.clients.load.arrivals import Recorded
from paceline.clients.load.histogram import Histogram
from paceline.scheduler.policy import BatchPolicy
from paceline.server.models.defaults import Offline
from paceline.server.tune.choosing import Choice, Goal, Setting, Tried, choose, settings_of
from paceline.server.tune.costs import Costs
from paceline.server.tune.curve import Curve, Curves
from paceline.server.tune.live import Live
from paceline.server.tune.measuring import Layout
from paceline.server.tune.simulation import Contents, Simulated

MS = 1_000_000
SIZES = (1, 2, 4, 8)
POLICY = BatchPolicy(max_batch_rows=8)


def layout(base_ms: float, row_ms: float, instances: int = 1) -> Layout:
    durations = {size: [int((base_ms + row_ms * size) * MS)] for size in SIZES}
    return Layout(Offline(instances if instances > 1 else 0), instances, Curves({1: Curve(durations)}, 1))


async def chosen(goal: Goal, *layouts: Layout, policy: BatchPolicy = POLICY) -> Choice:
    return await choose(Setting(layouts[0], policy), settings_of(layouts, policy, goal), goal, seed=1, requests=500)


async def test_batches_are_as_large_as_throughput_needs() -> None:
    choice = await chosen(Goal(clients=32), layout(8, 0.1), policy=replace(POLICY, max_batch_rows=1))
    (best, *_) = choice.best
    assert best.setting.policy.max_batch_rows == 8
    assert best.found.throughput == pytest.approx(8_000 / 8.8, rel=0.02)
    assert choice.now.found.throughput == pytest.approx(1_000 / 8.1, rel=0.02)


async def test_settings_as_good_as_now_change_nothing() -> None:
    choice = await chosen(Goal(rate=50, p99_ns=100 * MS), layout(8, 0.1), layout(8, 0.1))
    assert choice.best[0].is_met
    policy = choice.best[0].setting.policy
    assert choice.best[0].setting.layout is choice.now.setting.layout
    assert (policy.max_batch_rows, policy.max_queue_delay_ns) == (8, 0)


async def test_second_instance_is_used_where_it_helps() -> None:
    # One instance alone can make 100 requests a second, whatever it does.
    choice = await chosen(Goal(rate=150, p99_ns=200 * MS), layout(0, 10), layout(0, 10, 2))
    assert choice.best[0].is_met
    assert choice.best[0].setting.layout.instances == 2
    assert 150 <= choice.best[0].most <= 200
    assert not choice.now.is_met


async def test_room_is_the_servers_whoever_sends() -> None:
    # Such a sender makes 200 requests a second at most, the server answers 1,000.
    served = replace(layout(0, 1), costs=[Costs(sender_ns=5 * MS)])
    assert (await chosen(Goal(rate=50, p99_ns=100 * MS), served)).best[0].most > 600


async def test_requests_larger_than_was_measured_have_settings() -> None:
    goal = Goal(rate=5, contents=[Contents(1), Contents(16)])
    choice = await chosen(goal, layout(8, 1), policy=replace(POLICY, max_batch_rows=32))
    assert choice.tried
    assert {one.setting.policy.max_batch_rows for one in choice.best} <= {16, 32}


async def test_without_a_bound_no_latency_is_given_for_room() -> None:
    # Two executions at a time are slower each, but more.
    goal = Goal(rate=1)
    layouts = layout(0, 10), layout(0, 15, 2)
    assert (await chosen(goal, *layouts)).best[0].setting.layout is layouts[0]
    assert (await chosen(replace(goal, p99_ns=200 * MS), *layouts)).best[0].setting.layout is layouts[1]


async def test_what_is_tried_differs_by_more_than_waits() -> None:
    # Each wait is as good, and one layout is a little better than the other with all sizes of batches.
    choice = await chosen(Goal(clients=8), layout(4, 2), layout(4.4, 2.2))
    ways = [(id(one.setting.layout), one.setting.policy.max_batch_rows) for one in choice.best]
    assert len(set(ways)) == len(ways) == 3
    assert len({layout for layout, _ in ways[:2]}) == 2


async def test_goal_that_is_too_much_is_told() -> None:
    choice = await chosen(Goal(rate=1_000, p99_ns=20 * MS), layout(0, 10))
    assert not any(one.is_met for one in choice.best)
    assert choice.best[0].p99_ns > 20 * MS


async def test_most_is_found_however_much_too_much_was_asked_for() -> None:
    # 100 requests a second keep the only instance busy.
    found = [(await chosen(Goal(rate=rate, p99_ns=40 * MS), layout(0, 10))).best[0] for rate in (90, 1_000, 1e6)]
    assert not any(one.is_met for one in found)
    assert [one.most for one in found] == [pytest.approx(found[0].most, rel=0.1)] * 3
    assert 30 < found[0].most < 90


async def test_most_clients_are_found_one_by_one() -> None:
    for p99_ms, most in ((95, 9), (25, 2), (15, 1), (5, 0)):
        best, *_ = (await chosen(Goal(clients=1_000, p99_ns=p99_ms * MS), layout(0, 10))).best
        assert best.most == most


@pytest.mark.parametrize("recorded", [None, Recorded((0, 10**24), (0, 1))])
async def test_loads_of_a_million_years_are_simulated(recorded: Recorded | None) -> None:
    goal = Goal(rate=recorded.rate if recorded is not None else 1e-10, p99_ns=20 * MS, recorded=recorded)
    (best, *_) = (await chosen(goal, layout(8, 0.1))).best
    assert best.is_met
    assert best.most > 1


def test_recorded_arrivals_last_as_long_as_is_asked_for() -> None:
    burst = Recorded((*range(1_000), 10_000 * MS), (0,) * 1_001)
    goal = Goal(rate=burst.rate, recorded=burst)
    for seconds in (0.0, 6.0, 60.0):
        arrivals = goal.arrivals(0, 600, seconds)
        assert arrivals is not None
        assert arrivals.seconds is not None
        assert arrivals.seconds >= seconds


def test_answers_under_way_are_allowed_for_at_low_rates() -> None:
    found = Simulated(2, 2, Histogram.of([100 * MS]), 0, {}, 0.5)
    tried = Tried(Setting(layout(5, 1), POLICY), found, is_met=True, load=Goal(rate=2))

    def holds(offered: float, throughput: float, not_sent: int = 0) -> bool:
        live = Live(offered, throughput, Histogram.of([100 * MS]), 0, {}, 0, 0, 0, 5.0, not_sent)
        return replace(tried, live=live).holds

    assert holds(2, 1.8)
    assert not holds(2, 1)
    assert not holds(200, 180)
    assert not holds(2, 2, not_sent=1)


async def test_equal_measurements_and_seed_choose_the_same() -> None:
    measured = layout(5, 1)
    first, second = [await chosen(Goal(rate=120, p99_ns=50 * MS), measured) for _ in range(2)]
    assert [one.p99_ns for one in first.best] == [one.p99_ns for one in second.best]
    assert [one.setting for one in first.best] == [one.setting for one in second.best]


def test_settings_stay_within_what_the_model_allows() -> None:
    measured = [layout(5, 1)]
    fixed = replace(POLICY, batch_sizes=(4, 8))
    assert {one.policy.max_batch_rows for one in settings_of(measured, fixed, Goal(rate=1))} == {8}
    alone = replace(POLICY, max_batch_requests=1)
    (one,) = settings_of(measured, alone, Goal(rate=1))
    assert one.policy == alone
    waits = [one.policy.max_queue_delay_ns for one in settings_of(measured, POLICY, Goal(rate=1, p99_ns=8 * MS))]
    assert 0 < max(waits) <= 4 * MS
    assert (
        min(one.policy.max_batch_rows for one in settings_of(measured, POLICY, Goal(rate=1, contents=[Contents(3)])))
        == 4
    )
