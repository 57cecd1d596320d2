"""Which generations an instance steps together, and how many tokens of prompts it computes in between.

A *row* is a generation that has a place. It has `total` tokens, its prompt's and those chosen since, of which the
keys and values of `held` are kept. An iteration executes each group of rows that lack one token once, and then pieces
of the prompts of others, each by itself. Rows that share a group are filled up to the longest of them.

Lives here: who has a place, who shares a group, who is put out when keys and values need too much memory, and when that
comes back. Must not: tensors, clocks, threads. The rules: the oldest row always goes on, so something always ends; a
row is put out only if older ones need its memory; no iteration computes more tokens of prompts than it may, unless
these can't be cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["Iteration", "Iterations", "StepCosts"]

_SLACK_TOKENS = 16
"""For each row, so many more tokens have to fit before another one has a place: else that would soon be put out."""


class Iteration(NamedTuple):
    """What to do next: forget what is kept of rows that were `put_out`, compute the next token of each of `groups`, and
    then `pieces`: so many further tokens of one row each."""

    put_out: Sequence[int]
    groups: Sequence[tuple[int, ...]]
    pieces: Sequence[tuple[int, int]]


class _Row:
    __slots__ = ("held", "is_out", "total")

    def __init__(self, total: int) -> None:
        self.total = total
        self.held = 0
        self.is_out = False

    @property
    def lacks_one(self) -> bool:
        return 0 < self.held == self.total - 1


class Iterations:
    """At most `most_rows` rows, which keep at most `most_tokens` tokens, fill included, unless one alone needs more;
    `piece_tokens` tokens of prompts an iteration. `pads`: rows of different lengths may share a group. `in_pieces`:
    prompts may be computed in pieces, else the last one that begins in an iteration may have more than `piece_tokens`.
    `costs` is told by others what groups cost."""

    def __init__(
        self,
        most_rows: int,
        most_tokens: int,
        piece_tokens: int,
        costs: StepCosts,
        *,
        pads: bool = True,
        in_pieces: bool = True,
    ) -> None:
        self._most_rows = most_rows
        self._most_tokens = most_tokens
        self._piece_tokens = piece_tokens
        self._costs = costs
        self._pads = pads
        self._in_pieces = in_pieces
        # The oldest first; those that are out keep their age.
        self._rows: dict[int, _Row] = {}
        # Of all that aren't out. One that lacks more than a token is alone in its group.
        self._groups: list[list[int]] = []

    def __len__(self) -> int:
        return len(self._rows)

    def has_room(self, tokens: int) -> bool:
        """Whether a generation whose prompt has so many may have a place. Whoever was put out comes first."""
        return (
            len(self._rows) < self._most_rows
            and self._fits(tokens)
            and not any(row.is_out for row in self._rows.values())
        )

    def enter(self, row: int, tokens: int) -> None:
        self._rows[row] = _Row(tokens)
        self._groups.append([row])

    def leave(self, row: int) -> None:
        if not self._rows.pop(row).is_out:
            self._ungroup(row)

    def computed(self, row: int, tokens: int) -> bool:
        """So many more of its tokens are kept. Returns whether all are, so that another is to be chosen."""
        one = self._rows[row]
        one.held += tokens
        return one.held == one.total

    def extended(self, row: int) -> None:
        """Another token was chosen."""
        self._rows[row].total += 1

    def next(self) -> Iteration:
        """What to execute now; nothing only if there is no row."""
        self._costs.tick()
        put_out = self._put_out()
        if not put_out:
            self._bring_back()
        self._split()
        self._join()
        groups = [tuple(group) for group in self._groups if self._rows[group[0]].lacks_one]
        pieces, left = list[tuple[int, int]](), self._piece_tokens
        for number, row in self._rows.items():
            if left and not (row.is_out or row.lacks_one):
                lacking = row.total - row.held
                pieces.append((number, min(left, lacking) if self._in_pieces else lacking))
                left = max(0, left - lacking)
        return Iteration(put_out, groups, pieces)

    def _needed(self) -> int:
        """How many tokens have to be kept after the next step, with the whole prompts of those that have begun."""
        return sum(len(group) * max(self._rows[row].total for row in group) for group in self._groups)

    def _fits(self, tokens: int) -> bool:
        """Whether another row of so many has room, and all have some for more. A lone one has, in any case."""
        inside = sum(map(len, self._groups))
        return not inside or self._needed() + tokens + _SLACK_TOKENS * (inside + 1) <= self._most_tokens

    def _put_out(self) -> list[int]:
        put_out: list[int] = []
        youngest = [number for number, row in self._rows.items() if not row.is_out]
        while self._needed() > self._most_tokens and len(youngest) > 1:
            put_out.append(number := youngest.pop())
            self._ungroup(number)
            self._rows[number].is_out, self._rows[number].held = True, 0
        return put_out

    def _bring_back(self) -> None:
        for number, row in self._rows.items():
            if row.is_out:
                if not self._fits(row.total):
                    return
                row.is_out = False
                self._groups.append([number])

    def _ungroup(self, row: int) -> None:
        for group in self._groups:
            if row in group:
                group.remove(row)
                if not group:
                    self._groups.remove(group)
                return

    def _longest(self, group: Sequence[int]) -> int:
        return max(self._rows[row].held for row in group)

    def _split(self) -> None:
        """Halve groups that cost more together than their halves do, or of which that isn't known yet."""
        for group in [group for group in self._groups if len(group) > 1]:
            if self._costs.splits(len(group), self._longest(group)):
                group.sort(key=lambda row: self._rows[row].held)
                self._groups.append(group[len(group) // 2 :])
                del group[len(group) // 2 :]
                self._costs.keep_apart()

    def _join(self) -> None:
        """Join groups that cost less together. One pass over neighbours by length: what fill costs is then least."""
        going = [group for group in self._groups if self._rows[group[0]].lacks_one]
        going.sort(key=self._longest)
        kept = going[:1]
        for group in going[1:]:
            last = kept[-1]
            short, long = self._longest(last), self._longest(group)
            rows = len(last) + len(group)
            may = rows <= self._most_rows and (self._pads or short == long)
            if may and self._costs.joins(len(last), short, len(group), long) and self._fits_joined(last, group):
                last += group
                self._groups = [one for one in self._groups if one is not group]
            else:
                kept.append(group)

    def _fits_joined(self, one: Sequence[int], other: Sequence[int]) -> bool:
        """Whether what filling up adds can be kept."""
        sizes = [max(self._rows[row].total for row in group) for group in (one, other)]
        added = max(sizes) * (len(one) + len(other)) - sizes[0] * len(one) - sizes[1] * len(other)
        return self._needed() + added <= self._most_tokens or not added


class _Cost:
    __slots__ = ("count", "last", "row_ns")

    def __init__(self) -> None:
        self.count = self.last = 0
        self.row_ns = 0.0


_PROOFS = 3
"""So many measurements make a cost known. The first of a shape includes what is prepared once."""
_FORGET = 4_096
"""After so many iterations, what was measured is measured again."""
_WORSE = 1.05
"""Halves have to be cheaper by this much, so that noise doesn't part what belongs together."""
_SHORTEST = 5
"""Pasts of fewer than 2 ** 5 tokens cost the same."""


class StepCosts:
    """What a step of a group costs each of its rows, by the number of rows and the longest past, both up to the next
    power of two. Graphs copy their whole past in each step, so that beyond a size that depends on the machine, more
    rows cost each of them more. It is found by climbing: a size is tried from the one below or above it, if that is
    known, and what was worse is left for long."""

    def __init__(self) -> None:
        self._costs: dict[tuple[int, int], _Cost] = {}
        self._now = 0
        self._apart_at = -1

    def tick(self) -> None:
        """Another iteration begins."""
        self._now += 1

    def keep_apart(self) -> None:
        """A group was split in this iteration, to see what its halves cost: nothing is joined in it."""
        self._apart_at = self._now

    def observe(self, rows: int, longest: int, took_ns: int) -> None:
        cost = self._costs.setdefault((_level(rows), _level_of_past(longest)), _Cost())
        row_ns = took_ns / rows
        # What else happens on the machine makes steps slower, never faster.
        weight = 1.0 if not cost.count or row_ns < cost.row_ns else 0.05
        cost.row_ns += weight * (row_ns - cost.row_ns)
        cost.count += 1
        cost.last = self._now

    def joins(self, rows: int, longest: int, more_rows: int, more_longest: int) -> bool:
        """Whether two groups are to be one, which is so if that costs less, or to find out."""
        if self._apart_at == self._now:
            return False
        together, past = rows + more_rows, max(longest, more_longest)
        whole = self._row_ns(_level(together), past)
        if whole is None:
            return self._row_ns(_level(together) - 1, past) is not None
        one, other = self._row_ns(_level(rows), longest), self._row_ns(_level(more_rows), more_longest)
        return one is not None and other is not None and together * whole <= rows * one + more_rows * other

    def splits(self, rows: int, longest: int) -> bool:
        """Whether a group is to be two, for the same reasons. The size below is tried only from the best known one."""
        level = _level(rows)
        now, above, below = (self._row_ns(one, longest) for one in (level, level + 1, level - 1))
        if now is None or (above is not None and above <= now):
            return False
        return below is None or now > _WORSE * below

    def _row_ns(self, level: int, longest: int) -> float | None:
        """What is known, if need be of shorter pasts: less, so that with a longer one other sizes are tried."""
        for past in range(_level_of_past(longest), _SHORTEST - 1, -1):
            cost = self._costs.get((level, past))
            if cost is not None and cost.count >= _PROOFS and self._now - cost.last < _FORGET:
                return cost.row_ns
        return None


def _level(rows: int) -> int:
    return (rows - 1).bit_length()


def _level_of_past(longest: int) -> int:
    return max(_SHORTEST, longest.bit_length())
