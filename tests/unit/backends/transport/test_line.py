"""Two ends of a line, in one process: turns, places that are given back, and what finds no room."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from backends.base import MISSING
from backends.transport.line import Line

SIZE = 1 << 20
LARGE = np.arange(20_000, dtype=np.float32)

Ends = tuple[Line, Line]


@pytest.fixture
def ends() -> Iterator[Ends]:
    here, remote = Line.pair(SIZE)
    there = Line.join(remote)
    yield here, there
    here.close()
    there.close()


def test_message_arrives_as_it_was_sent(ends: Ends) -> None:
    here, there = ends
    assert here.send(1, "text", (1, None), b"bytes")
    assert there.receive() == (1, "text", (1, None), b"bytes")


def test_arrays_arrive_and_their_place_is_free_after_the_answer(ends: Ends) -> None:
    here, there = ends
    here.send(1, here.pack([LARGE, MISSING, np.array([b"a", b""], object)]))
    message = there.receive()
    assert message is not None
    array, missing, texts = there.unpack(message[1])
    np.testing.assert_array_equal(array, LARGE)
    assert missing is MISSING
    assert texts.tolist() == [b"a", b""]
    there.send(2)
    assert here.receive() == (2,)
    assert here.used_bytes >= LARGE.nbytes, "the other end still holds the array"
    del array
    there.send(3)
    here.receive()
    assert here.used_bytes == 0


def test_arrays_that_find_no_room_ride_in_the_message(ends: Ends) -> None:
    here, there = ends
    huge = np.arange(SIZE, dtype=np.int64).reshape(2, -1).T
    texts = np.array([b"x" * SIZE, b"y"], object)
    answers = []

    def receive() -> None:
        message = there.receive()
        assert message is not None
        answers.extend(there.unpack(message[1]))

    thread = threading.Thread(target=receive)
    thread.start()
    here.send(1, here.pack([huge, texts, MISSING]))
    thread.join()
    np.testing.assert_array_equal(answers[0], huge)
    assert answers[1].tolist() == texts.tolist()
    assert answers[2] is MISSING
    assert here.used_bytes == 0


def test_end_that_is_gone_is_none_and_nothing_more_is_sent(ends: Ends) -> None:
    here, there = ends
    there.send(1, "last words")
    there.close()
    assert here.receive() == (1, "last words")
    assert here.receive() is None
    assert not here.send(1)


def test_hang_up_wakes_whoever_waits(ends: Ends) -> None:
    here, _ = ends
    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.append(here.receive()))
    thread.start()
    here.hang_up()
    thread.join()
    assert answers == [None]
    here.close()
    here.hang_up()


def test_message_that_cannot_be_sent_leaves_places_to_be_given_back(ends: Ends) -> None:
    here, there = ends
    here.send(1, here.pack([LARGE]))
    message = there.receive()
    assert message is not None
    there.unpack(message[1])
    with pytest.raises(ValueError, match="unmarshallable"):
        there.send(2, object())
    there.send(2)
    here.receive()
    assert here.used_bytes == 0
