"""Which generations an instance steps together, and how many tokens of prompts it computes in between.

A *row* is a generation that has a place. It has `total` tokens, its prompt's and those chosen since, of which the
keys and values of `held` are kept. An iteration executes pieces of the prompts of some, and then each group of rows
that lack one token once. Rows that share an execution are filled up to the longest of them. Those that lack more share
one only if nothing is held of them and they are computed whole.

Lives here: who has a place, who shares a group, who is put out when keys and values need too much memory, and when that
comes back; and what executions cost, as it was measured, by rows and tokens, from which some of that follows. Must
not: tensors, clocks, threads. The rules: the oldest row always goes on, so something always ends; a row is put out only
if older ones need its memory; no iteration computes more tokens of prompts than it may, fill included, unless these
can't be cut.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from typing import NamedTuple

from paceline.scheduler.latency import LatencyModel

_SLACK_TOKENS = 16
"""For each row, so many more tokens have to fit before another one has a place: else that would soon be put out."""

_PROOFS = 3
"""So many measurements make a cost known. The first of a shape includes what is prepared once."""
_FORGET = 4_096
"""After so many iterations, what was measured is measured again."""
_WORSE = 1.05
"""Halves have to be cheaper by this much, so that noise doesn't part what belongs together."""
_SHORTEST = 5
"""Pasts of fewer than 2 ** 5 tokens cost the same."""


class Iteration(NamedTuple):
    """What to do next: forget what is kept of rows that were `put_out`, execute each of `pieces`, rows with the numbers
    of their further tokens, and then compute the next token of each of `groups`."""

    put_out: Sequence[int]
    pieces: Sequence[Sequence[tuple[int, int]]]
    groups: Sequence[tuple[int, ...]]


@dataclass(slots=True, eq=False)
class _Row:
    number: int
    total: int
    fixed: int
    kind: int
    held: int = 0
    is_out: bool = False
    group: _Group = field(init=False)

    @property
    def lacks_one(self) -> bool:
        return 0 < self.held == self.total - 1


@dataclass(slots=True, eq=False)
class _Group:
    """Rows that share executions; not empty. What it is asked of all of them is kept until it is `changed`: many ask
    in each iteration, and it is asked in each."""

    rows: list[_Row]
    _measures: tuple[int, int] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def changed(self) -> None:
        self._measures = None

    def grown(self, rows: int, held: int, total: int) -> None:
        """So many of its rows have kept `held` more tokens each, and got `total` more."""
        if self._measures is not None and rows == len(self.rows):
            longest, width = self._measures
            self._measures = longest + held, width + total
        else:
            self._measures = None

    def add(self, rows: Sequence[_Row]) -> None:
        self.rows += rows
        self._measures = None
        for row in rows:
            row.group = self

    @property
    def goes_on(self) -> bool:
        """Whether its rows lack a token each; else there is one, or several that begin."""
        return self.rows[0].lacks_one

    @property
    def longest(self) -> int:
        return self._measured()[0]

    @property
    def width(self) -> int:
        """Of how many tokens the memory of each row is."""
        return self._measured()[1]

    def _measured(self) -> tuple[int, int]:
        if self._measures is None:
            held = total = fixed = 0
            for row in self.rows:
                held, total, fixed = max(held, row.held), max(total, row.total), max(fixed, row.fixed)
            self._measures = held, total + fixed
        return self._measures


