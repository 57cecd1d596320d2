"""Rows whose pasts are copied in each step: each row's logits are what was computed for it alone, whoever enters or
leaves or takes the place of another, and all are copied only where that is worth it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Self, cast

import numpy as np
import onnxruntime as ort  # type: ignore[import-untyped,unused-ignore]
import pytest

from paceline.backends.cuda.accelerator import CudaAccelerator, open_streams
from paceline.backends.errors import ExecutionError, OutOfMemory
from paceline.backends.onnx.decoder_block import GONE, NO_TOKEN, Block
from paceline.backends.onnx.decoder_layout import DecoderLayout
from paceline.backends.onnx.device_steps import Kept
from paceline.backends.spec import Array, ModelSpec, Tensors, TensorSpec
from tests.host_accelerator import HostAccelerator

LEADS = {
    "input_ids": ("INT64", (-1, -1)),
    "attention_mask": ("INT64", (-1, -1)),
    "position_ids": ("INT64", (-1, -1)),
    "encoder_attention_mask": ("INT64", (-1, -1)),
    "encoder_hidden_states": ("FP32", (-1, -1, 1)),
}
POSITIONS = 40
"""No row has more, whoever is beside it."""


def layout(*, encoder: bool = False) -> DecoderLayout:
    leads = [TensorSpec(name, *one) for name, one in LEADS.items() if encoder or not name.startswith("encoder")]
    names = ["0.decoder.key", "0.encoder.key"] if encoder else ["0.key"]
    pasts = [TensorSpec(f"past_key_values.{name}", "FP32", (-1, 1, -1, 1)) for name in names]
    presents = [TensorSpec(f"present.{name}", "FP32", (-1, 1, -1, 1)) for name in names]
    executed = ModelSpec((*leads, *pasts), (TensorSpec("logits", "FP32", (-1, -1, -1)), *presents))
    return DecoderLayout(executed, tuple(one.name for one in leads), crosses=len(names) - 1)


class Model:
    """Keeps each token times its position. The logits are the sum of what a row keeps, and of its source."""

    def __init__(self) -> None:
        self.fails = False
        self.rows = list[int]()

    def run(self, inputs: Sequence[Array]) -> Tensors:
        tokens, mask, positions, *others = inputs
        self.rows.append(len(tokens))
        if self.fails:
            raise ExecutionError("it fails")
        assert positions.min() >= 0
        assert positions.max() < POSITIONS
        past = others[2] if len(others) > 1 else others[0]
        assert mask.shape == (len(tokens), past.shape[2] + tokens.shape[1])
        new = ((positions + 1) * tokens).astype(np.float32)[:, None, :, None]
        present = np.concatenate([past, new], axis=2)
        assert np.isfinite(present).all()
        sums = (present[:, 0, :, 0] * mask).sum(axis=1)
        if len(others) == 1:
            return [np.repeat(sums, tokens.shape[1]).reshape(*tokens.shape, 1), present]
        source_mask, source, _, cross = others
        made = cross if past.shape[2] else 2 * source[:, None]
        sums = sums + (source[..., 0] * source_mask).sum(axis=1) + (made[:, 0, :, 0] * source_mask).sum(axis=1)
        return [np.repeat(sums, tokens.shape[1]).reshape(*tokens.shape, 1), present, *([] if past.shape[2] else [made])]

    def keeping(self, kept: Sequence[Array]) -> Callable[[Sequence[Array]], Tensors]:
        raise AssertionError("nothing is kept in place")

    def abandon(self) -> None: ...

    def close(self) -> None: ...


class OnDevice(Model):
    """Leaves what it keeps on a device, which does no copy before somebody waits for it."""

    def __init__(self) -> None:
        super().__init__()
        self._streams = open_streams(cast("CudaAccelerator", HostAccelerator()))
        self.copied = list[Any]()

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        self._streams.compute.synchronize()
        self.copied.clear()
        logits, *kept = super().run([one.value.numpy() if isinstance(one, Kept) else one for one in inputs])
        return [logits, *map(self.left, kept)]

    def left(self, array: Array) -> Kept:
        return Kept(ort.OrtValue.ortvalue_from_numpy(array), self._streams, self.copied)


class OnFullDevice(OnDevice):
    """Now and then, it has no memory for a copy."""

    def left(self, array: Array) -> Kept:
        return Crowded(ort.OrtValue.ortvalue_from_numpy(array), self._streams, self.copied)


class Crowded(Kept):
    def joined(self, parts: Sequence[tuple[Self, int, int]], longest: int, *, at_right: bool) -> Self:
        joined = super().joined(parts, longest, at_right=at_right)
        if len(self._copied) % 3 == 0:
            raise OutOfMemory("too little")
        return joined


def source_of(row: int, *, encoder: bool) -> Array | None:
    return np.full((1, 1 + row % 5, 1), row, np.float32) if encoder else None


def begun(model: Model, row: int, tokens: Sequence[int], *, encoder: bool = False) -> Block:
    block = Block.empty(row, layout(encoder=encoder), source_of(row, encoder=encoder))
    block.step(model, np.array([tokens]), layout(encoder=encoder))
    return block


def sum_of(row: int, tokens: Sequence[int], *, encoder: bool = False) -> float:
    source = source_of(row, encoder=encoder)
    return sum((place + 1) * token for place, token in enumerate(tokens)) + (0 if source is None else 3 * source.sum())


def step(block: Block, model: Model, token: int = 1, *, encoder: bool = False) -> dict[int, float]:
    """What each row's logits are."""
    logits = block.step(model, np.full((len(block.rows), 1), token), layout(encoder=encoder))
    return {row: one for row, one in zip(block.rows, logits[:, 0].tolist(), strict=True) if row != GONE}


