"""When a turn is taken: once for requests that arrive together; and how often the wait for more is reconsidered."""

from __future__ import annotations

import asyncio

from paceline.scheduler.testing import ManualClock
from paceline.scheduler.turns import ArrivalModel, Turns, WaitBudget
from tests.unit.scheduler import workbench

US = 1_000
NEVER = 2**62


class CountedTurns:
    """Counts the turns of a batcher where `waiting` requests, besides those announced, wait for an instance that may be
    kept waiting for `max_more` more at most. If `waiting` is None, there is no such instance."""

    def __init__(self, arrivals: ArrivalModel, waiting: int | None = 0, max_more: int = NEVER) -> None:
        self.waiting, self.max_more = waiting, max_more
        self.count = self.budget_requests = 0
        self.until_ns = NEVER
        self.submitted: list[str] = []
        self.clock = ManualClock(now_ns=1)
        self.turns = Turns(self._turn, self._wait_budget, arrivals, self.clock)
        self.turns.start()

    def announce(self, *requests: str) -> None:
        for request in requests:
            self.turns.announce(self.submitted.extend, request)

    async def after(self, us: int) -> int:
        """How many turns have been taken once so much time has passed."""
        await iterations(2)
        self.clock.advance(us * US)
        await iterations(2)
        return self.count

    def _turn(self) -> None:
        self.count += 1

    def _wait_budget(self) -> WaitBudget | None:
        self.budget_requests += 1
        there = len(self.submitted)
        return None if self.waiting is None else WaitBudget(self.waiting + there, self.max_more - there, self.until_ns)


def crowd(requests: int = 32) -> ArrivalModel:
    """Arrivals after many batches of so many requests."""
    return workbench.crowd(requests, 100 * US)


