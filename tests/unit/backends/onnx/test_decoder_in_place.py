"""Rows in buffers where they stay: each row's keys and values are what was computed for it, whoever enters, leaves or
is taken elsewhere, and nothing is copied but what moves."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from paceline.backends.errors import ExecutionError, UnfitOutputs
from paceline.backends.onnx.decoder_block import NO_TOKEN
from paceline.backends.onnx.decoder_in_place import InPlaceBlock
from paceline.backends.onnx.decoder_layout import DecoderLayout
from paceline.backends.spec import Array, ModelSpec, Tensors, TensorSpec

LEADS = (
    TensorSpec("input_ids", "INT64", (-1, -1)),
    TensorSpec("seqlens_k", "INT32", (-1, 1)),
    TensorSpec("total_sequence_length", "INT32", (1,)),
)


def layout(least_past: int = 0) -> DecoderLayout:
    pasts = [TensorSpec(f"past_key_values.0.{part}", "FP32", (-1, 2, -1, 3)) for part in ("key", "value")]
    presents = [TensorSpec(f"present.0.{part}", "FP32", (-1, 2, -1, 3)) for part in ("key", "value")]
    executed = ModelSpec((*LEADS, *pasts), (TensorSpec("logits", "FP32", (-1, -1, -1)), *presents))
    return DecoderLayout(executed, tuple(one.name for one in LEADS), in_place=True, least_past=least_past)


class Model:
    """Keeps tokens. The logits of each are the sum of those up to it, or only the last one's are told."""

    def __init__(self, *, only_last: bool = False, logits_rank: int = 3) -> None:
        self.only_last = only_last
        self.logits_rank = logits_rank
        self.fails = False
        self.bindings = 0
        self.executed = list[tuple[int, ...]]()

    def run(self, inputs: Sequence[Array]) -> Tensors:
        raise AssertionError("nothing is handed back")

    def keeping(self, kept: Sequence[Array]) -> Callable[[Sequence[Array]], Tensors]:
        self.bindings += 1
        assert all(one.flags.c_contiguous for one in kept)
        return lambda inputs: self.execute(inputs, kept)

    def execute(self, inputs: Sequence[Array], kept: Sequence[Array]) -> Tensors:
        tokens, before, total = inputs
        assert (before.dtype, total.dtype, before.shape) == (np.int32, np.int32, (len(tokens), 1))
        after = before[:, 0] + 1
        assert total.tolist() == [after.max()]
        more = tokens.shape[1]
        self.executed.append(tokens.shape)
        begins = after * 0 if total[0] == more else after - more
        assert len(tokens) == 1 or more == 1 or not begins.any()
        sums = np.zeros((*tokens.shape, 1), np.float32)
        for row, (new, begin) in enumerate(zip(tokens, begins.tolist(), strict=True)):
            for one in kept:
                one[row, :, begin : begin + more] = new[:, None]
            sums[row, :, 0] = np.cumsum(kept[0][row, 0, : begin + more, 0])[begin:]
        if self.fails:
            raise ExecutionError("after it was written")
        return [sums[:, -1:] if self.only_last else sums.reshape(sums.shape[: self.logits_rank])]

    def abandon(self) -> None: ...

    def close(self) -> None: ...


def begun(model: Model, row: int, tokens: Sequence[int]) -> InPlaceBlock:
    block = InPlaceBlock.empty(row, layout())
    block.step(model, np.array([tokens]), layout())
    return block


def kept(block: InPlaceBlock) -> dict[int, list[int]]:
    """The tokens of each row, which all heads and elements have."""
    found: dict[int, list[int]] = {}
    for place, (row, length) in enumerate(zip(block.rows, block.lengths.tolist(), strict=True)):
        tokens = block.pasts[0][place, 0, :length, 0]
        for past in block.pasts:
            assert (past[place, :, :length] == tokens[None, :, None]).all()
        found[row] = tokens.astype(int).tolist()
    return found


@pytest.mark.parametrize("seed", range(5))
def test_rows_keep_theirs_whatever_becomes_of_others(seed: int) -> None:
    random, model, truth = np.random.default_rng(seed), Model(), dict[int, list[int]]()
    blocks = dict[int, InPlaceBlock]()
    for number in range(400):
        act = random.integers(0, 10)
        alive = [*blocks]
        if act < 2 or not alive:
            truth[number] = random.integers(0, 50, random.integers(1, 30)).tolist()
            blocks[number] = begun(model, number, truth[number])
            continue
        chosen = random.choice(alive, random.integers(1, len(alive) + 1), replace=False).tolist()
        if act < 4:
            row = chosen[0]
            blocks.pop(row).drop(row)
            del truth[row]
            continue
        block = InPlaceBlock.of(tuple(chosen), list({id(one): one for one in map(blocks.get, chosen) if one}.values()))
        assert sorted(block.rows) == sorted(chosen)
        more = int(random.integers(1, 4)) if act == 9 else 1
        tokens = random.integers(0, 50, (len(chosen), more))
        logits = block.step(model, tokens, layout())
        for row, new in zip(block.rows, tokens.tolist(), strict=True):
            truth[row] += new
            blocks[row] = block
        assert logits[:, 0].tolist() == [sum(truth[row]) for row in block.rows]
        for one in blocks.values():
            assert all(truth[row] == tokens for row, tokens in kept(one).items() if blocks.get(row) is one)


