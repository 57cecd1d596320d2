"""Sequences whose states grow: each gets what it gets alone, or nothing of the model is filled up, whatever it does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.backends.errors import ExecutionError, LoadError
from paceline.backends.length_trial import try_lengths
from paceline.backends.ragged import batch_runner
from paceline.backends.spec import Array, Length, ModelSpec, SequenceSpec, State, Tensors, TensorSpec
from paceline.backends.trials import LengthAxis

Model = Callable[[Sequence[Array]], Tensors]
SIZE = 3
_WORDS = np.random.default_rng(0).standard_normal((64, SIZE)).astype(np.float32)


def _state(name: str, datatype: str, dims: tuple[int, ...], first: Array) -> State:
    names = ("batch", "past", "")[: len(dims) + 1]
    tensor = TensorSpec(name, datatype, dims, axis_names=names)
    return State(tensor, replace(tensor, name=f"{name}_out", axis_names=()), first)


SPEC = ModelSpec(
    (
        TensorSpec("words", "INT64", (-1,), axis_names=("batch", "now")),
        TensorSpec("mask", "INT64", (-1,), axis_names=("batch", "now")),
    ),
    (TensorSpec("answer", "FP32", (SIZE,)),),
    batched=True,
    sequence=SequenceSpec(
        (),
        (
            _state("keys", "FP32", (-1, SIZE), np.zeros((1, 0, SIZE), np.float32)),
            _state("seen_mask", "INT64", (-1,), np.zeros((1, 0), np.int64)),
            _state("count", "INT64", (1,), np.zeros((1, 1), np.int64)),
        ),
    ),
)
AXES = LengthAxis("words", 1), LengthAxis("keys", 1)


def attends(inputs: Sequence[Array], kind: str = "") -> Tensors:
    """Two layers of attention over all rows so far, of which those that `seen_mask` leaves out don't count. `keys` are
    what the first layer gives, `count` is how many rows there have been."""
    words, mask, keys, seen, count = inputs
    new = _WORDS[words % 64] * mask[..., None]
    there = np.concatenate([seen, mask], axis=1)
    if kind == "all rows":
        there = np.ones_like(there)
    if kind == "rows before the count":
        there = np.arange(there.shape[1])[None] < count + mask.sum(axis=1, keepdims=True)
    if kind == "place":
        new = new + np.float32(keys.shape[1])
    rows = np.concatenate([keys, new], axis=1)
    if kind == "many rows":
        new = new + np.float32(rows.shape[1] > 100)
        rows = np.concatenate([keys, new], axis=1)
    if kind == "only what was before":
        rows, there = keys + 1, seen
    scores = np.where(there[:, None] > 0, new @ np.swapaxes(rows, 1, 2), -1e9)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True, initial=-1e9))
    read = weights / np.maximum(weights.sum(axis=-1, keepdims=True), 1e-9) @ rows
    order = [read * mask[..., None] + new, keys] if kind == "in front" else [keys, read * mask[..., None] + new]
    after, left = np.concatenate(order, axis=1), np.concatenate([seen, mask], axis=1)
    if kind == "window":
        after, left = after[:, -500:], left[:, -500:]
    answer = after.sum(axis=1) + (rows.mean(axis=1) if kind in ("answers by the mean", "many rows") else 0)
    return [one.astype(np.float32) for one in (answer, after)] + [left, count + mask.sum(axis=1, keepdims=True)]


def _of(kind: str) -> Model:
    return lambda inputs: attends(inputs, kind)


KINDS = ["all rows", "rows before the count", "place", "many rows", "only what was before", "in front", "window"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("asked", [AXES, None])
def test_states_that_show_the_filling_are_never_filled_up(kind: str, asked: Sequence[LengthAxis] | None) -> None:
    if asked is not None:
        shows = r"is the state of the step after it|varies, and not as the inputs|fails once they are filled up"
        with pytest.raises(LoadError, match=shows):
            try_lengths(SPEC, asked, _of(kind))
        return
    found = try_lengths(SPEC, None, _of(kind)).spec.lengths
    assert all(index < len(SPEC.inputs) for one in found for index, _ in one.inputs)


@pytest.mark.parametrize("asked", [AXES, None])
def test_cache_with_a_mask_is_filled_up(asked: Sequence[LengthAxis] | None) -> None:
    trial = try_lengths(SPEC, asked, attends)

    assert trial.why_not == ""
    assert trial.spec.lengths == (Length("now", ((0, 1), (1, 1))), Length("past", ((2, 1), (3, 1))))


def test_found_states_put_together_are_not_for_gpus() -> None:
    assert try_lengths(SPEC, None, attends, on_gpu=True).spec.lengths == ()
    assert try_lengths(SPEC, AXES, attends, on_gpu=True).spec.joined


def test_state_of_a_clients_name_keeps_its_own_size() -> None:
    """As of the last chunk, which an exporter gives the symbol of this one."""
    assert SPEC.sequence is not None
    last = _state("last", "INT64", (-1,), np.zeros((1, 1), np.int64))
    last = replace(last, input=replace(last.input, axis_names=("batch", "now")))
    spec = replace(SPEC, sequence=SequenceSpec((), (last, *SPEC.sequence.states)))

    def run(inputs: Sequence[Array]) -> Tensors:
        words, mask, last, *others = inputs
        answer, *states = attends([words, mask, *others])
        return [answer + last.sum(axis=1, keepdims=True), words * mask, *states]

    found = try_lengths(spec, None, run).spec.lengths
    assert [(one.name, one.inputs) for one in found] == [("now", ((0, 1), (1, 1))), ("past", ((3, 1), (4, 1)))]


def test_cache_is_found_beside_a_mask_without_effect() -> None:
    def run(inputs: Sequence[Array]) -> Tensors:
        words, mask, *states = inputs
        return attends([words, np.ones_like(mask), *states])

    assert try_lengths(SPEC, None, run).spec.lengths == (Length("past", ((2, 1), (3, 1))),)


@pytest.mark.parametrize("asked", [AXES, None])
def test_cache_of_a_model_with_few_places_is_filled_up(asked: Sequence[LengthAxis] | None) -> None:
    def run(inputs: Sequence[Array]) -> Tensors:
        if inputs[0].shape[1] + inputs[2].shape[1] > 64:
            raise ExecutionError("there are 64 places")
        return attends(inputs)

    assert len(try_lengths(SPEC, asked, run).spec.lengths) == 2


def test_slow_trial_of_states_leaves_time_for_others() -> None:
    now_s = [0.0]

    def run(inputs: Sequence[Array]) -> Tensors:
        words, mask, keys, *states = inputs
        now_s[0] += 6 if keys.shape[1] > 2 else 0.1
        answer = np.repeat((words * mask).sum(axis=1, keepdims=True), SIZE, axis=1).astype(np.float32)
        return [answer, keys, *states]

    trial = try_lengths(SPEC, None, run, now_ns=lambda: int(now_s[0] * 1e9))
    assert trial.spec.lengths == (Length("now", ((0, 1), (1, 1))),)


def test_answer_that_shows_the_filling_is_told_of() -> None:
    trial = try_lengths(SPEC, AXES, _of("answers by the mean"))

    assert "output 'answer' of a request of size" in trial.why_not
    assert trial.spec.joined


FILLED = try_lengths(SPEC, AXES, attends).spec


@settings(max_examples=40)
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9)), min_size=1, max_size=5), max_size=12),
    st.sampled_from([(), (4, 16, 64)]),
    st.booleans(),
    st.integers(0, 2),
)
def test_steps_of_any_ages_leave_states_as_alone(
    batches: Sequence[Sequence[tuple[int, int]]], sizes: tuple[int, ...], in_steps: bool, padding: int
) -> None:
    """Of five sequences; each batch has a step of some of them, with so many words."""
    lengths = tuple(replace(one, sizes=sizes, in_steps=in_steps) for one in FILLED.lengths)
    run = batch_runner(replace(FILLED, lengths=lengths).executed)
    assert SPEC.sequence is not None
    first = tuple(state.initial for state in SPEC.sequence.states)
    states, alone = dict.fromkeys(range(5), first), dict.fromkeys(range(5), first)
    random = np.random.default_rng(len(batches))

    for batch in batches:
        members = dict(batch)
        sent = {
            one: (random.integers(0, 64, (1, size)), random.integers(0, 2, (1, size))) for one, size in members.items()
        }
        results = run([(*sent[one], *states[one]) for one in members], attends, len(members) + padding).results
        for one, result in zip(members, results, strict=True):
            assert not isinstance(result, Exception)
            expected = attends((*sent[one], *alone[one]))
            for mine, other in zip(result, expected, strict=True):
                assert mine.shape == other.shape
                np.testing.assert_allclose(mine, other, rtol=1e-3, atol=1e-3)
            states[one], alone[one] = tuple(map(np.array, result[1:])), tuple(expected[1:])
