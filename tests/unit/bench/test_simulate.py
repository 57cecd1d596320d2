from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from random import Random

import pytest

from bench.batching.arrivals import Arrival, Clients, OnOff, Poisson, Source
from bench.batching.costs import MS, FirstUse, Jittered, Linear, Stepped, capacity_per_s
from bench.batching.release import Greedy, RateTimesBase, Returning, Rule, Target, Waiting
from bench.batching.simulate import Outcome, simulate
from paceline.scheduler.policy import NEVER, BatchPolicy

COST = Linear(10 * MS, MS)
POLICY = BatchPolicy(max_batch_rows=4)
SECOND = 1_000 * MS


class At:
    """Requests at given milliseconds."""

    def __init__(self, *at_ms: int, deadline_ms: int = 0) -> None:
        self._arrivals = [
            Arrival(at * MS, **({"deadline_ns": (at + deadline_ms) * MS} if deadline_ms else {})) for at in at_ms
        ]

    def arrivals(self) -> Iterator[Arrival]:
        return iter(self._arrivals)

    def following(self, arrival: Arrival, now_ns: int) -> Arrival | None:
        return None


def latencies_ms(outcome: Outcome) -> list[float]:
    return [latency_ns / MS for latency_ns in outcome.latencies_ns]


def test_greedy_equals_the_outcome_computed_by_hand() -> None:
    # The request at 0 runs alone until 11. Those at 1, 2 and 10 wait for it and run until 24. The one at 30 runs alone,
    # until 41.
    found = simulate(POLICY, COST, At(0, 1, 2, 10, 30), SECOND)
    assert latencies_ms(found) == [11, 23, 22, 14, 11]
    assert (found.batches, found.rows, found.busy_ns) == (3, 5, 35 * MS)


def test_batch_is_full_at_the_policys_rows_and_the_rest_waits() -> None:
    # Six come at once: four run until 14, the other two until 26.
    found = simulate(POLICY, COST, At(0, 0, 0, 0, 0, 0), SECOND)
    assert latencies_ms(found) == [14, 14, 14, 14, 26, 26]


def test_two_instances_run_at_the_same_time() -> None:
    found = simulate(POLICY, COST, At(0, 1), SECOND, instances=2)
    assert latencies_ms(found) == [11, 11]


def test_held_instance_starts_when_the_rule_says() -> None:
    # To be answered 20 ms after the oldest came, the two have to start at 0 + 20 - 12 = 8.
    found = simulate(POLICY, COST, At(0, 1), SECOND, rule=Target(COST, 20 * MS, "target"))
    assert latencies_ms(found) == [20, 19]


def test_held_instance_starts_at_once_when_the_batch_is_full() -> None:
    found = simulate(POLICY, COST, At(0, 1, 2, 3), SECOND, rule=Target(COST, 500 * MS, "target"))
    assert latencies_ms(found) == [17, 16, 15, 14]


def test_expired_request_is_counted_and_not_answered() -> None:
    found = simulate(BatchPolicy(max_batch_rows=1), COST, At(0, 1, deadline_ms=5), SECOND)
    assert (found.late, found.expired, found.in_time) == (1, 1, 0)


@pytest.mark.parametrize("rule", [Greedy(), RateTimesBase(COST, 10 * MS), Returning(COST, 10 * MS)])
@pytest.mark.parametrize("load", [0.5, 1.0, 3.0])
def test_every_request_is_counted_once(rule: Rule, load: float) -> None:
    source = Poisson(load * capacity_per_s(COST, 4), 0, timeout_ns=40 * MS)
    cost = Jittered(COST, 0.1, Random(0))
    found = simulate(POLICY, cost, source, 5 * SECOND, rule=rule, warmup_ns=SECOND)
    left = found.in_time + found.late + found.refused + found.expired + found.given_up + found.left
    assert left == found.offered > 0
    assert len(found.latencies_ns) == found.in_time + found.late


