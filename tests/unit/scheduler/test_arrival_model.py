"""How long an idle instance is kept waiting for more requests."""

from __future__ import annotations

import pytest

from paceline.scheduler.turns import ArrivalModel

MS = 1_000_000


def after_batches_of(requests: int, *, count: int = 100, cost_us: float = 100) -> ArrivalModel:
    """Arrivals after `count` batches of `requests` requests, each of which cost the event loop `cost_us`."""
    arrivals = ArrivalModel()
    for number in range(1, count + 1):
        arrivals.on_start(requests, 0, 0, busy_ns=round(number * requests * cost_us * 1_000))
        arrivals.on_end(requests, 0)
    return arrivals


def test_no_wait_where_requests_have_come_alone() -> None:
    assert ArrivalModel().patience_ns(0, 0) == 0
    assert after_batches_of(1).patience_ns(0, 0) == 0


def test_wait_is_longer_the_larger_batches_have_been() -> None:
    waited = [after_batches_of(requests).patience_ns(1, 0) for requests in (1, 2, 3, 8, 64)]
    assert waited == sorted(waited)
    assert 0 == waited[0] < waited[1] < waited[2] < waited[3] <= MS


def test_no_wait_once_all_expected_requests_have_come() -> None:
    arrivals = after_batches_of(8)
    assert arrivals.patience_ns(7, 0)
    assert not arrivals.patience_ns(8, 0)


def test_executing_and_waiting_requests_are_counted_together() -> None:
    arrivals = after_batches_of(4)
    arrivals.on_start(4, waiting=4, now_ns=0, busy_ns=0)
    arrivals.on_end(4, 0)
    assert arrivals.patience_ns(5, 0)
    assert not arrivals.patience_ns(8, 0)


def test_callers_who_stopped_coming_are_forgotten() -> None:
    arrivals = after_batches_of(64)
    for _ in range(300):
        arrivals.on_start(1, 0, 0, busy_ns=0)
        arrivals.on_end(1, 0)
    assert arrivals.patience_ns(0, 0) == 0


@pytest.mark.parametrize(("cost_us", "longest_us"), [(100, 9_600), (50_000, 10_000)])
def test_wait_is_bounded_while_requests_keep_coming(cost_us: float, longest_us: int) -> None:
    arrivals = after_batches_of(64, cost_us=cost_us)
    waited_us = next(us for us in range(1_000_000) if not arrivals.patience_ns(1, us * 1_000))
    assert longest_us - 100 < waited_us <= longest_us


def test_wait_is_longer_the_more_a_request_costs() -> None:
    waited = [after_batches_of(16, cost_us=cost_us).patience_ns(8, 0) for cost_us in (50, 100, 200)]
    assert [round(ns / waited[0], 1) for ns in waited] == [1, 2, 4]
    assert 4 * 50_000 < waited[0] < 16 * 50_000


@pytest.mark.parametrize(
    ("cost_us", "least_us", "most_us"),
    [pytest.param(0.1, 50, 150, id="nothing"), pytest.param(50_000, 3_900, 4_000, id="all there is")],
)
def test_wait_is_within_bounds_when_requests_cost(cost_us: float, least_us: int, most_us: int) -> None:
    assert least_us * 1_000 <= after_batches_of(16, cost_us=cost_us).patience_ns(8, 0) <= most_us * 1_000


@pytest.mark.parametrize("requests", [2, 4, 16])
def test_total_wait_is_as_long_as_a_batch_takes_to_come_and_not_much_longer(requests: int) -> None:
    arrivals = after_batches_of(requests, cost_us=100)
    assert arrivals.patience_ns(1, requests * 100_000)
    assert not arrivals.patience_ns(1, 2 * requests * 100_000)


@pytest.mark.parametrize(("every_us", "most"), [(300, 4), (600, 2)])
def test_callers_who_come_by_chance_hardly_wait_for_each_other_while_the_loop_has_spare_time(
    every_us: int, most: int
) -> None:
    """Each costs 150 us. They come evenly, so that the next one does come whenever it is waited for, and a batch has
    all that came within the longest wait."""
    arrivals, busy_ns = after_batches_of(16, cost_us=150), 16 * 100 * 150_000
    for _ in range(300):
        waited_us = 0
        requests = 1
        while arrivals.patience_ns(requests, waited_us * 1_000) > every_us * 1_000:
            waited_us += every_us
            requests += 1
        busy_ns += requests * 150_000
        arrivals.on_start(requests, 0, 0, busy_ns)
        arrivals.on_end(requests, 0)
    assert requests <= most


def test_one_more_than_all_known_callers_is_waited_for_now_and_then() -> None:
    arrivals = after_batches_of(8, count=96)
    assert 0 < arrivals.patience_ns(8, 0) < arrivals.patience_ns(7, 0)
    assert arrivals.missing(8) == 1
    arrivals.on_start(8, 0, 0, busy_ns=0)
    assert (arrivals.patience_ns(8, 0), arrivals.missing(8)) == (0, 0)


def after_pauses_of(pause_ms: float, base_ms: float, half_ms: float, *, count: int = 50) -> ArrivalModel:
    """Arrivals of eight callers who come again all in one batch, after nothing has executed for `pause_ms`."""
    arrivals, now_ns = ArrivalModel(), 1
    for _ in range(count):
        now_ns += round(pause_ms * MS)
        arrivals.on_start(8, 0, now_ns, busy_ns=0)
        now_ns += 10 * MS
        arrivals.on_end(8, now_ns)
        arrivals.took(round(base_ms * MS), round(half_ms * MS))
    return arrivals


