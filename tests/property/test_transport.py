"""The transport between processes against naive models: places never overlap, and streams and tensors arrive
unchanged."""

from __future__ import annotations

import mmap
import os
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from paceline.backends.spec import MISSING, Array
from paceline.backends.transport.memory import ALIGNMENT, Arena, SharedRegion, Window, new_region
from paceline.backends.transport.parcel import FrameReader, frame, pack, unpack

UNITS = 24


class ArenaMachine(RuleBasedStateMachine):
    """An arena, and beside it a list of the owner of each unit."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(UNITS * ALIGNMENT)
        self.owners: list[int | None] = [None] * UNITS

    def first_fit(self, units: int) -> int | None:
        return next(
            (at for at in range(UNITS - units + 1) if all(one is None for one in self.owners[at : at + units])), None
        )

    @rule(size=st.integers(1, UNITS * ALIGNMENT + 1))
    def allocate(self, size: int) -> None:
        units = -(-size // ALIGNMENT)
        expected = self.first_fit(units)
        start = self.arena.allocate(size)
        assert start == (None if expected is None else expected * ALIGNMENT)
        if expected is not None:
            self.owners[expected : expected + units] = [expected] * units

    @precondition(lambda self: any(one is not None for one in self.owners))
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        taken = sorted({one for one in self.owners if one is not None})
        at = data.draw(st.sampled_from(taken))
        assert self.arena.size_of(at * ALIGNMENT) == self.owners.count(at) * ALIGNMENT
        begin, end = self.arena.free(at * ALIGNMENT)
        self.owners = [None if one == at else one for one in self.owners]
        first, last = begin // ALIGNMENT, end // ALIGNMENT
        assert first <= at < last
        assert self.owners[first:last] == [None] * (last - first)
        assert first == 0 or self.owners[first - 1] is not None
        assert last == UNITS or self.owners[last] is not None

    @rule(start=st.integers(0, UNITS * ALIGNMENT))
    def free_what_is_nobodys(self, start: int) -> None:
        used = self.arena.used_bytes
        if start % ALIGNMENT or start // ALIGNMENT not in self.owners:
            try:
                self.arena.free(start)
            except KeyError:
                assert self.arena.used_bytes == used
            else:
                raise AssertionError("freed what was never allocated")

    @invariant()
    def used_is_what_is_owned(self) -> None:
        assert self.arena.used_bytes == ALIGNMENT * sum(one is not None for one in self.owners)


TestArena = ArenaMachine.TestCase
TestArena.settings = settings(deadline=None, stateful_step_count=40, max_examples=50)

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=20) | st.binary(max_size=200),
    lambda inner: st.lists(inner, max_size=4).map(tuple) | st.lists(inner, max_size=4),
    max_leaves=8,
)
messages = st.lists(st.tuples(st.integers(0, 20), values), max_size=5)


@given(st.lists(messages, max_size=6), st.data())
def test_frames_cut_anywhere_arrive_unchanged(batches: list[list[tuple[Any, ...]]], data: st.DataObject) -> None:
    stream = b"".join(frame(batch) for batch in batches)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    reader = FrameReader()
    read: list[tuple[Any, ...]] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        read += reader.feed(stream[start:end])
    assert read == [message for batch in batches for message in batch]


def region(size: int) -> tuple[SharedRegion, Window, list[int]]:
    descriptor = new_region(size)
    gone: list[int] = []
    window = Window(os.dup(descriptor))
    window.gone = lambda start, size: gone.append(start)
    return SharedRegion(descriptor), window, gone


plain = hnp.arrays(
    st.sampled_from([np.dtype(code) for code in ("?", "u1", "<u2", "<f2", "<f4", "<i8", "<f8")]),
    hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=40),
)
texts = hnp.arrays(
    np.dtype(object),
    hnp.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=6),
    elements=st.binary(max_size=40),
    fill=st.nothing(),
)
large = st.integers(1000, 5000).map(lambda count: np.arange(count, dtype=np.float64).reshape(-1, 1).T)
long_texts = st.integers(3000, 9000).map(lambda size: np.array([b"a" * size, b"", b"b" * size], object))
tensors = st.one_of(plain, texts, large, long_texts, st.just(MISSING), large.map(lambda array: array[:, ::2]))


@given(st.lists(tensors, max_size=5))
def test_tensors_arrive_unchanged_and_leave_no_memory_taken(arrays: list[Array]) -> None:
    memory, window, gone = region(2**20)
    parcel = pack(arrays, memory)
    assert parcel is not None
    (carried,) = FrameReader().feed(frame([(1, parcel)]))
    assert carried == (1, parcel)
    received = unpack(carried[1], window)
    for sent, got in zip(arrays, received, strict=True):
        assert (got is MISSING) == (sent is MISSING)
        assert got.dtype == sent.dtype
        np.testing.assert_array_equal(got, sent)
        assert got.dtype.hasobject or got is MISSING or not got.flags.writeable
    sent, got = (), None
    del received
    start, size_bytes, _ = parcel
    assert gone == ([start] if size_bytes else [])
    for start in gone:
        memory.free(start)
    assert memory.used_bytes == 0


@given(st.lists(st.tuples(st.integers(1, 60_000), st.integers(0, 7)), min_size=1, max_size=60))
def test_memory_never_exceeds_its_bound_over_many_cycles_and_is_free_again(sizes: list[tuple[int, int]]) -> None:
    bound = 256 * 1024
    memory, window, gone = region(bound)
    held: list[tuple[Array, Array, int]] = []
    for number, (size, keep) in enumerate(sizes):
        array = np.full(size, number % 251, np.uint8)
        parcel = pack([array], memory)
        assert memory.used_bytes <= bound
        if parcel is not None:
            (view,) = unpack(parcel, window)
            held.append((array, view, keep))
        for sent, got, _ in held:
            np.testing.assert_array_equal(got, sent)
        # Drop those that weren't to be kept.
        held = [entry for entry in held if entry[2]]
        held = held[-4:]
        sent = got = view = None  # type: ignore[assignment]
        while gone:
            memory.free(gone.pop())
    held.clear()
    while gone:
        memory.free(gone.pop())
    assert memory.used_bytes == 0
    assert memory.allocate(bound // mmap.PAGESIZE * mmap.PAGESIZE) == 0
