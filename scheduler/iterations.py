"""Which generations an instance steps together, and how many tokens of prompts it computes in between.

A *row* is a generation that has a place. It has `total` tokens, its prompt's and those chosen since, of which the
keys and values of `held` are kept. An iteration executes pieces of the prompts of some, and then each group of rows
that lack one token once. Rows that share an execution are filled up to the longest of them. Those that lack more share
one only if nothing is held of them and they are computed whole.

Lives here: who has a place, who shares a group, who is put out when keys and values need too much memory, and when that
comes back. Must not: tensors, clocks, threads. The rules: the oldest row always goes on, so something always ends; a
row is put out only if older ones need its memory; no iteration computes more tokens of prompts than it may, fill
included, unless these can't be cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from paceline.scheduler.latency import LatencyModel

__all__ = ["Iteration", "Iterations", "StepCosts"]

_SLACK_TOKENS = 16
"""For each row, so many more tokens have to fit before another one has a place: else that would soon be put out."""

_MOST_PUT_OFF = 2
"""For so many iterations, prompts wait for others: the first token comes within three steps besides its prompt's."""
_LEARN = 0.05
"""What the last iteration counts, of how many rows begin in one."""


class Iteration(NamedTuple):
    """What to do next: forget what is kept of rows that were `put_out`, execute each of `pieces`, rows with the numbers
    of their further tokens, and then compute the next token of each of `groups`."""

    put_out: Sequence[int]
    pieces: Sequence[Sequence[tuple[int, int]]]
    groups: Sequence[tuple[int, ...]]


class _Row:
    __slots__ = ("fixed", "held", "is_out", "kind", "total")

    def __init__(self, total: int, fixed: int, kind: int) -> None:
        self.total = total
        self.fixed = fixed
        self.kind = kind
        self.held = 0
        self.is_out = False

    @property
    def lacks_one(self) -> bool:
        return 0 < self.held == self.total - 1


