"""Who is in a running batch, and in which groups, by measured cost."""

from __future__ import annotations

from paceline.scheduler.iterations import Iterations, StepCosts


def running(rows: int, *, held: int = 40, most_tokens: int = 10_000, costs: StepCosts | None = None) -> Iterations:
    """Rows that have computed prompts of `held` tokens, each with a token to go on from."""
    iterations = Iterations(rows, most_tokens, held * rows, costs or StepCosts())
    for row in range(rows):
        iterations.enter(row, held)
    for row, tokens in iterations.next().pieces:
        assert iterations.computed(row, tokens)
        iterations.extended(row)
    return iterations


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
    assert iterations.next().pieces == [(1, 10), (2, 6)]


def test_youngest_row_is_put_out_and_comes_back() -> None:
    iterations = Iterations(4, 100, 100, StepCosts())
    iterations.enter(1, 40)
    iterations.enter(2, 40)
    while not (iteration := iterations.next()).put_out:
        for row in [row for group in iteration.groups for row in group]:
            assert iterations.computed(row, 1)
            iterations.extended(row)
        for row, tokens in iteration.pieces:
            assert iterations.computed(row, tokens)
            iterations.extended(row)
    assert iteration.put_out == [2]
    assert iteration.groups == [(1,)]
    assert not iterations.has_room(1)
    iterations.leave(1)
    assert iterations.next().pieces == [(2, 51)]


def test_rows_of_other_lengths_stay_apart_without_fill() -> None:
    costs = StepCosts()
    iterations = Iterations(4, 1_000, 200, costs, pads=False)
    for row, tokens in enumerate((40, 40, 41)):
        iterations.enter(row, tokens)
    for row, tokens in iterations.next().pieces:
        iterations.computed(row, tokens)
        iterations.extended(row)
    for _ in range(3):
        costs.observe(1, 40, 10)
    assert sorted(map(len, iterations.next().groups)) == [1, 2]
