"""Two ends of a link on one event loop: when messages and ends are reported, and what becomes of memory."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import weakref
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from paceline.backends.transport.link import FIRST_KIND, Link
from paceline.backends.transport.memory import ALIGNMENT
from paceline.backends.transport.parcel import Message
from tests.polling import eventually_async

SIZE = 1 << 20
HELLO = FIRST_KIND
LARGE = np.arange(20_000, dtype=np.float32)


@dataclass
class End:
    link: Link
    got: list[Message] = field(default_factory=list)
    wakes: int = 0
    ended: int = 0

    def start(self) -> None:
        self.link.start(self.on_messages, self.on_end)

    def on_messages(self, messages: list[Message]) -> None:
        self.wakes += 1
        self.got += messages

    def on_end(self) -> None:
        self.ended += 1


Pair = tuple[End, End]


@pytest.fixture
async def ends() -> AsyncIterator[Pair]:
    here, remote = Link.pair(SIZE)
    pair = End(here), End(Link.join(remote))
    for end in pair:
        end.start()
    yield pair
    for end in pair:
        end.link.close()


async def test_invalid_message_is_reported_and_all_others_arrive(ends: Pair) -> None:
    here, there = ends
    told: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["exception"]))
    for value in (0, 1, object(), 2):
        here.link.send((HELLO, value))
    await asyncio.sleep(0)
    assert [type(one) for one in told] == [ValueError]
    here.link.send((HELLO, 3))
    await eventually_async(lambda: len(there.got) >= 4, "all but one message")
    assert there.got == [(HELLO, value) for value in range(4)]


async def test_messages_of_one_iteration_arrive_together_and_in_order(ends: Pair) -> None:
    here, there = ends
    for number in range(100):
        here.link.send((HELLO, number, "text", b"bytes", (1, None, True)))
    await eventually_async(lambda: len(there.got) == 100, "all messages")
    assert there.wakes == 1
    assert there.got == [(HELLO, number, "text", b"bytes", (1, None, True)) for number in range(100)]


async def test_messages_larger_than_any_buffer_arrive_in_both_directions_at_once(ends: Pair) -> None:
    here, there = ends
    data = os.urandom(8 << 20)
    for end in ends:
        end.link.send((HELLO, data))
        end.link.send((HELLO, b"after"))
    await eventually_async(lambda: len(here.got) == len(there.got) == 2, "both messages at both ends")
    assert here.got == there.got == [(HELLO, data), (HELLO, b"after")]
    assert here.link.unsent_bytes == 0


async def test_unsent_bytes_are_those_that_the_other_end_has_not_accepted(ends: Pair) -> None:
    here, there = ends
    slow = here.link
    slow.send((HELLO, bytes(32 << 20)))
    slow.send((HELLO, b"said"), 4)
    assert slow.unsent_bytes == 4
    await asyncio.sleep(0)
    assert slow.unsent_bytes > 1 << 20
    await eventually_async(lambda: len(there.got) == 2, "both messages")
    assert slow.unsent_bytes == 0


async def test_dropped_array_gives_its_place_back(ends: Pair) -> None:
    here, there = ends
    parcel = here.link.pack([LARGE])
    assert parcel is not None
    assert here.link.used_bytes >= LARGE.nbytes
    here.link.send((HELLO, parcel))
    await eventually_async(lambda: there.got, "the parcel")
    (array,) = there.link.unpack(there.got.pop()[1])
    row = array[10:20].reshape(2, 5).T
    del array
    await asyncio.sleep(0.01)
    assert here.link.used_bytes >= LARGE.nbytes
    np.testing.assert_array_equal(row, LARGE[10:20].reshape(2, 5).T)
    del row
    await eventually_async(lambda: here.link.used_bytes == 0, "the place given back")
    assert here.got == []


async def test_shifted_array_begins_beside_a_multiple_of_the_alignment(ends: Pair) -> None:
    here, there = ends
    parcel = here.link.pack([LARGE], 24)
    assert parcel is not None
    (array,) = there.link.unpack(parcel)
    assert array.ctypes.data % ALIGNMENT == 24
    np.testing.assert_array_equal(array, LARGE)


async def test_array_dropped_on_another_thread_gives_its_place_back(ends: Pair) -> None:
    here, there = ends
    for _ in range(50):
        parcel = here.link.pack([LARGE])
        assert parcel is not None
        held = list(there.link.unpack(parcel))
        thread = threading.Thread(target=held.clear)
        thread.start()
        await asyncio.to_thread(thread.join)
    await eventually_async(lambda: here.link.used_bytes == 0, "all places given back")


async def test_pack_without_room_is_none_and_uses_no_memory(ends: Pair) -> None:
    here, there = ends
    assert here.link.pack([np.zeros(here.link.size_bytes + 1, np.uint8)]) is None
    most = here.link.pack([np.zeros(here.link.size_bytes - 64, np.uint8)])
    assert most is not None
    assert here.link.pack([LARGE]) is None
    assert here.link.pack([np.zeros(8, np.uint8)]) is not None, "a small tensor needs no room"
    there.link.unpack(most)
    await eventually_async(lambda: here.link.used_bytes == 0, "the place given back")
    assert here.link.pack([LARGE]) is not None


async def test_pack_of_objects_other_than_bytes_raises_and_uses_no_memory(ends: Pair) -> None:
    here, _ = ends
    with pytest.raises(TypeError):
        here.link.pack([LARGE, np.array([b"a", "b"], object)])
    with pytest.raises(TypeError):
        here.link.pack([np.array([1], object)])
    assert here.link.used_bytes == 0


async def test_closing_of_one_end_is_reported_to_the_other_once_after_its_messages(ends: Pair) -> None:
    here, there = ends
    here.link.send((HELLO, 1))
    await asyncio.sleep(0)
    here.link.close()
    await eventually_async(lambda: there.ended, "the end noticed")
    assert there.got == [(HELLO, 1)]
    assert (here.ended, there.ended) == (0, 1)
    there.link.send((HELLO, 2))
    await asyncio.sleep(0.01)
    there.link.close()
    assert (here.ended, there.ended) == (0, 1)


async def test_arrays_outlive_a_link_that_ends(ends: Pair) -> None:
    here, there = ends
    parcel = here.link.pack([LARGE])
    assert parcel is not None
    (array,) = there.link.unpack(parcel)
    here.link.close()
    there.link.close()
    np.testing.assert_array_equal(array, LARGE)
    del array


async def test_closed_link_is_freed_without_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        here, remote = Link.pair(SIZE)
        there = Link.join(remote)
        for link in (here, there):
            link.start(lambda messages: None, lambda: None)
        here.close()
        there.close()
        await asyncio.sleep(0.01)
        last = weakref.ref(here), weakref.ref(there)
        del here, there, link
        await asyncio.sleep(0)
        assert [one() for one in last] == [None, None]
    finally:
        gc.enable()


async def test_freed_memory_is_returned_to_the_system() -> None:
    here, remote = Link.pair(256 << 20)
    region = os.dup(remote.other)
    there = Link.join(remote)
    for link in (here, there):
        link.start(lambda messages: None, lambda: None)

    def backed_bytes() -> int:
        return os.fstat(region).st_blocks * 512

    assert backed_bytes() == 0, "an empty region is a bound and costs nothing"
    for parcel in [here.pack([np.ones(10 << 20, np.uint8)]) for _ in range(20)]:
        assert parcel is not None
        assert backed_bytes() >= 10 << 20
        there.unpack(parcel)
    await eventually_async(lambda: here.used_bytes == 0, "all places given back")
    assert backed_bytes() <= 64 << 20
    here.close()
    there.close()
    os.close(region)
