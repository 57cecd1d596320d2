"""Which settings are chosen once they were tried, by what the trials say."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from paceline.clients.load.histogram import Histogram
from paceline.scheduler.policy import BatchPolicy
from paceline.server.models.defaults import Offline
from paceline.server.tune.choosing import Choice, Goal, Setting, Tried
from paceline.server.tune.curve import Curve, Curves
from paceline.server.tune.live import Live
from paceline.server.tune.measuring import Layout, TuneError
from paceline.server.tune.simulation import Simulated
from paceline.server.tune.verifying import verified

MS = 1_000_000
LAYOUT = Layout(Offline(), 1, Curves({1: Curve({1: [MS]})}, 1))
GOAL = Goal(rate=100, p99_ns=20 * MS)


def tried(rows: int, p99_ms: float, most: float = 0.0, throughput: float = 100.0) -> Tried:
    """Told apart by `rows`."""
    found = Simulated(100, throughput, Histogram.of([int(p99_ms * MS)]), 0, {}, 0.5)
    return Tried(Setting(LAYOUT, BatchPolicy(max_batch_rows=rows)), found, p99_ms <= 20, most)


def live(p99_ms: float, per_s: float) -> Live:
    return Live(per_s, per_s, Histogram.of([int(p99_ms * MS)]), 0, {}, 0, 0, 0, 5.0)


def rows_of(choice: Choice) -> list[int]:
    return [one.setting.policy.max_batch_rows for one in choice.best]


def by_rows(p99_ms: dict[int, float]) -> Callable[[Setting, Goal], Live]:
    return lambda setting, goal: live(p99_ms[setting.policy.max_batch_rows], goal.load)


def test_best_that_holds_is_chosen() -> None:
    choice = Choice(tried(1, 30), [tried(2, 10, 300), tried(3, 10, 200), tried(4, 10, 150)], 9)
    found = verified(choice, GOAL, by_rows({1: 30, 2: 25, 3: 15, 4: 15}))
    assert rows_of(found) == [3, 4, 2]
    assert [one.holds for one in found.best] == [True, True, False]
    assert found.now.live is not None


def test_what_is_served_now_stays_if_only_it_holds() -> None:
    choice = Choice(tried(1, 30), [tried(2, 10, 300)], 9)
    assert rows_of(verified(choice, GOAL, by_rows({1: 15, 2: 25}))) == [1, 2]


def test_throughput_that_was_met_counts_more_than_predictions() -> None:
    choice = Choice(tried(1, 9, throughput=90), [tried(2, 9, throughput=200), tried(3, 9, throughput=150)], 9)
    per_s = {1: 90.0, 2: 100.0, 3: 140.0}
    goal = Goal(clients=4)
    assert rows_of(verified(choice, goal, lambda one, _: live(9, per_s[one.policy.max_batch_rows]))) == [3, 2, 1]
    alike = {1: 138.0, 2: 100.0, 3: 140.0}
    assert rows_of(verified(choice, goal, lambda one, _: live(9, alike[one.policy.max_batch_rows])))[0] == 1
    among = replace(choice, best=[*choice.best, choice.now])
    assert rows_of(verified(among, goal, lambda one, _: live(9, alike[one.policy.max_batch_rows])))[0] == 1


def test_spinning_is_tried_without_and_stays_unless_that_is_better() -> None:
    one = tried(2, 10, 300)
    spinning = replace(one, setting=replace(one.setting, layout=replace(LAYOUT, spins=True)))
    for without_ms, spins in ((9, False), (9.9, True), (25, True)):
        p99_ms = {True: 10.0, False: without_ms}
        best = verified(
            Choice(tried(1, 30), [spinning], 9),
            GOAL,
            lambda setting, goal, p99_ms=p99_ms: live(p99_ms[setting.layout.allow_spinning], goal.load),
        ).best
        assert best[0].setting.layout.allow_spinning is spins
        assert best[0 if spins else 1].setting == spinning.setting


@pytest.mark.parametrize(
    ("goal", "with_wait", "without", "waits"),
    [
        (Goal(clients=4), (9, 100.0), (9, 104.0), False),
        (Goal(clients=4), (9, 100.0), (9, 102.0), True),
        (Goal(rate=100), (9, 100.0), (8, 100.0), False),
        (Goal(rate=100), (9, 100.0), (8.8, 100.0), True),
        (GOAL, (9, 100.0), (5, 100.0), True),  # room counts, which shows at no rate that is given
    ],
)
def test_wait_is_tried_without_where_that_shows_its_worth(
    goal: Goal, with_wait: tuple[float, float], without: tuple[float, float], waits: bool
) -> None:
    one = tried(2, 10, throughput=90)
    waiting = replace(one, setting=replace(one.setting, policy=replace(one.setting.policy, max_queue_delay_ns=MS)))
    best = verified(
        Choice(tried(1, 30, throughput=50), [waiting], 9, [waiting, one]),
        goal,
        lambda setting, _: (
            live(30, 50)
            if setting.policy.max_batch_rows == 1
            else live(*(with_wait if setting.policy.max_queue_delay_ns else without))
        ),
    ).best
    assert bool(best[0].setting.policy.max_queue_delay_ns) is waits
    assert best[0].found is (waiting if waits else one).found


def test_wait_is_not_tried_without_twice() -> None:
    one, times = tried(2, 10), list[Setting]()
    waiting = replace(one, setting=replace(one.setting, policy=replace(one.setting.policy, max_queue_delay_ns=MS)))

    def attempt(setting: Setting, goal: Goal) -> Live:
        times.append(setting)
        policy = setting.policy
        return live(9, 100 if policy.max_batch_rows == 1 else 110 if policy.max_queue_delay_ns else 120)

    verified(Choice(one, [waiting], 9), Goal(clients=4), attempt)
    assert len(times) == 2
    times.clear()
    verified(Choice(tried(1, 30), [waiting], 9), Goal(clients=4), attempt)
    assert len(times) == 3


def test_allowed_sizes_are_tried_on_gpus_and_stay_if_better() -> None:
    one = tried(4, 10, 300)
    on_gpu = replace(one.setting, layout=replace(LAYOUT, gpus=1))
    own = replace(on_gpu, policy=replace(on_gpu.policy, batch_sizes=(3, 4)))
    for setting, filled_ms, sizes in (
        (on_gpu, 9, (1, 2, 4)),
        (on_gpu, 9.9, ()),
        (own, 9, (3, 4)),
        (one.setting, 9, ()),
    ):
        best = verified(
            Choice(tried(1, 30), [replace(one, setting=setting)], 9),
            GOAL,
            lambda setting, goal, ms=filled_ms: live(ms if setting.policy.batch_sizes == (1, 2, 4) else 10, goal.load),
        ).best
        assert best[0].setting.policy.batch_sizes == sizes


def test_less_load_is_tried_until_it_is_served() -> None:
    loads = []

    def attempt(setting: Setting, goal: Goal) -> Live:
        loads.append(goal.load)
        return live(10 if goal.load <= 50 else 40, goal.load)

    choice = Choice(tried(1, 30), [tried(2, 10, 300)], 9)
    best = verified(choice, GOAL, attempt).best[0]
    assert loads == [100, 100, 85, 70, 50]
    assert best.holds
    assert best.load == GOAL.at(50)
    loads.clear()
    # Of clients, the most isn't looked for.
    few = Goal(clients=2, p99_ns=5 * MS)
    assert not verified(Choice(tried(1, 30), [tried(2, 10)], 9), few, attempt).best[0].holds
    assert loads == [2, 2, 1]


@pytest.mark.parametrize(
    ("served", "asked", "room", "too_much"),
    [(400, [400], 400, 0), (250, [400, 280, 200], 200, 280), (110, [400, 280, 200], 0, 200)],
)
def test_predicted_room_is_tried_and_less_of_it(
    served: float, asked: list[float], room: float, too_much: float
) -> None:
    loads = []

    def attempt(setting: Setting, goal: Goal) -> Live:
        loads.append(goal.load)
        return live(10 if goal.load <= served else 40, goal.load)

    best = verified(Choice(tried(1, 10), [tried(2, 10, 400)], 9), GOAL, attempt).best[0]
    assert loads == [100, 100, *(pytest.approx(load) for load in asked)]
    assert (best.room, best.too_much) == (pytest.approx(room), pytest.approx(too_much))


def test_room_that_cannot_be_tried_is_not_too_much() -> None:
    def attempt(setting: Setting, goal: Goal) -> Live:
        if goal.load > GOAL.load:
            raise TuneError("a server doesn't start")
        return live(10, goal.load)

    best = verified(Choice(tried(1, 10), [tried(2, 10, 400)], 9), GOAL, attempt).best[0]
    assert (best.holds, best.room, best.too_much) == (True, 0, 0)


def test_what_was_met_orders_settings_that_do_not_hold() -> None:
    choice = Choice(tried(1, 9), [tried(2, 9), tried(3, 9)], 9)
    found = verified(choice, Goal(clients=4, p99_ns=5 * MS), by_rows({1: 30, 2: 50, 3: 40}))
    assert rows_of(found) == [1, 3, 2]


def test_more_throughput_is_nearer_to_what_is_wanted_than_a_short_wait() -> None:
    choice = Choice(tried(1, 9, 5), [tried(2, 9, 500), tried(3, 9, 400)], 9)
    slow = {1: live(21, 5), 2: live(30, 480), 3: live(25, 390)}
    found = verified(choice, replace(GOAL, is_most=True), lambda setting, _: slow[setting.policy.max_batch_rows])
    assert rows_of(found) == [2, 3, 1]


@pytest.mark.parametrize("goal", [replace(GOAL, rate=1_000), replace(GOAL, is_most=True)])
def test_less_of_the_most_is_tried_beyond_what_another_holds(goal: Goal) -> None:
    asked = []

    def attempt(setting: Setting, goal: Goal) -> Live:
        asked.append(goal.load)
        return live(10 if goal.load <= {1: 120, 2: 400}[setting.policy.max_batch_rows] else 40, goal.load)

    choice = Choice(tried(1, 30, 110), [tried(2, 30, 500)], 9)
    found = verified(choice, goal, attempt)
    assert asked[:4] == [500, 110, 425, 350]
    assert rows_of(found)[0] == 2
    assert found.best[0].load == goal.at(350)


def test_shorter_waits_decide_at_a_rate_without_a_bound() -> None:
    choice = Choice(tried(1, 12), [tried(2, 10), tried(3, 11)], 9)
    rate = Goal(rate=100)
    assert rows_of(verified(choice, rate, by_rows({1: 15, 2: 40, 3: 14}))) == [3, 1, 2]
    assert rows_of(verified(choice, rate, by_rows({1: 15, 2: 40, 3: 14.5})))[0] == 1


def test_no_lower_rate_is_tried_than_can_be() -> None:
    asked = []

    def attempt(setting: Setting, goal: Goal) -> Live:
        asked.append(goal.load)
        return live(40, goal.load)

    found = verified(Choice(tried(1, 30, 0.01), [tried(2, 30, 0.02)], 9), GOAL, attempt, 2.0)
    assert asked == [2.0, 2.0]
    assert not found.best[0].holds


def test_no_more_is_tried_than_could_be_served() -> None:
    asked = []

    def attempt(setting: Setting, goal: Goal) -> Live:
        asked.append(goal.load)
        return live(40, goal.load)

    verified(Choice(tried(1, 30), [tried(2, 30)], 9), replace(GOAL, rate=1e6), attempt)
    assert asked == [pytest.approx(1_000)] * 2


def test_setting_that_cannot_be_tried_does_not_hold() -> None:
    def attempt(setting: Setting, goal: Goal) -> Live:
        if setting.policy.max_batch_rows in failing:
            raise TuneError("out of memory")
        return live(10, goal.load)

    choice = Choice(tried(1, 9), [tried(2, 9, 300), tried(3, 9, 200)], 9)
    failing = {2}
    found = verified(choice, GOAL, attempt)
    assert rows_of(found) == [3, 1, 2]
    assert found.best[-1].failure == "out of memory"
    failing = {1, 2, 3}
    with pytest.raises(TuneError, match="out of memory"):
        verified(choice, GOAL, attempt)


def test_too_much_is_tried_with_the_most_that_was_predicted() -> None:
    loads = []

    def attempt(setting: Setting, goal: Goal) -> Live:
        loads.append(goal.load)
        return live(10 if goal.load <= most else 40, goal.load)

    choice = Choice(tried(1, 30), [tried(2, 30, 60)], 9)
    most = 70.0
    assert verified(choice, GOAL, attempt).best[0].load == GOAL.at(60)
    assert loads == [60, 60, 100]
    most = 100.0
    assert verified(choice, GOAL, attempt).best[0].load == GOAL
