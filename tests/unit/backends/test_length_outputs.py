"""What outputs do along lengths: which follow, and which of a step's states are put together of parts."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from paceline.backends.errors import ExecutionError, LoadError, OutOfMemory, UnfitOutputs
from paceline.backends.length_trial import try_lengths, without_trial
from paceline.backends.ragged import batch_runner
from paceline.backends.spec import Array, JoinedAxis, Length, ModelSpec, SequenceSpec, State, Tensors, TensorSpec
from paceline.backends.trials import LengthAxis

STATE = State(
    TensorSpec("past", "FP32", (-1, 2), axis_names=("batch", "past", "")),
    TensorSpec("all", "FP32", (-1, 2), axis_names=("batch", "all", "")),
    np.zeros((1, 0, 2), np.float32),
)
SPEC = ModelSpec(
    (TensorSpec("now", "FP32", (-1, 2), axis_names=("batch", "new", "")),),
    (TensorSpec("sum", "FP32", (2,)),),
    batched=True,
    sequence=SequenceSpec((), (STATE,)),
)
NOW, PAST = LengthAxis("now", 1), LengthAxis("past", 1, -1)


def joins(*order: int | None) -> object:
    """A model whose state is what it is given, as 1, what is new, as 0, and a row of ones, as None, in that `order`."""

    def run(inputs: Sequence[Array]) -> Tensors:
        now, past = inputs
        of = {0: now, 1: past, None: np.ones((len(now), 1, 2), np.float32)}
        # The sum leaves out what is filled up in.
        return [np.where(past == -1, 0, past).sum(axis=1), np.concatenate([of[one] for one in order], axis=1)]

    return run


@pytest.mark.parametrize(
    ("order", "asked", "parts"),
    [
        ((1, 0), [NOW, PAST], (1, 0)),
        ((1, None), [PAST], (0, None)),
        ((1, None, 0), [NOW, PAST], (1, None, 0)),
        ((1, 0), [NOW], (None, 0)),
        ((1, 1), [PAST], ()),
        ((0, 1), [NOW, PAST], ()),
        ((0, 1), [NOW], ()),
        ((None, 1), [PAST], ()),
    ],
)
def test_state_may_only_grow_behind_what_it_was(
    order: Sequence[int | None], asked: Sequence[LengthAxis], parts: Sequence[int | None]
) -> None:
    run = joins(*order)
    if not parts:
        with pytest.raises(LoadError, match=r"and not as the inputs' sizes do|is the state of the step after it"):
            try_lengths(SPEC, asked, run)  # type: ignore[arg-type]
        return
    found = try_lengths(SPEC, asked, run)  # type: ignore[arg-type]
    assert found.why_not == ""
    assert found.spec.joined == (JoinedAxis(1, 1, tuple(parts)),)
    assert found.spec.executed.inputs[1].fill == asked[-1].fill


def test_state_that_follows_a_length_is_cut_like_an_output() -> None:
    found = try_lengths(SPEC, [NOW], lambda inputs: [inputs[1].sum(axis=1), inputs[0]])
    assert found.spec.lengths == (Length("new", ((0, 1),), ((1, 1),)),)
    assert found.spec.joined == ()


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_state_grows_by_its_own_length_beside_others(count: int) -> None:
    others = [TensorSpec(f"i{at}", "FP32", (-1, 2), axis_names=("batch", f"n{at}", "")) for at in range(count)]

    def run(inputs: Sequence[Array]) -> Tensors:
        *sent, past = inputs
        ones = np.ones((len(past), 1, 2), np.float32)
        sums = sum(one.sum(axis=1) for one in sent) + np.where(past == -1, 0, past).sum(axis=1)
        return [sums, np.concatenate([past, ones], axis=1)]

    asked = [*(LengthAxis(one.name, 1) for one in others), PAST]
    found = try_lengths(replace(SPEC, inputs=tuple(others)), asked, run)
    assert found.spec.joined == (JoinedAxis(1, 1, (count, None)),)


def test_axes_of_states_without_names_are_lengths_apart() -> None:
    state = replace(STATE, input=replace(STATE.input, axis_names=()))
    spec = replace(SPEC, inputs=(TensorSpec("now", "FP32", (-1, 2)),), sequence=SequenceSpec((), (state,)))
    found = try_lengths(spec, [NOW, PAST], joins(1, 0))  # type: ignore[arg-type]
    assert [(one.name, one.inputs) for one in found.spec.lengths] == [
        ("axis 1", ((0, 1),)),
        ("axis 1 of states", ((1, 1),)),
    ]


def test_names_of_axes_move_with_the_batch_axis() -> None:
    """As in caches that begin with their time."""
    past = TensorSpec("past", "FP32", (-1, 2), axis_names=("past", "batch", ""), batch_axis=1)
    mask = TensorSpec("past_mask", "FP32", (-1,), axis_names=("batch", "past"))
    states = (
        State(past, replace(past, name="all"), np.zeros((1, 0, 2), np.float32)),
        State(mask, replace(mask, name="all_mask"), np.zeros((1, 0), np.float32)),
    )

    def run(inputs: Sequence[Array]) -> Tensors:
        now, past, mask = inputs
        ones = np.ones((len(now), 1), np.float32)
        sums = (past * mask[..., None]).sum(axis=1) + now.sum(axis=1)
        return [sums, np.concatenate([past, now[:, :1]], axis=1), np.concatenate([mask, ones], axis=1)]

    spec = replace(SPEC, inputs=(TensorSpec("now", "FP32", (3, 2)),), sequence=SequenceSpec((), states))
    assert try_lengths(spec, None, run).spec.lengths == (Length("past", ((1, 1), (2, 1))),)


def test_untried_model_cannot_have_states_of_free_sizes() -> None:
    with pytest.raises(LoadError, match="state 'all': its size may follow that of what is filled up"):
        without_trial(SPEC, [NOW])
    fixed = replace(STATE, input=replace(STATE.input, dims=(3, 2)), output=replace(STATE.output, dims=(3, 2)))
    assert without_trial(replace(SPEC, sequence=SequenceSpec((), (fixed,))), [NOW]).spec.lengths


def _refuses(inputs: Sequence[Array]) -> Tensors:
    raise ExecutionError("no such rows")


@pytest.mark.parametrize(
    ("state", "why"),
    [
        (
            lambda past: np.random.default_rng().random(past.shape, np.float32),
            "'all' shows the filling: it differs from",
        ),
        (np.zeros_like, "as all made-up rows give the same results"),
        (_refuses, "as it accepts no made-up inputs (no such rows)"),
    ],
)
def test_states_of_which_nothing_is_known_are_refused(state: Callable[[Array], Array], why: str) -> None:
    fixed = replace(STATE, input=replace(STATE.input, dims=(3, 2)), output=replace(STATE.output, dims=(3, 2)))
    fixed = replace(fixed, initial=np.zeros((1, 3, 2), np.float32))
    answer = np.zeros_like if state is np.zeros_like else np.asarray
    with pytest.raises(LoadError, match=re.escape(why)):
        try_lengths(
            replace(SPEC, sequence=SequenceSpec((), (fixed,))),
            [NOW],
            lambda inputs: [answer(inputs[0]).sum(axis=1), state(inputs[1])],
        )


def _slow(inputs: Sequence[Array]) -> Tensors:
    return [inputs[0].sum(axis=1), inputs[1]]


def _large(inputs: Sequence[Array]) -> Tensors:
    raise OutOfMemory("no memory")


@pytest.mark.parametrize(("run", "why"), [(_slow, "longer than 30 s"), (_large, "no memory")])
def test_machine_decides_nothing_about_fixed_states(run: Callable[[Sequence[Array]], Tensors], why: str) -> None:
    """Whether the trial takes too much depends on it; of states of free sizes, that is an error all the same."""
    fixed = replace(STATE, input=replace(STATE.input, dims=(3, 2)), output=replace(STATE.output, dims=(3, 2)))
    fixed = replace(fixed, initial=np.zeros((1, 3, 2), np.float32))
    now_ns = iter(range(0, 10**13, 10**10))
    spec = replace(SPEC, sequence=SequenceSpec((), (fixed,)))
    found = try_lengths(spec, [NOW], run, now_ns=lambda: next(now_ns))

    assert [one.inputs for one in found.spec.lengths] == [((0, 1),)]
    assert found.why_not.endswith(why)
    with pytest.raises(LoadError, match=f"state 'all': its size may follow .*{why}"):
        try_lengths(SPEC, [NOW], run, now_ns=lambda: next(now_ns))


def test_joined_output_of_another_size_is_refused() -> None:
    lengths = (Length("new", ((0, 1),)), Length("past", ((1, 1),)))
    spec = replace(SPEC, lengths=lengths, joined=(JoinedAxis(1, 1, (1, 0)),)).executed
    requests = [
        [np.zeros((1, new, 2), np.float32), np.zeros((1, past, 2), np.float32)] for new, past in ((2, 3), (1, 4))
    ]
    with pytest.raises(
        UnfitOutputs, match="output 'all': expected size 6 in axis 1, to which its parts were filled up"
    ):
        batch_runner(spec)(requests, lambda inputs: [inputs[1][:, 0], np.zeros((2, 7, 2), np.float32)])


def test_state_is_no_length_that_a_trial_finds_by_itself() -> None:
    names = ("batch", "words")
    ids, mask, past, both = (
        TensorSpec(one, "INT64", (-1,), axis_names=names) for one in ("ids", "mask", "past", "all")
    )
    spec = ModelSpec((ids, mask), (), batched=True)
    spec = replace(spec, sequence=SequenceSpec((), (State(past, both, np.zeros((1, 1), np.int64)),)))

    def run(inputs: Sequence[Array]) -> Tensors:
        ids, mask, past = inputs
        if past.shape != ids.shape:
            raise ExecutionError("the state has another size")
        return [ids * mask + past]

    assert try_lengths(spec, None, run).spec.lengths == ()
    assert try_lengths(spec, [LengthAxis("ids", 1)], run).spec.lengths == (
        Length("words", ((0, 1), (1, 1), (2, 1)), ((0, 1),)),
    )
