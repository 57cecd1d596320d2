"""The waiting requests of one shape key, in the order in which they will be served.

Lives here: the order, and the walk that looks for a batch worth releasing. Must not: deadlines, limits, other lanes.

The order is one number, `Entry.order`: priority level first, then whether the queue timeout has passed, then arrival.
So "before" means the same within a lane and between the heads of two lanes. A section is all entries of the same level
for which the timeout has passed, or all for which it hasn't. A lane relies on this: the last to arrive has the highest
order of its section.

So an entry's order changes only while it is in no lane: `remove` finds it by its order. It then goes back with its new
order, by `add` if that makes it the last of its section, else by `put_back`, which sorts it in.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from itertools import chain, islice
from typing import Generic, TypeVar

__all__ = ["Entry", "Lane", "Watch", "order_of"]

T = TypeVar("T")

_SECTION_BITS = 64
"""The low bits of an order hold the arrival number. Above them is a bit for demoted entries, and above that the
level."""


# hot path
def order_of(level: int, arrived: int, *, demoted: bool = False) -> int:
    """The order of the request that arrived as number `arrived`. If `demoted`, it comes after the others of its
    level."""
    return (2 * level + demoted << _SECTION_BITS) + arrived


class Watch(Generic[T]):
    """Stands for an entry in the heap of deadlines. What stays there after the entry has left is then small, whereas
    the entry would keep a request's tensors alive."""

    __slots__ = ("entry",)

    def __init__(self, entry: Entry[T]) -> None:
        self.entry: Entry[T] | None = entry

    def __lt__(self, other: Watch[T]) -> bool:
        """Called only for equal rank and token: those of a put-back entry's watch and of the dead one left from
        before."""
        return False


class Entry(Generic[T]):
    """One waiting request. `lane` is None once it has left. `level` is what it is bounded and counted by while it
    waits; `order` alone decides when it is served.

    `act_at_ns` is when the queue has to do something about it: at its queue timeout, or at `rpc_deadline_ns`, when its
    caller gives up.
    """

    __slots__ = (
        "act_at_ns",
        "enqueued_ns",
        "lane",
        "level",
        "order",
        "payload",
        "rows",
        "rpc_deadline_ns",
        "size_bytes",
        "watch",
    )

    def __init__(
        self,
        payload: T,
        rows: int,
        size_bytes: int,
        level: int,
        order: int,
        enqueued_ns: int,
        act_at_ns: int,
        rpc_deadline_ns: int,
    ) -> None:
        self.payload = payload
        self.rows = rows
        self.size_bytes = size_bytes
        self.level = level
        self.order = order
        self.enqueued_ns = enqueued_ns
        self.act_at_ns = act_at_ns
        self.rpc_deadline_ns = rpc_deadline_ns
        self.watch: Watch[T] | None = None
        self.lane: Lane[T] | None = None

    def unwatch(self) -> None:
        """Stop watching its deadline: nothing has to be done about it any more."""
        if self.watch is not None:
            self.watch.entry = None
            self.watch = None


class _Section(OrderedDict[int, Entry[T]]):
    """Entries of one level, all demoted or none, by order; `rows` is how many rows they have together."""

    __slots__ = ("rows",)

    def __init__(self, *entries: Entry[T]) -> None:
        super().__init__((entry.order, entry) for entry in entries)
        self.rows = sum(entry.rows for entry in entries)


