from __future__ import annotations

import asyncio

import pytest

from paceline.backends.transport.link import Gathering, Link
from paceline.backends.transport.parcel import Message


def waits(gathering: Gathering, messages: int = 1) -> int:
    """How many iterations messages wait if no more come."""
    quiet = 0
    while gathering.is_worth_waiting(messages, quiet, quiet):
        quiet += 1
        assert quiet < 1000
    return quiet


def used_to(*sizes: int) -> Gathering:
    gathering = Gathering()
    for size in sizes:
        gathering.on_sent(size)
    return gathering


def test_lone_messages_leave_at_once() -> None:
    assert waits(used_to()) == waits(used_to(*[1] * 100)) == 0


def test_messages_wait_some_iterations_for_more_after_others_were_sent_together() -> None:
    assert waits(used_to(2)) > 1


def test_messages_leave_at_once_again_after_many_lone_ones() -> None:
    assert waits(used_to(*[8] * 100)) > 1
    assert waits(used_to(*[8] * 100, *[1] * 100)) == 0


def test_wait_ends_with_enough_messages() -> None:
    assert waits(used_to(8, 8), messages=1000) == 0


def test_wait_ends_although_messages_keep_coming() -> None:
    gathering = used_to(8, 8)
    assert any(not gathering.is_worth_waiting(2, 0, iterations) for iterations in range(1000))


@pytest.mark.parametrize(("gathering", "together"), [(None, [1, 1, 1]), (used_to(8, 8), [3])], ids=["not", "gathering"])
async def test_link_gathers_messages_sent_in_the_next_iterations(
    gathering: Gathering | None, together: list[int]
) -> None:
    other, remote = Link.pair(1 << 20)
    one = Link.join(remote, gathering)
    got: list[list[Message]] = []
    one.start(lambda messages: None, lambda: None)
    other.start(got.append, lambda: None)
    try:
        for number in range(3):
            one.send((1, number))
            for _ in range(3):
                await asyncio.sleep(0)
        while sum(map(len, got)) < 3:
            await asyncio.sleep(0)
        assert [len(messages) for messages in got] == together
        assert [message for messages in got for message in messages] == [(1, 0), (1, 1), (1, 2)]
    finally:
        one.close()
        other.close()