SOURCES: list[Callable[[int], Source]] = [
    lambda seed: Poisson(200, seed),
    lambda seed: OnOff(200, seed, 50 * MS),
    lambda seed: Clients(6, MS, seed),
]


@pytest.mark.parametrize("source", SOURCES)
def test_equal_seeds_give_equal_outcomes_and_different_ones_do_not(source: Callable[[int], Source]) -> None:
    def run(seed: int) -> dict[str, object]:
        return asdict(simulate(POLICY, Jittered(COST, 0.1, Random(seed)), source(seed), 2 * SECOND))

    assert run(1) == run(1) != run(2)


def test_clients_have_one_request_each_at_a_time() -> None:
    # All four together, again and again: a batch of four every 14 ms.
    found = simulate(POLICY, COST, Clients(4, 0, 0), 140 * MS - 1)
    assert (found.batches, found.rows, found.left) == (9, 36, 4)
    assert set(latencies_ms(found)) == {14}


def test_clients_send_the_keys_given_to_them() -> None:
    found = simulate(POLICY, COST, Clients(4, 0, 0, lambda client, number: client % 2), 100 * MS)
    assert found.rows_per_batch == 2


@pytest.mark.parametrize("source", [Poisson(1_000, 3), OnOff(1_000, 3, 100 * MS)])
def test_open_loop_sources_keep_their_rate_and_order(source: Poisson) -> None:
    arrivals = source.arrivals()
    times_ns = [next(arrivals).at_ns for _ in range(100_000)]
    assert times_ns == sorted(times_ns)
    assert times_ns[-1] / SECOND == pytest.approx(100, rel=0.1)


def test_capacity_is_that_of_full_batches() -> None:
    assert capacity_per_s(COST, 4) == pytest.approx(4 / 0.014)


def test_first_use_costs_extra_once_for_each_size() -> None:
    cost = FirstUse(COST, 100 * MS)
    assert [cost(1), cost(1), cost(2), cost(2)] == [111 * MS, 11 * MS, 112 * MS, 12 * MS]


def test_stepped_cost_is_that_of_the_next_size() -> None:
    cost = Stepped({4: 1, 8: 5})
    assert [cost(1), cost(4), cost(5), cost(8)] == [1, 1, 5, 5]


def waiting(rows: int, now_ms: int) -> Waiting:
    return Waiting(now_ms * MS, rows, now_ms * MS, NEVER, now_ms * MS)


def feed(rule: Rule, answers_ms: Sequence[int], comes_after_ms: int) -> None:
    for answer_ms in answers_ms:
        rule.answered(answer_ms * MS, 4)
        for _ in range(4):
            rule.arrived((answer_ms + comes_after_ms) * MS, 1)


def test_returning_waits_for_clients_that_return_at_once() -> None:
    rule = Returning(Linear(80 * MS, MS), 80 * MS)
    feed(rule, range(0, 4_000, 100), comes_after_ms=1)
    rule.answered(4_000 * MS, 4)
    rule.arrived(4_001 * MS, 1)
    assert rule.hold_until_ns(waiting(1, 4_001)) > 4_001 * MS
    for _ in range(3):
        rule.arrived(4_001 * MS, 1)
    assert rule.hold_until_ns(waiting(4, 4_001)) <= 4_001 * MS


def test_returning_is_greedy_when_requests_come_long_after_answers() -> None:
    rule = Returning(Linear(80 * MS, MS), 80 * MS)
    feed(rule, range(0, 4_000, 100), comes_after_ms=30)
    rule.answered(4_000 * MS, 4)
    assert rule.hold_until_ns(waiting(1, 4_001)) <= 4_001 * MS


def test_rate_times_base_holds_while_fewer_requests_wait_than_come_during_the_base() -> None:
    rule = RateTimesBase(COST, 10 * MS, rate_per_s=300)
    assert rule.hold_until_ns(waiting(2, 5)) == 15 * MS
    assert rule.hold_until_ns(waiting(4, 5)) == 0