class Lane(Generic[T]):
    """Entries of one shape key by ascending order.

    They are kept in sections, in each of which new entries go to the end. add and remove are O(1) plus the bisection
    for a section's first entry. An entry that found the lane empty is kept as `only`, without a section: where shapes
    are many, most lanes never see a second one.

    The walk adds entries from the front while their rows stay within the largest preferred size. `prefix` counts the
    entries that may leave at once (0: none yet); `closed` says that further entries at the end can't change that.

    `ready_token` and `due_token`, if not 0, identify the lane's live item in the heap of ready lanes and of due ones.
    In the former it is filed by `filed_order`, the order of its head.
    """

    __slots__ = (
        "closed",
        "due_token",
        "filed_order",
        "key",
        "oldest_ns",
        "only",
        "prefix",
        "ready_token",
        "requests",
        "rows",
        "sections",
        "sections_order",
        "walked",
        "walked_order",
        "walked_rows",
    )

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self.rows = self.requests = 0
        self.only: Entry[T] | None = None
        self.sections: dict[int, _Section[T]] = {}
        self.sections_order: list[int] = []
        self.restart()

    def __iter__(self) -> Iterator[Entry[T]]:
        if self.only is not None:
            return iter((self.only,))
        return chain.from_iterable(self.sections[section].values() for section in self.sections_order)

    @property
    def head(self) -> Entry[T]:
        """The entry to be served first."""
        if self.only is not None:
            return self.only
        return next(iter(self.sections[self.sections_order[0]].values()))

    def rows_before(self, level: int) -> int:
        """Rows served before a request of `level` that arrives now; the demoted entries of its own level come after
        it."""
        last = order_of(level, 0) >> _SECTION_BITS
        if self.only is not None:
            return self.rows if self.only.order >> _SECTION_BITS <= last else 0
        rows = 0
        for section in self.sections_order:
            if section > last:
                break
            rows += self.sections[section].rows
        return rows

    def add(self, entry: Entry[T]) -> None:
        if not self.requests:
            self.only = entry
        else:
            if self.only is not None:
                self._file(self.only)
                self.only = None
            self._file(entry)
        self.requests += 1
        self.rows += entry.rows

    # hot path
    def add_all(self, entries: Sequence[Entry[T]]) -> None:
        """Like `add`, for several entries of equal level and rows that arrived one after the other."""
        first, *others = entries
        self.add(first)
        if not others:
            return
        if self.only is not None:
            self._file(self.only)
            self.only = None
        section = self.sections[first.order >> _SECTION_BITS]
        for entry in others:
            section[entry.order] = entry
        rows = len(others) * first.rows
        section.rows += rows
        self.requests += len(others)
        self.rows += rows

    def put_back(self, entries: Sequence[Entry[T]]) -> None:
        """Add entries that were here before; whatever their order, they are likely to belong at the front."""
        for entry in reversed(entries):
            self.add(entry)
            if self.only is None:
                self._sort_in(entry)

    def remove(self, entry: Entry[T]) -> None:
        if entry is self.only:
            self.only = None
        else:
            self._unfile(entry)
        self.requests -= 1
        self.rows -= entry.rows

    def _file(self, entry: Entry[T]) -> None:
        section = entry.order >> _SECTION_BITS
        entries = self.sections.get(section)
        if entries is None:
            entries = self.sections[section] = _Section()
            insort(self.sections_order, section)
        entries[entry.order] = entry
        entries.rows += entry.rows

    def _sort_in(self, entry: Entry[T]) -> None:
        """Move the entry, the last one of its section, to its place there."""
        section = entry.order >> _SECTION_BITS
        entries = self.sections[section]
        entries.move_to_end(entry.order, last=False)
        if any(order < entry.order for order in islice(entries, 1, 2)):
            self.sections[section] = _Section(*(entries[order] for order in sorted(entries)))

    def _unfile(self, entry: Entry[T]) -> None:
        section = entry.order >> _SECTION_BITS
        entries = self.sections[section]
        del entries[entry.order]
        entries.rows -= entry.rows
        if not entries:
            del self.sections[section]
            self.sections_order.remove(section)

    def restart(self) -> None:
        """Forget what the walk found: the first entries have changed."""
        self.ready_token = self.due_token = self.filed_order = 0
        self.walked = self.walked_rows = self.prefix = self.oldest_ns = 0
        self.walked_order = -1
        self.closed = False

    def walk(self, preferred: frozenset[int], max_preferred: int, max_requests: int) -> None:
        """Walk from the front until the lane is closed or its entries end."""
        self.restart()
        for entry in self:
            self.walk_over(entry, preferred, max_preferred, max_requests)
            if self.closed:
                break

    def walk_over(self, entry: Entry[T], preferred: frozenset[int], max_preferred: int, max_requests: int) -> None:
        """Extend the walk by one entry. Triton's rule: the largest preferred prefix within reach is taken; if the next
        request would overshoot the largest preferred size before any was met, what precedes it goes without it."""
        rows = self.walked_rows + entry.rows
        self.walked_order = entry.order
        if self.walked and rows > max_preferred:
            self.closed = True
            self.prefix = self.prefix or self.walked
            return
        if not self.walked or entry.enqueued_ns < self.oldest_ns:
            self.oldest_ns = entry.enqueued_ns
        self.walked += 1
        self.walked_rows = rows
        if rows in preferred:
            self.prefix = self.walked
        if rows >= max_preferred or self.walked == max_requests:
            self.closed = True
            self.prefix = self.walked
