"""Iterations under random arrivals, ends, memory and costs. `World` keeps each row's tokens in lists, does what an
iteration says, and checks that it may be said."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.scheduler.iterations import Iterations, StepCosts


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
        inside = sum(
            len(rows)
            * (max(self.rows[number].total for number in rows) + max(self.rows[number].fixed for number in rows))
            for rows in together
        )
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
            for number in group:
                self.compute(number, 1)
        for number, tokens in pieces.items():
            assert tokens > 0
            self.compute(number, tokens)

    def compute(self, number: int, tokens: int) -> None:
        row = self.rows[number]
        row.held, row.is_out = row.held + tokens, False
        assert row.held <= row.total
        assert self.iterations.computed({number: tokens}) == (row.held == row.total)
        if row.held == row.total:
            row.chosen += 1
            if row.chosen == row.wanted:
                self.end(number)
            else:
                row.total += 1
                self.iterations.extended([number])


@st.composite
def worlds(draw: st.DrawFn) -> World:
    return World(
        draw(st.integers(1, 9)),
        draw(st.integers(12, 200)),
        draw(st.integers(1, 16)),
        draw(st.sampled_from([0, 1_000, 100_000])),
        draw(st.sampled_from([0, 10, 1_000])),
        draw(st.booleans()),
        draw(st.booleans()),
        draw(st.booleans()),
    )


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.integers(1, 10), st.integers(1, 40), st.integers(0, 9)),
        st.tuples(st.just("iterate"), st.integers(1, 10), st.just(0), st.just(0)),
        st.tuples(st.just("end"), st.integers(0, 8), st.just(0), st.just(0)),
    ),
    max_size=60,
)


@settings(deadline=None)
@given(worlds(), STEPS)
def test_every_row_computes_each_token_and_ends(world: World, steps: list[tuple[str, int, int, int]]) -> None:
    for kind, one, other, fixed in steps:
        if kind == "arrive":
            world.arrive(one, other, fixed)
        elif kind == "end" and world.rows:
            world.end([*world.rows][one % len(world.rows)])
        elif kind == "iterate":
            for _ in range(one):
                world.let_in()
                world.iterate()
    world.let_in()
    # Each iteration brings the oldest row nearer to its end, by a piece of its prompt or by a token.
    for _ in range(100 * (1 + len(world.rows) + len(world.waiting))):
        world.iterate()
        world.let_in()
    assert not world.rows
    assert not world.waiting
    assert len(world.iterations) == 0