async def iterations(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_turn_is_taken_in_the_next_iteration_where_no_more_requests_are_expected() -> None:
    taken = CountedTurns(ArrivalModel())
    taken.announce("a", "b")
    assert taken.count == 0
    await iterations(1)
    assert (taken.count, taken.submitted) == (1, ["a", "b"])


async def test_turn_requested_many_times_is_taken_once() -> None:
    taken = CountedTurns(ArrivalModel())
    for _ in range(5):
        taken.turns.request()
        taken.turns.arrived()
    await iterations(100)
    assert taken.count == 1


async def test_turn_is_put_off_for_more_requests_and_taken_when_none_come() -> None:
    taken = CountedTurns(crowd())
    taken.announce("a")
    assert await taken.after(799) == 0
    assert await taken.after(1) == 1
    assert taken.submitted == ["a"]


async def test_turn_is_put_off_again_after_another_request() -> None:
    taken = CountedTurns(crowd())
    taken.announce("a")
    assert await taken.after(799) == 0
    taken.announce("b")
    assert await taken.after(2) == 0
    assert await taken.after(800) == 1
    assert taken.submitted == ["a", "b"]


async def test_turn_is_taken_once_all_expected_requests_have_come() -> None:
    taken = CountedTurns(crowd(4))
    taken.announce("a", "b", "c")
    await iterations(2)
    assert taken.count == 0
    taken.announce("d")
    await iterations(2)
    assert (taken.count, taken.submitted) == (1, ["a", "b", "c", "d"])


async def test_turn_is_taken_when_the_batch_is_full() -> None:
    taken = CountedTurns(crowd(), max_more=2)
    taken.announce("a")
    await iterations(2)
    assert taken.count == 0
    taken.waiting = None
    taken.announce("b")
    await iterations(2)
    assert (taken.count, taken.submitted) == (1, ["a", "b"])


async def test_close_leaves_no_alarm() -> None:
    taken = CountedTurns(crowd())
    taken.announce("a")
    await iterations(2)
    taken.turns.close()
    assert taken.clock.alarms == 0


async def test_turn_is_not_put_off_without_an_instance_to_keep_waiting() -> None:
    taken = CountedTurns(crowd(), waiting=None)
    taken.announce("a")
    await iterations(1)
    assert taken.count == 1


async def test_wait_is_reconsidered_for_arrivals_together_and_at_its_end_not_for_each_request() -> None:
    taken = CountedTurns(crowd())
    for request in "abc":
        taken.announce(request)
        await iterations(10)
    assert (taken.count, taken.budget_requests, taken.submitted) == (0, 1, ["a"])
    assert await taken.after(500) == 0
    assert (taken.budget_requests, taken.submitted) == (2, ["a", "b", "c"])
    assert await taken.after(300) == 0
    assert taken.budget_requests == 3


async def test_turn_is_taken_before_a_request_runs_out_of_time() -> None:
    taken = CountedTurns(crowd())
    taken.until_ns = 300 * US
    taken.announce("a")
    assert await taken.after(299) == 0
    assert await taken.after(1) == 1


async def test_turn_is_taken_before_a_later_request_runs_out_of_time() -> None:
    taken = CountedTurns(crowd())
    taken.announce("a")
    await iterations(2)
    taken.until_ns = 600 * US
    taken.announce("b")
    assert await taken.after(500) == 0
    assert await taken.after(100) == 1


async def test_turn_is_not_put_off_when_a_request_has_less_than_50_us_left() -> None:
    for left_ns, turns in ((50 * US - 1, 1), (50 * US, 0)):
        taken = CountedTurns(crowd())
        taken.until_ns = taken.clock.now_ns() + left_ns
        taken.announce("a")
        assert await taken.after(0) == turns


async def test_arrivals_put_a_turn_off_but_not_forever() -> None:
    taken = CountedTurns(crowd(1000))
    waited_us = 0
    while not taken.count and waited_us < 1_000_000:
        taken.announce("x")
        await taken.after(100)
        waited_us += 100
    assert taken.count == 1
    assert 5_000 < waited_us <= 10_100


async def test_requesting_a_turn_that_is_put_off_does_not_delay_it_further() -> None:
    taken = CountedTurns(crowd(1000))
    waited_us = 0
    while not taken.count and waited_us < 1_000_000:
        taken.announce("x")
        taken.turns.request()
        await taken.after(100)
        waited_us += 100
    assert taken.count == 1
    assert 5_000 < waited_us <= 10_100


async def test_request_announced_while_others_are_submitted_gets_the_next_turn() -> None:
    taken = CountedTurns(ArrivalModel())

    def submit(requests: list[str]) -> None:
        taken.submitted.extend(requests)
        if requests == ["a"]:
            taken.turns.announce(submit, "b")

    taken.turns.announce(submit, "a")
    taken.turns.take()
    assert (taken.submitted, taken.turns.announced) == (["a"], 1)
    await iterations(2)
    assert (taken.submitted, taken.turns.announced, taken.count) == (["a", "b"], 0, 2)


async def test_turn_taken_early_while_put_off_is_not_taken_again() -> None:
    taken = CountedTurns(crowd())
    taken.announce("a")
    await iterations(5)
    taken.turns.take()
    assert taken.submitted == ["a"]
    assert await taken.after(10_000) == 1


async def test_turn_taken_before_its_loop_iteration_is_not_taken_again() -> None:
    taken = CountedTurns(ArrivalModel())
    taken.announce("a")
    taken.turns.take()
    await iterations(10)
    assert (taken.count, taken.submitted) == (1, ["a"])


async def test_turn_for_which_all_have_come_waits_for_the_loop_though_the_alarm_rings_first() -> None:
    taken = CountedTurns(crowd(4))
    taken.announce("a")
    await iterations(2)
    taken.announce("b", "c", "d")
    taken.clock.advance(10_000 * US)
    assert (taken.count, taken.submitted) == (0, ["a"])
    await iterations(1)
    assert (taken.count, taken.submitted) == (1, ["a", "b", "c", "d"])


async def test_turn_is_taken_at_the_next_look_when_no_instance_is_left_to_keep_waiting() -> None:
    taken = CountedTurns(crowd())
    taken.announce("a")
    await iterations(2)
    taken.announce("b")
    taken.waiting = None
    assert await taken.after(499) == 0
    assert await taken.after(1) == 1


async def test_turn_is_taken_at_the_next_look_when_a_request_has_less_than_50_us_left() -> None:
    for left_ns, turns in ((50 * US - 1, 1), (50 * US, 0)):
        taken = CountedTurns(crowd())
        taken.announce("a")
        await iterations(2)
        taken.announce("b")
        taken.until_ns = taken.clock.now_ns() + 500 * US + left_ns
        assert await taken.after(500) == turns
        assert await taken.after(51) == 1


async def test_turn_after_one_taken_early_is_put_off_for_its_full_time() -> None:
    taken = CountedTurns(crowd())
    taken.announce("a")
    assert await taken.after(700) == 0
    taken.turns.take()
    taken.announce("b")
    assert await taken.after(700) == 1
    assert taken.budget_requests == 2
    assert await taken.after(100) == 2
    assert taken.submitted == ["a", "b"]


async def test_requests_announced_alternately_to_different_submitters_keep_their_order() -> None:
    taken = CountedTurns(ArrivalModel())
    seen: list[str] = []

    def submit(requests: list[str]) -> None:
        taken.submitted.extend(request.upper() for request in requests)
        seen.extend(requests)

    taken.announce("a")
    taken.turns.announce(submit, "b")
    taken.announce("c", "d")
    assert taken.turns.announced == 4
    await iterations(1)
    assert (taken.submitted, seen) == (["a", "B", "c", "d"], ["b"])
    assert taken.turns.announced == 0