@dataclass(slots=True, eq=False)
class Iterations:
    """At most `most_rows` rows, which keep at most `most_tokens` tokens, fill included, unless one alone needs more;
    `piece_tokens` tokens of prompts an iteration. `pads`: rows of different lengths may share a group; `pads_prompts`:
    they may begin together. `in_pieces`: prompts may be computed in pieces, else the last one that begins in an
    iteration may have more than `piece_tokens`. `costs` is told by others what executions cost."""

    most_rows: int
    most_tokens: int
    piece_tokens: int
    costs: StepCosts
    _: KW_ONLY
    pads: bool = True
    pads_prompts: bool = True
    in_pieces: bool = True
    # The oldest first; those that are out keep their age.
    _rows: dict[int, _Row] = field(init=False, default_factory=dict)
    _out: int = field(init=False, default=0)
    # Of all that aren't out. One that lacks more than a token is alone in its group, or executed with it now.
    _groups: list[_Group] = field(init=False, default_factory=list)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def usage(self) -> float:
        """Share of the tokens that may be kept, fill included, 0 to 1; more than that if one alone needs more."""
        return self._needed() / self.most_tokens

    def has_room(self, tokens: int) -> bool:
        """Whether a generation whose prompt has so many may have a place. Whoever was put out comes first."""
        return len(self._rows) < self.most_rows and not self._out and self._fits(tokens)

    def least_ns(self, tokens: int, now_ns: int) -> int:
        """What a prompt of so many takes at least, as measured lately; 0 if nothing was."""
        pieces, rest = divmod(tokens, self.piece_tokens) if self.in_pieces else (0, tokens)
        whole_ns = pieces * self.costs.least_begin_ns(self.piece_tokens, now_ns) if pieces else 0
        return whole_ns + (self.costs.least_begin_ns(rest, now_ns) if rest else 0)

    def enter(self, row: int, tokens: int, fixed: int = 0, kind: int = 0) -> None:
        """`fixed`: as many tokens as what it keeps besides takes. Only rows of the same `kind` share a group."""
        self._rows[row] = one = _Row(row, tokens, fixed, kind)
        self._found(one)

    def leave(self, row: int) -> None:
        one = self._rows.pop(row)
        if one.is_out:
            self._out -= 1
        else:
            self._ungroup(one)

    def computed(self, more: Mapping[int, int]) -> bool:
        """So many more tokens of rows that share an execution are kept. Returns whether all of theirs are, so that
        others are to be chosen."""
        for number, tokens in more.items():
            row = self._rows[number]
            row.held += tokens
        if len({*more.values()}) == 1:
            row.group.grown(len(more), tokens, 0)
        else:
            row.group.changed()
        return row.held == row.total

    def extended(self, rows: Sequence[int]) -> None:
        """Another token was chosen for each of these, of one group."""
        for number in rows:
            row = self._rows[number]
            row.total += 1
        if rows:
            row.group.grown(len(rows), 0, 1)

    def next(self) -> Iteration:
        """What to execute now; nothing only if there is no row."""
        self.costs.tick()
        put_out = self._put_out()
        if not put_out:
            self._bring_back()
        self._split()
        self._join()
        groups = [tuple([row.number for row in group.rows]) for group in self._groups if group.goes_on]
        return Iteration(put_out, self._pieces(), groups)

    def _pieces(self) -> list[list[tuple[int, int]]]:
        """What is computed of prompts, the oldest first. None waits for others to begin with, which would save few
        executions: two iterations at most, 1.5 % more tokens, and the first ones in three times as long."""
        rows = list[_Row]()
        if any(not group.goes_on for group in self._groups):
            rows = [row for row in self._rows.values() if not (row.is_out or row.lacks_one)]
        pieces, shared, left = list[list[tuple[int, int]]](), list[list[tuple[int, int]]](), self.piece_tokens
        for row in rows:
            if left <= 0:
                break
            lacking = row.total - row.held
            tokens = min(left, lacking) if self.in_pieces else lacking
            added = self._share(row, tokens, shared, left) if tokens == row.total else 0
            if not added:
                pieces.append([(row.number, tokens)])
                shared += pieces[-1:] if tokens == row.total else []
            left -= added or tokens
        return pieces

    def _share(self, row: _Row, tokens: int, shared: Sequence[list[tuple[int, int]]], left: int) -> int:
        """Have it begin in one of the executions `shared`, if that costs less than one of its own. Returns how many
        tokens that adds, fill included; 0 if it doesn't."""
        for execution in shared:
            width, rows = max(own for _, own in execution), len(execution)
            added = max(width, tokens) * (rows + 1) - width * rows
            pays = added == tokens or (self.pads and self.pads_prompts and added - tokens <= self.costs.worth_tokens)
            group = self._rows[execution[0][0]].group
            if added <= left and pays and group.rows[0].kind == row.kind and self._fits_joined(group, row.group):
                execution.append((row.number, tokens))
                self._ungroup(row)
                group.add([row])
                return added
        return 0

    def _needed(self) -> int:
        """How many tokens have to be kept after the next step, with the whole prompts of those that have begun."""
        return sum([len(group) * group.width for group in self._groups])

    def _fits(self, tokens: int) -> bool:
        """Whether another row of so many has room, and all have some for more. A lone one has, in any case."""
        inside = sum(map(len, self._groups))
        return not inside or self._needed() + tokens + _SLACK_TOKENS * (inside + 1) <= self.most_tokens

    def _put_out(self) -> list[int]:
        put_out: list[int] = []
        while self._needed() > self.most_tokens and len(self._rows) - self._out > 1:
            youngest = next(row for row in reversed(self._rows.values()) if not row.is_out)
            put_out.append(youngest.number)
            self._ungroup(youngest)
            youngest.is_out, youngest.held = True, 0
            self._out += 1
        return put_out

    def _bring_back(self) -> None:
        for row in self._rows.values() if self._out else ():
            if row.is_out:
                if not self._fits(row.total + row.fixed):
                    return
                row.is_out = False
                self._out -= 1
                self._found(row)

    def _found(self, row: _Row) -> None:
        """Give it a group of its own."""
        row.group = _Group([row])
        self._groups.append(row.group)

    def _ungroup(self, row: _Row) -> None:
        group = row.group
        group.rows.remove(row)
        group.changed()
        if not group.rows:
            self._groups.remove(group)

    def _split(self) -> None:
        """Halve groups that cost more together than their halves do, or of which that isn't known yet."""
        for group in [group for group in self._groups if len(group) > 1]:
            if self.costs.splits(len(group), group.longest):
                group.rows.sort(key=lambda row: row.held)
                half = _Group([])
                half.add(group.rows[len(group) // 2 :])
                del group.rows[len(group) // 2 :]
                group.changed()
                self._groups.append(half)
                self.costs.keep_apart()

    def _join(self) -> None:
        """Join groups that cost less together. One pass over neighbours by length: what fill costs is then least."""
        going = [group for group in self._groups if group.goes_on]
        if len(going) < 2:
            return
        going.sort(key=lambda group: (group.rows[0].kind, group.longest))
        kept = going[:1]
        for group in going[1:]:
            last = kept[-1]
            short, long = last.longest, group.longest
            may = (self.pads or short == long) and last.rows[0].kind == group.rows[0].kind
            if may and self.costs.joins(len(last), short, len(group), long) and self._fits_joined(last, group):
                last.add(group.rows)
                self._groups.remove(group)
            else:
                kept.append(group)

    def _fits_joined(self, one: _Group, other: _Group) -> bool:
        """Whether what filling up adds can be kept."""
        counts = len(one), len(other)
        width = _Group([*one.rows, *other.rows]).width
        added = width * sum(counts) - one.width * counts[0] - other.width * counts[1]
        return self._needed() + added <= self.most_tokens or not added


@dataclass(slots=True)
class _Cost:
    """What a step costs each row: so many times measured, in the iteration `last` for the last time."""

    row_ns: float = 0.0
    count: int = 0
    last: int = 0


class StepCosts:
    """What executions cost. Of a step, what it costs each row, by the number of rows and the longest past, both up to
    the next power of two. Graphs copy their whole past in each step, so that beyond a size that depends on the
    machine, more rows cost each of them more. It is found by climbing: a size is tried from the one below or above it,
    if that is known, and what was worse is left for long. Of beginning, what it costs by tokens, fill included.

    `doubt`: how many times as much a row may seem to cost in a larger group. Above 1 where nothing is copied: it costs
    less there but for operators that are bad at it, and what seems otherwise is what else happens on the machine."""

    def __init__(self, doubt: float = 1.0) -> None:
        self._doubt = doubt
        self._costs: dict[tuple[int, int], _Cost] = {}
        self._beginning = LatencyModel(1)
        self._now = 0
        self._apart_at = -1

    @property
    def worth_tokens(self) -> float:
        """An execution in which rows begin costs as much as that many more tokens in another one; 0: not known."""
        return self._beginning.of(None).worth()

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

    def observe_begin(self, rows: int, longest: int, took_ns: int, now_ns: int) -> None:
        """`rows` began together, the longest with so many tokens."""
        self._beginning.observe(None, _about(rows * longest), took_ns, now_ns)

    def least_begin_ns(self, tokens: int, now_ns: int) -> int:
        """What beginning with so many takes; 0 if that isn't certain enough to refuse anybody for it."""
        return self._beginning.of(None).proven_ns(_about(tokens), now_ns)

    def joins(self, rows: int, longest: int, more_rows: int, more_longest: int) -> bool:
        """Whether two groups are to be one, which is so if that costs less, or to find out."""
        if self._apart_at == self._now:
            return False
        together, past = rows + more_rows, max(longest, more_longest)
        whole = self._row_ns(_level(together), past)
        if whole is None:
            return self._row_ns(_level(together) - 1, past) is not None
        one, other = self._row_ns(_level(rows), longest), self._row_ns(_level(more_rows), more_longest)
        apart = None if one is None or other is None else rows * one + more_rows * other
        return apart is not None and together * whole <= self._doubt * apart

    def splits(self, rows: int, longest: int) -> bool:
        """Whether a group is to be two, for the same reasons. The size below is tried only from the best known one."""
        level = _level(rows)
        now, above, below = (self._row_ns(one, longest) for one in (level, level + 1, level - 1))
        if now is None or (above is not None and above <= now):
            return False
        return below is None or now > max(_WORSE, self._doubt) * below

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


def _about(tokens: int) -> int:
    """One of four sizes between a power of two and the next."""
    step = max(0, tokens.bit_length() - 3)
    return tokens >> step << step
