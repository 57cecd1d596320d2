"""Iterations under random arrivals, ends, memory and costs. `World` keeps each row's tokens in lists, does what an
iteration says, and checks that it may be said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.scheduler.iterations import Iterations, StepCosts
from tests.lengths import LONG


@dataclass
class Row:
    wanted: int
    total: int
    fixed: int
    kind: int
    held: int = 0
    chosen: int = 0
    is_out: bool = False


@dataclass
class World:
    """`row_ns`: what a step costs a row, beyond `base_ns` for all, for each token of the longest past."""

    most_rows: int
    most_tokens: int
    piece_tokens: int
    base_ns: int
    row_ns: int
    pads: bool
    pads_prompts: bool
    in_pieces: bool
    rows: dict[int, Row] = field(default_factory=dict)
    waiting: list[tuple[int, int, int]] = field(default_factory=list)
    arrived: int = 0

    def __post_init__(self) -> None:
        self.costs = StepCosts()
        self.iterations = Iterations(
            self.most_rows,
            self.most_tokens,
            self.piece_tokens,
            self.costs,
            pads=self.pads,
            pads_prompts=self.pads_prompts,
            in_pieces=self.in_pieces,
        )

    def arrive(self, prompt: int, wanted: int, fixed: int) -> None:
        wanted = min(wanted, self.most_tokens - prompt)
        self.waiting.append((prompt, wanted, fixed))

    def let_in(self) -> None:
        while self.waiting and self.iterations.has_room(self.waiting[0][0] + self.waiting[0][2]):
            prompt, wanted, fixed = self.waiting.pop(0)
            assert len(self.rows) < self.most_rows
            assert not self.rows or self.iterations.usage <= 1 - (prompt + fixed) / self.most_tokens
            self.arrived += 1
            # Half of them can be filled up to each other.
            kind = fixed if self.arrived % 2 else 0
            self.iterations.enter(self.arrived, prompt, fixed, kind)
            self.rows[self.arrived] = Row(wanted, prompt, fixed, kind)

    def end(self, number: int) -> None:
        self.iterations.leave(number)
        del self.rows[number]

    def iterate(self) -> None:
        oldest = next(iter(self.rows), None)
        done = self.iterations.next()
        for number in done.put_out:
            assert number != oldest
            assert all(self.rows[other].held for other in self.rows if other < number)
            self.rows[number].held, self.rows[number].is_out = 0, True
        grouped = [number for group in done.groups for number in group]
        pieces = {number: tokens for execution in done.pieces for number, tokens in execution}
        assert len(grouped) + len(pieces) == len({*grouped, *pieces})
        filled = [len(one) * max(tokens for _, tokens in one) for one in done.pieces]
        if self.in_pieces:
            assert sum(filled) <= self.piece_tokens
        else:
            assert sum(filled[:-1]) < self.piece_tokens
        for execution in done.pieces:
            if len(execution) > 1 or not self.in_pieces:
                assert all((0, tokens) == (self.rows[one].held, self.rows[one].total) for one, tokens in execution)
            assert (self.pads and self.pads_prompts) or len({tokens for _, tokens in execution}) == 1
        begin = any(not (row.held or row.is_out) for row in self.rows.values())
        assert pieces or not begin
        assert oldest is None or oldest in {*grouped, *pieces}
        together = [*done.groups, *([number for number, _ in execution] for execution in done.pieces)]
        inside = self.needed(together)
        assert all(len({self.rows[number].kind for number in rows}) == 1 for rows in together)
        assert inside <= self.most_tokens or len(grouped) + len(pieces) == 1
        for execution, tokens in zip(done.pieces, filled, strict=True):
            rows, longest = len(execution), tokens // len(execution)
            self.costs.observe_begin(rows, longest, self.base_ns + self.row_ns * tokens, 1)
        for group in done.groups:
            held = [self.rows[number].held for number in group]
            assert len(group) <= self.most_rows
            assert self.pads or len(set(held)) == 1
            assert len({self.rows[number].kind for number in group}) == 1
            self.costs.observe(len(group), max(held), self.base_ns + self.row_ns * len(group) * max(held))
            self.compute(dict.fromkeys(group, 1))
        for execution in done.pieces:
            self.compute(dict(execution))
        waiting = [number for number in self.rows if number not in {*grouped, *pieces}]
        # Those that were put out come back in the order in which they came, and aren't always computed at once.
        out = [number for number in waiting if self.rows[number].is_out]
        inside = [*together, *([number] for number in waiting if number not in out)]
        possible = [self.needed([*inside, *([number] for number in out[:back])]) for back in range(len(out) + 1)]
        assert self.iterations.usage in [needed / self.most_tokens for needed in possible]

    def compute(self, more: dict[int, int]) -> None:
        """So many more tokens of rows that share an execution."""
        for number, tokens in more.items():
            row = self.rows[number]
            row.held, row.is_out = row.held + tokens, False
            assert 0 < tokens <= row.held <= row.total
        complete = all(self.rows[number].held == self.rows[number].total for number in more)
        assert self.iterations.computed(more) == complete
        others = []
        for number in more if complete else ():
            row = self.rows[number]
            row.chosen += 1
            if row.chosen == row.wanted:
                self.end(number)
            else:
                row.total += 1
                others.append(number)
        self.iterations.extended(others)

    def needed(self, groups: Sequence[Sequence[int]]) -> int:
        """How many tokens the rows that are left of these groups keep, fill included."""
        left = [[self.rows[number] for number in group if number in self.rows] for group in groups]
        return sum(
            len(rows) * (max(one.total for one in rows) + max(one.fixed for one in rows)) for rows in left if rows
        )


@st.composite
def worlds(draw: st.DrawFn) -> World:
    return World(
        draw(st.integers(2, 9)),
        draw(st.integers(12, 300)),
        draw(st.integers(1, 40)),
        draw(st.sampled_from([0, 1_000, 100_000])),
        draw(st.sampled_from([0, 10, 1_000])),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.booleans()),
    )


ARRIVALS = st.lists(st.tuples(st.integers(1, 10), st.integers(1, 40), st.integers(0, 9)), min_size=1, max_size=9)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), ARRIVALS),
        st.tuples(st.just("iterate"), st.integers(1, 20)),
        st.tuples(st.just("end"), st.integers(0, 8)),
    ),
    min_size=8,
    max_size=60,
)


@settings(deadline=None, max_examples=1000 if LONG else 100)
@given(worlds(), STEPS)
def test_every_row_computes_each_token_and_ends(world: World, steps: list[tuple[str, Any]]) -> None:
    for kind, what in steps:
        if kind == "arrive":
            for prompt, wanted, fixed in what:
                world.arrive(prompt, wanted, fixed)
        elif kind == "end" and world.rows:
            world.end([*world.rows][what % len(world.rows)])
        elif kind == "iterate":
            for _ in range(what):
                world.let_in()
                world.iterate()
    world.let_in()
    # Each iteration brings the oldest row nearer to its end, by a piece of its prompt or by a token.
    for _ in range(100 * (1 + len(world.rows) + len(world.waiting))):
        world.iterate()
        world.let_in()
        if not world.rows:
            break
    assert not world.rows
    assert not world.waiting
    assert len(world.iterations) == 0