def test_rows_enter_and_leave_without_moving_others() -> None:
    model = Model()
    blocks = [begun(model, row, [row] * 5) for row in range(4)]
    block = InPlaceBlock.of((0, 1, 2, 3), blocks)
    buffers = [*block.pasts]
    block.drop(1)
    assert kept(block) == {0: [0] * 5, 3: [3] * 5, 2: [2] * 5}
    block = InPlaceBlock.of((0, 2, 3, 9), [block, begun(model, 9, [9])])
    block.step(model, np.ones((4, 1), np.int64), layout())
    assert kept(block) == {0: [0] * 5 + [1], 3: [3] * 5 + [1], 2: [2] * 5 + [1], 9: [9, 1]}
    assert all(one is other for one, other in zip(block.pasts, buffers, strict=True))


def test_same_rows_are_bound_once() -> None:
    model = Model()
    block = InPlaceBlock.of((0, 1), [begun(model, row, [row] * 9) for row in range(2)])
    before = model.bindings
    for _ in range(5):
        block = InPlaceBlock.of((1, 0), [block])
        block.step(model, np.ones((2, 1), np.int64), layout())
    assert model.bindings == before + 1


def test_rows_taken_apart_are_in_one_block_each() -> None:
    block = InPlaceBlock.of((0, 1, 2, 3), [begun(Model(), row, [row]) for row in range(4)])
    other = InPlaceBlock.of((1, 2), [block])
    assert kept(block) == {0: [0], 3: [3]}
    assert kept(other) == {1: [1], 2: [2]}


def test_some_tokens_after_pasts_are_stepped_row_by_row() -> None:
    model = Model()
    block = InPlaceBlock.of((0, 1), [begun(model, 0, [1]), begun(model, 1, [1, 1])])
    model.executed.clear()
    logits = block.step(model, np.array([[1, 2], [3, 4]]), layout())
    assert (model.executed, logits.tolist()) == ([(1, 2), (1, 2)], [[4], [9]])


def begun_together(model: Model) -> InPlaceBlock:
    block = InPlaceBlock.of((0, 1), [InPlaceBlock.empty(row, layout()) for row in range(2)])
    logits = block.step(model, np.array([[NO_TOKEN, NO_TOKEN, 1], [2, 3, 4]]), layout())
    assert logits.tolist() == [[1], [9]]
    return block


def test_prompts_of_different_lengths_begin_together() -> None:
    assert kept(begun_together(Model())) == {0: [1], 1: [2, 3, 4]}
    with pytest.raises(UnfitOutputs, match="expected logits of shape"):
        begun_together(Model(only_last=True))


def test_failed_step_changes_nothing() -> None:
    model = Model()
    block = begun(model, 0, [1, 2])
    model.fails = True
    with pytest.raises(ExecutionError):
        block.step(model, np.array([[3]]), layout())
    model.fails = False
    assert block.step(model, np.array([[4]]), layout()).tolist() == [[7]]
    assert kept(block) == {0: [1, 2, 4]}


def test_buffers_shrink_when_little_is_left() -> None:
    model = Model()
    block = InPlaceBlock.of((0, 1), [begun(model, 0, [1] * 1000), begun(model, 1, [1])])
    assert block.pasts[0].shape == (2, 2, 1024, 3)
    block.drop(0)
    block.step(model, np.array([[1]]), layout())
    assert block.pasts[0].shape == (1, 2, 16, 3)


def test_pasts_are_never_shorter_than_a_window() -> None:
    block = InPlaceBlock.empty(0, layout(least_past=100))
    block.step(Model(), np.array([[1, 2]]), layout(least_past=100))
    assert block.pasts[0].shape[2] == 100


def test_logits_may_be_those_of_the_last_token_alone() -> None:
    block = InPlaceBlock.empty(0, layout())
    assert block.step(Model(only_last=True), np.array([[1, 2]]), layout()).tolist() == [[3]]


def test_logits_of_another_shape_are_refused() -> None:
    block = InPlaceBlock.empty(0, layout())
    with pytest.raises(UnfitOutputs, match="expected logits of shape"):
        block.step(Model(logits_rank=2), np.array([[1, 2]]), layout())