@pytest.mark.parametrize("kind", [Model, OnDevice, OnFullDevice])
@pytest.mark.parametrize("encoder", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_rows_compute_what_they_do_alone(seed: int, encoder: bool, kind: type[Model]) -> None:
    random, model, truth, blocks = np.random.default_rng(seed), kind(), dict[int, list[int]](), dict[int, Block]()
    taken = 0
    for number in range(600):
        act = random.integers(0, 10)
        alive = [*blocks]
        if act < 2 or not alive:
            truth[number] = random.integers(0, 50, random.integers(1, 12)).tolist()
            blocks[number] = begun(model, number, truth[number], encoder=encoder)
            continue
        chosen = alive if act > 4 else random.choice(alive, random.integers(1, len(alive) + 1), replace=False).tolist()
        for row in [row for row in alive if len(truth[row]) == POSITIONS or (act == 2 and row == chosen[0])]:
            blocks.pop(row).drop(row)
            del truth[row]
        if not (chosen := [row for row in chosen if row in blocks]):
            continue
        before = {id(one): len(one.rows) for one in blocks.values()}
        block = Block.of(chosen, [*dict.fromkeys(blocks[row] for row in chosen)])
        taken += before.get(id(block)) == len(chosen) > 2 and any(blocks[row] is not block for row in chosen)
        assert sorted(row for row in block.rows if row != GONE) == sorted(chosen)
        blocks |= dict.fromkeys(chosen, block)
        token = int(random.integers(0, 50))
        found = step(block, model, token, encoder=encoder)
        for row in chosen:
            truth[row].append(token)
        assert found == {row: sum_of(row, truth[row], encoder=encoder) for row in chosen}
    assert taken


def test_new_row_takes_the_place_of_a_gone_one() -> None:
    model = Model()
    block = Block.of((0, 1, 2, 3, 4), [begun(model, row, [row] * 5) for row in range(5)])
    block.drop(1)
    assert Block.of((0, 2, 3, 4), [block]) is block
    assert set(step(block, model)) == {0, 2, 3, 4}
    pasts = block.pasts
    assert Block.of((0, 9, 2, 3, 4), [begun(model, 9, [7]), block]) is block
    assert (block.rows, block.pasts is pasts) == ((0, 9, 2, 3, 4), True)
    assert step(block, model)[9] == sum_of(9, [7, 1])
    assert model.rows[-1] == 5


@pytest.mark.parametrize("new", [{9: [7] * 6}, {8: [7], 9: [7]}])
def test_longer_row_or_second_one_has_all_copied(new: dict[int, list[int]]) -> None:
    model = Model()
    block = Block.of((0, 1, 2, 3, 4), [begun(model, row, [row] * 5) for row in range(5)])
    block.drop(1)
    copy = Block.of((0, 2, 3, 4, *new), [block, *(begun(model, row, tokens) for row, tokens in new.items())])
    assert copy is not block
    assert {*block.rows} == {GONE}
    assert step(copy, model)[9] == sum_of(9, [*new[9], 1])


def test_part_of_rows_is_taken_from_the_others() -> None:
    model = Model()
    block = Block.of((0, 1, 2, 3), [begun(model, row, [row] * 5) for row in range(4)])
    part = Block.of((0, 2), [block])
    assert (part.rows, block.rows) == ((0, 2), (GONE, 1, GONE, 3))
    both = Block.of((1, 7), [block, begun(model, 7, [5])])
    assert step(both, model) == {1: sum_of(1, [1] * 6), 7: sum_of(7, [5, 1])}


def test_gone_rows_leave_once_they_cost_a_copy() -> None:
    model = Model()
    block = Block.of(range(8), [begun(model, row, [1] * 20) for row in range(8)])
    block.drop(3)
    kept = [row for row in range(8) if row != 3]
    sizes = []
    for _ in range(10):
        block = Block.of(kept, [block])
        step(block, model)
        sizes.append(model.rows[-1])
    assert sizes == [8] * 9 + [7]


def test_much_that_nobody_needs_leaves_at_once() -> None:
    model = Model()
    block = Block.of((0, 1, 2), [begun(model, 0, [1] * 30), *(begun(model, row, [1]) for row in (1, 2))])
    block.drop(0)
    block = Block.of((1, 2), [block])
    assert block.pasts[0].shape[::2] == (2, 1)


def test_failed_step_changes_nothing_of_them() -> None:
    model = Model()
    block = Block.of((0, 1), [Block.empty(row, layout()) for row in range(2)])
    model.fails = True
    with pytest.raises(ExecutionError):
        block.step(model, np.array([[NO_TOKEN, 1], [2, 3]]), layout())
    model.fails = False
    block.step(model, np.array([[NO_TOKEN, 1], [2, 3]]), layout())
    assert step(block, model) == {0: sum_of(0, [1, 1]), 1: sum_of(1, [2, 3, 1])}