class Iterations:
    """At most `most_rows` rows, which keep at most `most_tokens` tokens, fill included, unless one alone needs more;
    `piece_tokens` tokens of prompts an iteration. `pads`: rows of different lengths may share a group; `pads_prompts`:
    they may begin together. `in_pieces`: prompts may be computed in pieces, else the last one that begins in an
    iteration may have more than `piece_tokens`. `costs` is told by others what executions cost."""

    def __init__(
        self,
        most_rows: int,
        most_tokens: int,
        piece_tokens: int,
        costs: StepCosts,
        *,
        pads: bool = True,
        pads_prompts: bool = True,
        in_pieces: bool = True,
    ) -> None:
        self._most_rows = most_rows
        self._most_tokens = most_tokens
        self._piece_tokens = piece_tokens
        self._costs = costs
        self._pads = pads
        self._pads_prompts = pads and pads_prompts
        self._in_pieces = in_pieces
        # The oldest first; those that are out keep their age.
        self._rows: dict[int, _Row] = {}
        # Of all that aren't out. One that lacks more than a token is alone in its group, or executed with it now.
        self._groups: list[list[int]] = []
        # How many rows begin in an iteration, in the mean; in how many the present ones have been put off.
        self._entered, self._entering, self._put_off = 0, 0.0, 0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def usage(self) -> float:
        """Share of the tokens that may be kept, fill included, 0 to 1; more than that if one alone needs more."""
        return self._needed() / self._most_tokens

    def has_room(self, tokens: int) -> bool:
        """Whether a generation whose prompt has so many may have a place. Whoever was put out comes first."""
        return (
            len(self._rows) < self._most_rows
            and self._fits(tokens)
            and not any(row.is_out for row in self._rows.values())
        )

    def least_ns(self, tokens: int, now_ns: int) -> int:
        """What a prompt of so many takes at least, as measured lately; 0 if nothing was."""
        pieces, rest = divmod(tokens, self._piece_tokens) if self._in_pieces else (0, tokens)
        whole_ns = pieces * self._costs.least_begin_ns(self._piece_tokens, now_ns) if pieces else 0
        return whole_ns + (self._costs.least_begin_ns(rest, now_ns) if rest else 0)

    def enter(self, row: int, tokens: int, fixed: int = 0, kind: int = 0) -> None:
        """`fixed`: as many tokens as what it keeps besides takes. Only rows of the same `kind` share a group."""
        self._rows[row] = _Row(tokens, fixed, kind)
        self._entered += 1
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
        return Iteration(put_out, self._pieces(max(groups, key=len, default=())), groups)

    def _pieces(self, largest: Sequence[int]) -> list[list[tuple[int, int]]]:
        """What is computed of prompts, the oldest first. Those that begin may be put off while the `largest` group goes
        on, so that several come together."""
        self._entering += _LEARN * (self._entered - self._entering)
        self._entered = 0
        rows = [(number, row) for number, row in self._rows.items() if not (row.is_out or row.lacks_one)]
        begin = sum(not row.held for _, row in rows)
        puts_off = begin and largest and self._put_off < _MOST_PUT_OFF
        if puts_off and self._costs.gathers(self._entering, begin, len(largest), self._longest(largest)):
            self._put_off += 1
            rows = [(number, row) for number, row in rows if row.held]
        else:
            self._put_off = 0
        pieces, shared, left = list[list[tuple[int, int]]](), list[list[tuple[int, int]]](), self._piece_tokens
        for number, row in rows:
            if left <= 0:
                break
            lacking = row.total - row.held
            tokens = min(left, lacking) if self._in_pieces else lacking
            added = self._share(number, tokens, shared, left) if tokens == row.total else 0
            if not added:
                pieces.append([(number, tokens)])
                shared += pieces[-1:] if tokens == row.total else []
            left -= added or tokens
        return pieces

    def _share(self, row: int, tokens: int, shared: Sequence[list[tuple[int, int]]], left: int) -> int:
        """Have it begin in one of the executions `shared`, if that costs less than one of its own. Returns how many
        tokens that adds, fill included; 0 if it doesn't."""
        for execution in shared:
            width, rows = max(own for _, own in execution), len(execution)
            added = max(width, tokens) * (rows + 1) - width * rows
            pays = added == tokens or (self._pads_prompts and added - tokens <= self._costs.worth_tokens)
            group = next(one for one in self._groups if execution[0][0] in one)
            may = added <= left and pays and self._rows[group[0]].kind == self._rows[row].kind
            if may and self._fits_joined(group, [row]):
                execution.append((row, tokens))
                self._ungroup(row)
                group.append(row)
                return added
        return 0

    def _needed(self) -> int:
        """How many tokens have to be kept after the next step, with the whole prompts of those that have begun."""
        return sum(len(group) * self._width(group) for group in self._groups)

    def _width(self, group: Sequence[int]) -> int:
        """Of how many tokens the memory of each row of a group is."""
        rows = [self._rows[row] for row in group]
        return max(row.total for row in rows) + max(row.fixed for row in rows)

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
                if not self._fits(row.total + row.fixed):
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
        going.sort(key=lambda group: (self._rows[group[0]].kind, self._longest(group)))
        kept = going[:1]
        for group in going[1:]:
            last = kept[-1]
            short, long = self._longest(last), self._longest(group)
            rows = len(last) + len(group)
            may = rows <= self._most_rows and (self._pads or short == long)
            may = may and self._rows[last[0]].kind == self._rows[group[0]].kind
            if may and self._costs.joins(len(last), short, len(group), long) and self._fits_joined(last, group):
                last += group
                self._groups = [one for one in self._groups if one is not group]
            else:
                kept.append(group)

    def _fits_joined(self, one: Sequence[int], other: Sequence[int]) -> bool:
        """Whether what filling up adds can be kept."""
        counts = len(one), len(other)
        added = (
            self._width([*one, *other]) * sum(counts) - self._width(one) * counts[0] - self._width(other) * counts[1]
        )
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
        """An execution in which rows begin costs as much as that many more tokens in another one, whatever its own
        number; 0 as long as it isn't known."""
        return self._beginning.worth(None)

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
        return self._beginning.proven_ns(None, _about(tokens), now_ns)

    def gathers(self, entering: float, begin: int, rows: int, longest: int) -> bool:
        """Whether it pays that `begin` rows lose a step, as another one may come, of which there are `entering` in an
        iteration, and save an execution. `rows` and `longest` are those of the group that goes on."""
        alone, together = self._row_ns(0, longest), self._row_ns(_level(rows), longest)
        return alone is not None and together is not None and begin * together < entering * alone

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
