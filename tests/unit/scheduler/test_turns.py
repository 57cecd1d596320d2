"""When a turn is taken: once, when what arrives together has arrived, and how often that takes a thought."""

from __future__ import annotations

import asyncio
from itertools import count

from scheduler.company import Company
from scheduler.rests import Rests, Slept
from scheduler.turns import Turns

NEVER = Rests(lambda: 0)
"""Where time stands still, no iteration looks as if it had nothing to do."""


class Taken:
    """Turns that are counted, of a batcher where `waiting` requests wait, besides those announced, for an instance that
    may be kept waiting; None: there is no such instance."""

    def __init__(self, company: Company, waiting: int | None = 0, rest: Rests | None = None) -> None:
        self.waiting = waiting
        self.count = self.thoughts = 0
        self.submitted: list[str] = []
        self.turns = Turns(self._take, self._kept_waiting, company, rest or NEVER)
        self.turns.start()

    def announce(self, *requests: str) -> None:
        for request in requests:
            self.turns.announce(self.submitted.extend, request)

    def _take(self) -> None:
        self.turns.begin()
        self.count += 1

    def _kept_waiting(self, announced: int) -> int | None:
        self.thoughts += 1
        return None if self.waiting is None else self.waiting + announced


def crowd(requests: int = 32) -> Company:
    """After many batches of that many."""
    company = Company()
    for _ in range(100):
        company.on_start(requests, 0, 0)
        company.on_end(requests, 0)
    return company


async def iterations(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_turn_without_company_is_taken_in_the_next_iteration() -> None:
    taken = Taken(Company())
    taken.announce("a", "b")
    assert taken.count == 0
    await iterations(1)
    assert (taken.count, taken.submitted) == (1, ["a", "b"])


async def test_turn_is_asked_for_many_times_and_taken_once() -> None:
    taken = Taken(Company())
    for _ in range(5):
        taken.turns.request()
        taken.turns.arrived()
    await iterations(100)
    assert taken.count == 1


async def test_turn_is_put_off_for_company_and_taken_when_nobody_comes() -> None:
    taken = Taken(crowd())
    taken.announce("a")
    await iterations(10)
    assert taken.count == 0
    await iterations(90)
    assert (taken.count, taken.submitted) == (1, ["a"])


async def test_turn_is_taken_when_all_are_there() -> None:
    taken = Taken(crowd(4))
    taken.announce("a", "b", "c")
    await iterations(2)
    assert taken.count == 0
    taken.announce("d")
    await iterations(2)
    assert (taken.count, taken.submitted) == (1, ["a", "b", "c", "d"])


async def test_turn_is_not_put_off_without_an_instance_to_be_kept_waiting() -> None:
    taken = Taken(crowd(), waiting=None)
    taken.announce("a")
    await iterations(1)
    assert taken.count == 1


async def test_waiting_for_company_takes_a_thought_when_somebody_comes_and_else_none() -> None:
    taken = Taken(crowd())
    for request in "abc":
        taken.announce(request)
        await iterations(10)
    assert (taken.count, taken.thoughts) == (0, 3)


async def test_thread_rests_while_a_crowd_is_waited_for_and_no_work_is_left_and_that_takes_fewer_iterations() -> None:
    clock, slept = count(1_000, 2_000), list[float]()
    taken = Taken(crowd(), rest=Rests(lambda: next(clock), slept.append, Slept()))
    taken.announce("a")
    await iterations(12)
    assert (taken.count, taken.submitted) == (1, ["a"])
    assert 3 < len(slept) < 10


async def test_thread_does_not_rest_for_a_few() -> None:
    clock, slept = count(1_000, 2_000), list[float]()
    taken = Taken(crowd(2), rest=Rests(lambda: next(clock), slept.append, Slept()))
    taken.announce("a")
    await iterations(100)
    assert (taken.count, slept) == (1, [])


async def test_arrivals_put_a_turn_off_but_not_without_end() -> None:
    taken = Taken(crowd(1000))
    for _ in range(500):
        taken.announce("x")
        await iterations(1)
        if taken.count:
            break
    assert taken.count == 1
    assert 100 < len(taken.submitted) <= 402


async def test_turn_that_is_taken_while_it_is_put_off_is_not_taken_again() -> None:
    taken = Taken(crowd())
    taken.announce("a")
    await iterations(5)
    taken.turns.begin()
    assert taken.submitted == ["a"]
    await iterations(200)
    assert taken.count == 0


async def test_turn_asked_for_again_while_another_one_was_put_off_has_its_own_time() -> None:
    taken = Taken(crowd())
    taken.announce("a")
    await iterations(5)
    taken.turns.begin()
    taken.announce("b")
    await iterations(20)
    assert (taken.count, taken.thoughts) == (0, 2)
    await iterations(200)
    assert (taken.count, taken.submitted) == (1, ["a", "b"])


async def test_what_is_announced_in_turns_to_different_submitters_keeps_its_order() -> None:
    taken = Taken(Company())
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
