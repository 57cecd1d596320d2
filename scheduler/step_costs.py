"""What executions of a decoder cost, by rows and tokens, and what follows from that.

Lives here: `StepCosts`, which is told what was measured. Must not: know which rows there are (`iterations`), clocks.
"""

from __future__ import annotations

from dataclasses import dataclass

from paceline.scheduler.latency import LatencyModel


@dataclass(slots=True)
class _Cost:
    """What a step costs each row: so many times measured, in the iteration `last` for the last time."""

    row_ns: float = 0.0
    count: int = 0
    last: int = 0


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
