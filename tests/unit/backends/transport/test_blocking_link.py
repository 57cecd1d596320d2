"""Two ends of a link in one process: messages in turns, places that are given back, and arrays that don't fit."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from paceline.backends.spec import MISSING, Array
from paceline.backends.transport.blocking_link import BlockingLink

SIZE = 1 << 20
LARGE = np.arange(20_000, dtype=np.float32)
WIDE = np.arange(40_000, dtype=np.float32)
WORTH_BYTES = 128 * 1024
"""From this size on, an array may have a buffer."""

Ends = tuple[BlockingLink, BlockingLink]


@pytest.fixture
def ends() -> Iterator[Ends]:
    here, remote = BlockingLink.pair(SIZE)
    there = BlockingLink.join(remote)
    yield here, there
    here.close()
    there.close()


def test_message_arrives_unchanged(ends: Ends) -> None:
    here, there = ends
    assert here.send(1, "text", (1, None), b"bytes")
    assert there.receive() == (1, "text", (1, None), b"bytes")


def test_messages_that_come_together_are_received_in_turn(ends: Ends) -> None:
    here, there = ends
    for number in range(3):
        here.send(number)
    assert [there.receive() for _ in range(3)] == [(0,), (1,), (2,)]
    here.close()
    assert there.receive() is None


def test_arrays_arrive_and_their_place_is_free_after_they_are_dropped_and_answered(ends: Ends) -> None:
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


def test_arrays_that_do_not_fit_into_memory_are_sent_in_the_message(ends: Ends) -> None:
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


def test_closed_end_is_received_as_none_and_nothing_more_is_sent(ends: Ends) -> None:
    here, there = ends
    there.send(1, "last words")
    there.close()
    assert here.receive() == (1, "last words")
    assert here.receive() is None
    assert not here.send(1)


def test_hang_up_wakes_a_waiting_thread(ends: Ends) -> None:
    here, _ = ends
    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.append(here.receive()))
    thread.start()
    here.hang_up()
    thread.join()
    assert answers == [None]
    here.close()
    here.hang_up()


def test_places_are_still_given_back_after_a_message_that_cannot_be_sent(ends: Ends) -> None:
    here, there = ends
    here.send(1, here.pack([LARGE]))
    message = there.receive()
    assert message is not None
    there.unpack(message[1])
    parcel = there.pack([LARGE])
    with pytest.raises(ValueError, match="unmarshallable"):
        there.send(2, parcel, object(), parcel=parcel)
    assert there.used_bytes == 0
    there.send(2)
    here.receive()
    assert here.used_bytes == 0


def arrived(ends: Ends, *arrays: Array) -> tuple[Array, ...]:
    """`arrays` as the other end gets them."""
    here, there = ends
    here.send(1, here.pack(arrays))
    message = there.receive()
    assert message is not None
    return there.unpack(message[1])


def made_there(link: BlockingLink, number: int, value: float = 1.0) -> Array:
    buffer = link.buffer(number, WIDE.dtype, WIDE.shape)
    assert buffer is not None
    buffer[...] = WIDE * value
    return buffer


def test_arrays_made_in_buffers_arrive_beside_others_and_take_no_second_place(ends: Ends) -> None:
    here, there = ends
    first, second = made_there(here, 0), made_there(here, 1, 2.0)
    taken = here.used_bytes
    small = np.arange(3)
    got = arrived(ends, first, small, MISSING, second, WIDE * 3)
    assert taken >= 2 * WIDE.nbytes
    assert here.used_bytes == taken + taken // 2, "a place for what was in none"
    for array, expected in zip(got, [WIDE, small, MISSING, WIDE * 2, WIDE * 3], strict=True):
        np.testing.assert_array_equal(array, expected)
    assert not got[0].flags.writeable
    del array
    kept, got = got[0], ()
    there.send(2)
    here.receive()
    assert here.used_bytes == taken // 2, "each place is given back by itself"
    del kept
    there.send(2)
    here.receive()
    assert here.used_bytes == 0


def test_buffer_is_not_reused_as_long_as_the_other_end_has_it(ends: Ends) -> None:
    here, _ = ends
    (first,) = arrived(ends, made_there(here, 0))
    (second,) = arrived(ends, made_there(here, 0, 2.0))
    np.testing.assert_array_equal(first, WIDE)
    np.testing.assert_array_equal(second, WIDE * 2)


def test_unused_buffer_is_freed(ends: Ends) -> None:
    here, _ = ends
    made_there(here, 0)
    made_there(here, 1)
    assert made_there(here, 0) is not None, "in the place of the first"
    assert here.used_bytes < 3 * WIDE.nbytes
    here.pack([np.arange(3)])
    assert here.used_bytes == 0


def test_buffers_are_freed_if_an_array_beside_them_cannot_be_packed(ends: Ends) -> None:
    here, _ = ends
    buffer = made_there(here, 0)
    with pytest.raises(TypeError):
        here.pack([buffer, np.array([1], object)])
    assert here.used_bytes == 0


def test_buffers_are_sent_in_the_message_beside_an_array_that_does_not_fit(ends: Ends) -> None:
    here, there = ends
    buffer = made_there(here, 0)
    huge = np.zeros(SIZE, np.uint8)
    got: list[Array] = []
    thread = threading.Thread(target=lambda: got.extend(there.unpack((there.receive() or (0,))[1])))
    thread.start()
    here.send(1, here.pack([buffer, huge]))
    thread.join()
    assert here.used_bytes == 0
    np.testing.assert_array_equal(got[0], WIDE)
    np.testing.assert_array_equal(got[1], huge)


@pytest.mark.parametrize(
    ("dtype", "shape"),
    [
        (np.uint8, (WORTH_BYTES - 1,)),
        (np.float32, (WORTH_BYTES // 4 - 1,)),
        (object, (WORTH_BYTES,)),
        (np.uint8, (SIZE + 1,)),
        (np.uint8, (0, WORTH_BYTES)),
    ],
)
def test_arrays_that_are_small_or_of_objects_or_too_large_get_no_buffer(
    ends: Ends, dtype: type, shape: tuple[int, ...]
) -> None:
    here, _ = ends
    assert here.buffer(0, np.dtype(dtype), shape) is None
    assert here.used_bytes == 0
    buffer = here.buffer(0, np.dtype(np.float32), (2, WORTH_BYTES // 8))
    assert buffer is not None
    assert (buffer.dtype, buffer.shape) == (np.float32, (2, WORTH_BYTES // 8))


def test_released_buffers_are_free_and_packed_as_any_array(ends: Ends) -> None:
    here, _ = ends
    buffer = made_there(here, 0)
    here.release_buffers()
    assert here.used_bytes == 0
    (got,) = arrived(ends, buffer)
    np.testing.assert_array_equal(got, WIDE)


def test_buffers_that_are_not_packed_leave_their_place_to_arrays_that_are() -> None:
    here, remote = BlockingLink.pair(SIZE)
    there = BlockingLink.join(remote)
    try:
        assert here.buffer(0, np.dtype(np.uint8), (SIZE - WORTH_BYTES,)) is not None
        (got,) = arrived((here, there), WIDE)
        np.testing.assert_array_equal(got, WIDE)
        assert WIDE.nbytes <= here.used_bytes < SIZE // 2
    finally:
        here.close()
        there.close()


def test_buffers_whose_pages_are_released_when_freed_still_arrive_in_the_message() -> None:
    """Beyond the first 64 MiB, free memory has no pages any more."""
    here, remote = BlockingLink.pair(130 * 2**20)
    there = BlockingLink.join(remote)
    try:
        here.pack([np.zeros(70 * 2**20, np.uint8)])
        buffer = made_there(here, 0)
        huge = np.ones(100 * 2**20, np.uint8)
        got: list[Array] = []
        thread = threading.Thread(target=lambda: got.extend(there.unpack((there.receive() or (0,))[1])))
        thread.start()
        here.send(1, here.pack([buffer, huge]))
        thread.join()
        np.testing.assert_array_equal(got[0], WIDE)
        assert got[1].all()
    finally:
        here.close()
        there.close()
