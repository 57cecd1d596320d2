"""Who is in a running batch, and in which groups, by measured cost."""

from __future__ import annotations

import pytest

from paceline.scheduler.iterations import Iterations, StepCosts


def running(rows: int, *, held: int = 40, most_tokens: int = 10_000, costs: StepCosts | None = None) -> Iterations:
    """Rows that have computed prompts of `held` tokens, each with a token to go on from."""
    iterations = Iterations(rows, most_tokens, held * rows, costs or StepCosts())
    for row in range(rows):
        iterations.enter(row, held)
    begin(iterations)
    return iterations


def begin(iterations: Iterations) -> list[list[tuple[int, int]]]:
    """Compute what the next iteration computes of prompts, which is all that is left of them; returns that."""
    pieces = [[*one] for one in iterations.next().pieces]
    for one in pieces:
        assert iterations.computed(dict(one))
        iterations.extended([row for row, _ in one])
    return pieces


def groups_after(iterations: Iterations, costs: StepCosts, row_ns: dict[int, int], times: int = 40) -> list[int]:
    """The sizes of groups in the end, if a group's rows take so long each, by how many they are."""
    sizes: list[int] = []
    for _ in range(times):
        sizes = []
        for group in iterations.next().groups:
            sizes.append(len(group))
            costs.observe(len(group), 40, row_ns[len(group)] * len(group))
    return sorted(sizes)


def test_rows_share_a_group_where_it_costs_less() -> None:
    costs = StepCosts()
    assert groups_after(running(8, costs=costs), costs, {1: 80, 2: 40, 4: 20, 8: 10}) == [8]


def test_groups_stay_as_small_as_costs_least() -> None:
    costs = StepCosts()
    assert groups_after(running(8, costs=costs), costs, {1: 80, 2: 40, 4: 60, 8: 90}) == [2, 2, 2, 2]


@pytest.mark.parametrize(("cost", "sizes"), [(30, [8]), (90, [4, 4])])
def test_doubt_leaves_groups_together_that_seem_little_worse(cost: int, sizes: list[int]) -> None:
    costs = StepCosts(doubt=2.0)
    assert groups_after(running(8, costs=costs), costs, {1: 80, 2: 40, 4: 20, 8: cost}) == sizes


def test_groups_shrink_when_larger_ones_cost_more() -> None:
    costs = StepCosts()
    iterations = running(8, costs=costs)
    groups_after(iterations, costs, {1: 80, 2: 40, 4: 20, 8: 10})
    slow = {1: 80, 2: 80, 4: 100, 8: 1_000}
    assert groups_after(iterations, costs, slow, times=400) != [8]


def test_piece_of_long_prompt_keeps_to_the_budget() -> None:
    iterations = Iterations(4, 1_000, 16, StepCosts())
    iterations.enter(1, 10)
    iterations.enter(2, 100)
    assert iterations.next().pieces == [[(1, 10)], [(2, 6)]]


def test_youngest_row_is_put_out_and_comes_back() -> None:
    iterations = Iterations(4, 100, 100, StepCosts())
    iterations.enter(1, 40)
    iterations.enter(2, 40)
    while not (iteration := iterations.next()).put_out:
        for row in [row for group in iteration.groups for row in group]:
            assert iterations.computed({row: 1})
            iterations.extended([row])
        for row, tokens in [own for one in iteration.pieces for own in one]:
            assert iterations.computed({row: tokens})
            iterations.extended([row])
    assert iteration.put_out == [2]
    assert iteration.groups == [(1,)]
    assert not iterations.has_room(1)
    iterations.leave(1)
    assert iterations.next().pieces == [[(2, 51)]]


def test_rows_of_other_lengths_stay_apart_without_fill() -> None:
    costs = StepCosts()
    iterations = Iterations(4, 1_000, 200, costs, pads=False)
    for row, tokens in enumerate((40, 40, 41)):
        iterations.enter(row, tokens)
    assert begin(iterations) == [[(0, 40), (1, 40)], [(2, 41)]]
    for _ in range(3):
        costs.observe(1, 40, 10)
    assert sorted(map(len, iterations.next().groups)) == [1, 2]


