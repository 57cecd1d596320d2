"""The pool of kept values against a list in which everything is looked for from the start."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline.server.bounded_pool import BoundedPool

OWNERS = st.sampled_from("ab")
KEYS = st.sampled_from([b"1", b"2", b"3", b"4"])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("find"), OWNERS, KEYS, st.just(0)),
        st.tuples(st.just("keep"), OWNERS, KEYS, st.integers(0, 12)),
        st.tuples(st.just("forget"), OWNERS, st.just(b""), st.just(0)),
    ),
    max_size=60,
)


class NaivePool:
    """Entries from the one used least recently to the latest."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.entries: list[tuple[str, bytes, int, int]] = []

    @property
    def used_bytes(self) -> int:
        return sum(size for *_, size in self.entries)

    def find(self, owner: str, key: bytes) -> int | None:
        for entry in self.entries:
            if entry[:2] == (owner, key):
                self.entries.remove(entry)
                self.entries.append(entry)
                return entry[2]
        return None

    def keep(self, owner: str, key: bytes, value: int, size_bytes: int) -> None:
        if size_bytes > self.max_bytes:
            return
        self.entries = [entry for entry in self.entries if entry[:2] != (owner, key)]
        while self.used_bytes + size_bytes > self.max_bytes:
            del self.entries[0]
        self.entries.append((owner, key, value, size_bytes))

    def forget(self, owner: str) -> None:
        self.entries = [entry for entry in self.entries if entry[0] != owner]


@given(st.integers(1, 20), STEPS)
def test_pool_agrees_with_a_naive_list(max_bytes: int, steps: list[tuple[str, str, bytes, int]]) -> None:
    pool, naive = BoundedPool[int](max_bytes), NaivePool(max_bytes)
    for number, (what, owner, key, size_bytes) in enumerate(steps):
        if what == "find":
            assert pool.find(owner, key) == naive.find(owner, key)
        elif what == "keep":
            pool.keep(owner, key, number, size_bytes)
            naive.keep(owner, key, number, size_bytes)
        else:
            pool.forget(owner)
            naive.forget(owner)
        assert pool.used_bytes == naive.used_bytes <= max_bytes
        assert len(pool) == len(naive.entries)
    for owner, key, value, _ in naive.entries:
        assert pool.find(owner, key) == value