def test_half_of_the_returning_callers_is_enough_where_the_pause_exceeds_a_batchs_base_cost() -> None:
    arrivals = after_pauses_of(6, base_ms=5, half_ms=7)
    assert arrivals.patience_ns(3, 0)
    assert not arrivals.patience_ns(4, 0)


@pytest.mark.parametrize(
    ("pause_ms", "base_ms", "half_ms"),
    [
        pytest.param(4, 5, 7, id="pause is cheaper"),
        pytest.param(10, 5, 7, id="rest wouldn't be back"),
        pytest.param(6, 0, 7, id="costs aren't known"),
        pytest.param(0.01, 5, 7, id="they take turns already"),
        pytest.param(1000, 5, 7, id="nobody came for long"),
    ],
)
def test_half_of_the_returning_callers_is_not_enough_where(pause_ms: float, base_ms: float, half_ms: float) -> None:
    assert after_pauses_of(pause_ms, base_ms, half_ms).patience_ns(7, 0)


def test_half_of_the_returning_callers_is_not_enough_after_few_pauses() -> None:
    assert after_pauses_of(6, base_ms=5, half_ms=7, count=3).patience_ns(7, 0)


def test_half_of_the_returning_callers_is_not_enough_while_others_execute() -> None:
    arrivals = after_pauses_of(6, base_ms=5, half_ms=7)
    arrivals.on_start(2, 0, arrivals._ended_ns, busy_ns=0)
    assert arrivals.patience_ns(5, 0)


def test_pause_after_a_part_of_the_returning_callers_is_scaled_to_all_of_them() -> None:
    """Four of eight are back after 2 ms, so all would be after 4 ms: longer than half of them execute for."""
    arrivals = ArrivalModel()
    now_ns = 0
    for _ in range(50):
        now_ns += 2 * MS
        arrivals.on_start(4, 4, now_ns, busy_ns=0)
        now_ns += 10 * MS
        arrivals.on_end(4, now_ns)
        arrivals.took(MS, 2 * MS)
    assert arrivals.patience_ns(7, 0)
    arrivals.took(MS, 4 * MS)
    assert not arrivals.patience_ns(4, 0)


def test_half_of_all_is_half_of_the_returning_callers_however_many_a_batch_had() -> None:
    arrivals = after_pauses_of(6, base_ms=5, half_ms=7)
    assert (arrivals.half_of_all(8, 8), arrivals.half_of_all(4, 4), arrivals.half_of_all(4, 8)) == (4, 4, 8)


def test_half_of_the_returning_callers_is_not_enough_once_executions_are_short() -> None:
    arrivals = after_pauses_of(6, base_ms=5, half_ms=7)
    arrivals.took(0, 0)
    assert arrivals.patience_ns(7, 0)


def test_wait_after_batches_of_two_is_a_quarter_of_that_after_batches_of_many() -> None:
    two, many = (after_batches_of(requests).patience_ns(1, 0) for requests in (2, 16))
    assert round(many / two, 1) == 4
    assert round(two / MS, 2) == 0.2


def test_second_caller_who_came_once_is_soon_no_longer_waited_for() -> None:
    arrivals = after_batches_of(1)
    arrivals.on_start(2, 0, 0, busy_ns=0)
    arrivals.on_end(2, 0)
    assert arrivals.patience_ns(1, 0)
    for _ in range(8):
        arrivals.on_start(1, 0, 0, busy_ns=0)
        arrivals.on_end(1, 0)
    assert arrivals.missing(1) == 1
    assert arrivals.patience_ns(1, 0) == 0


def test_one_batch_in_sixteen_may_wait_for_more_than_all_known_callers() -> None:
    arrivals = after_batches_of(8)
    missing = []
    for _ in range(64):
        arrivals.on_start(8, 0, 0, busy_ns=0)
        arrivals.on_end(8, 0)
        missing.append(arrivals.missing(8))
    assert (missing.count(1), missing.count(0)) == (4, 60)
    first = missing.index(1)
    assert missing[first::16] == [1] * 4


@pytest.mark.parametrize("count", [96, 97])
def test_batch_that_may_wait_for_more_than_all_known_callers_waits_for_all_of_them(count: int) -> None:
    assert after_batches_of(8, count=count).missing(2) == 6


def test_time_between_batches_is_no_pause_while_another_executes() -> None:
    arrivals, now_ns = ArrivalModel(), 1
    arrivals.on_start(4, 0, now_ns, busy_ns=0)
    for _ in range(50):
        now_ns += 6 * MS
        arrivals.on_start(4, 0, now_ns, busy_ns=0)
        arrivals.on_end(4, now_ns + MS)
    arrivals.on_end(4, now_ns + MS)
    arrivals.took(5 * MS, 20 * MS)
    assert arrivals.patience_ns(7, 0)


def test_time_before_the_first_batch_is_no_pause() -> None:
    arrivals, now_ns = ArrivalModel(), 10**16
    for _ in range(50):
        arrivals.on_start(8, 0, now_ns, busy_ns=0)
        now_ns += 10 * MS
        arrivals.on_end(8, now_ns)
        arrivals.took(5 * MS, 7 * MS)
        now_ns += 6 * MS
    assert not arrivals.patience_ns(4, 0)


def test_half_of_a_single_caller_is_one_row() -> None:
    assert ArrivalModel().half_of_all(1, 1) == 1


def test_loop_time_before_the_first_batch_does_not_count_as_its_cost() -> None:
    waited = []
    for before_ns in (0, 10**15):
        arrivals = ArrivalModel()
        for number in range(4):
            arrivals.on_start(16, 0, 0, before_ns + number * 16 * 100_000)
            arrivals.on_end(16, 0)
        waited.append(arrivals.patience_ns(8, 0))
    assert waited[0] == waited[1] > 0