def costly_executions() -> StepCosts:
    """A step of a row costs 100, a token of a prompt 1 besides that."""
    costs = StepCosts()
    for tokens in (16, 64, 16, 64):
        costs.observe_begin(1, tokens, 100 + tokens, 1)
    for rows in (1, 2, 4, 8):
        for _ in range(3):
            costs.observe(rows, 40, 100)
    return costs


@pytest.mark.parametrize("pads", [True, False])
def test_prompts_begin_together_where_fill_costs_less(pads: bool) -> None:
    iterations = Iterations(8, 10_000, 600, costly_executions(), pads_prompts=pads)
    for row, tokens in enumerate((20, 90, 20, 250)):
        iterations.enter(row, tokens)
    apart = [[(0, 20), (2, 20)], [(1, 90)], [(3, 250)]]
    assert begin(iterations) == ([[(0, 20), (1, 90), (2, 20)], [(3, 250)]] if pads else apart)


def test_prompts_wait_for_no_others() -> None:
    iterations = running(8, costs=costly_executions())
    for row in range(8, 40):
        iterations.leave(row - 8)
        iterations.enter(row, 30)
        assert begin(iterations) == [[(row, 30)]]


def test_rows_that_began_together_part_where_that_costs_less() -> None:
    costs = costly_executions()
    for rows, row_ns in ((1, 10), (2, 100), (4, 200)):
        for _ in range(3):
            costs.observe(rows, 90, rows * row_ns)
    iterations = Iterations(8, 10_000, 600, costs)
    for row, tokens in enumerate((90, 20)):
        iterations.enter(row, tokens)
    assert [*iterations.next().pieces] == [[(0, 90), (1, 20)]]
    assert iterations.usage == 2 * 90 / 10_000
    assert iterations.computed({0: 90, 1: 20})
    iterations.extended([0, 1])
    assert iterations.usage == 2 * 91 / 10_000
    assert [*iterations.next().groups] == [(1,), (0,)]
    assert iterations.usage == (21 + 91) / 10_000


@pytest.mark.parametrize("in_pieces", [True, False])
def test_prompt_takes_what_its_pieces_take_at_least(in_pieces: bool) -> None:
    costs = costly_executions()
    for _ in range(20):
        for tokens in (16, 64, 80):
            costs.observe_begin(1, tokens, 100 + tokens, 1)
    iterations = Iterations(8, 10_000, 64, costs, in_pieces=in_pieces)
    whole_ns, rest_ns, all_ns = (costs.least_begin_ns(tokens, 1) for tokens in (64, 16, 80))
    assert 0 < rest_ns < whole_ns < all_ns < whole_ns + rest_ns
    assert iterations.least_ns(80, 1) == (whole_ns + rest_ns if in_pieces else all_ns)


@pytest.mark.parametrize("room", [True, False])
def test_rows_share_executions_where_fill_has_room(room: bool) -> None:
    iterations = Iterations(8, 190 if room else 150, 600, costly_executions())
    for row, tokens in enumerate((40, 90)):
        iterations.enter(row, tokens)
    assert begin(iterations) == ([[(0, 40), (1, 90)]] if room else [[(0, 40)], [(1, 90)]])
    assert [*iterations.next().groups] == ([(0, 1)] if room else [(0,), (1,)])


def test_place_needs_room_for_all_to_grow() -> None:
    iterations = Iterations(4, 200, 200, StepCosts())
    assert iterations.has_room(200)
    iterations.enter(0, 40)
    begin(iterations)
    assert iterations.has_room(200 - 41 - 2 * 16)
    assert not iterations.has_room(200 - 41 - 2 * 16 + 1)


@pytest.mark.parametrize("leaves", ["put out", "oldest"])
def test_rows_that_were_put_out_come_first(leaves: str) -> None:
    iterations = Iterations(4, 100, 100, StepCosts())
    for row, tokens in enumerate((20, 40, 30)):
        iterations.enter(row, tokens)
    begin(iterations)
    put_out: list[int] = []
    while put_out != [2, 1]:
        iteration = iterations.next()
        put_out += iteration.put_out
        for (row,) in iteration.groups:
            assert iterations.computed({row: 1})
            iterations.extended([row])
    assert not iterations.has_room(1)
    if leaves == "oldest":
        iterations.leave(0)
        # The youngest has no room beside it yet.
        assert begin(iterations) == [[(1, 61)]]
        assert not iterations.has_room(1)
    else:
        for row in put_out:
            iterations.leave(row)
        assert iterations.has_room(1)
