"""The decoders that tests are made with: rows padded on the left, prompts in pieces and a past handed back compute what
a row alone computes in one run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tests import decoder_models
from tests.decoder_models import FIXED_COST, TINY, TINY_GPT2, Decoder
from tests.generation_truth import NaiveLoop
from tests.wire import Array

DECODERS = {
    "llama": TINY,
    "gpt2": TINY_GPT2,
    "llama-counting": replace(TINY, places="counted"),
    "gpt2-counting": replace(TINY_GPT2, places="counted"),
    "llama-fp16": replace(TINY, datatype="FP16", logits="FP32"),
    "gpt2-fp16": replace(TINY_GPT2, datatype="FP16"),
}
LENGTHS = (3, 12, 7)


class Opened(NamedTuple):
    loop: NaiveLoop
    allowed: float


@pytest.fixture(scope="module", params=DECODERS)
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Opened:
    """A decoder, and by how much its logits may differ."""
    decoder = DECODERS[request.param]
    folder = decoder_models.write(decoder, tmp_path_factory.mktemp("decoder"))
    return Opened(NaiveLoop(folder), 0.05 if decoder.datatype == "FP16" else 2e-5)


def prompts(lengths: tuple[int, ...] = LENGTHS) -> list[Array]:
    random = np.random.default_rng(0)
    return [random.integers(0, TINY.vocabulary, (1, length)) for length in lengths]


def padded(rows: list[Array], width: int, axis: int) -> Array:
    """The rows, one below the other, with zeros on their left up to `width`."""
    pads = [[(width - row.shape[axis] if at == axis else 0, 0) for at in range(row.ndim)] for row in rows]
    return np.concatenate([np.pad(row, pad) for row, pad in zip(rows, pads, strict=True)])


def placed(mask: Array) -> Array:
    """Positions as Hugging Face counts them: 1 where there is nothing."""
    return np.where(mask == 0, 1, np.cumsum(mask, axis=1) - 1)


def test_rows_padded_left_are_as_alone(opened: Opened) -> None:
    rows, width = prompts(), max(LENGTHS)
    mask = padded([np.ones_like(row) for row in rows], width, 1)
    ids = padded(rows, width, 1)
    logits, past = opened.loop.step(ids, opened.loop.empty_past(len(rows)), mask=mask, positions=placed(mask))
    following = np.array([[5], [6], [7]])
    mask = np.concatenate([mask, np.ones_like(following)], axis=1)
    later, _ = opened.loop.step(following, past, mask=mask, positions=placed(mask)[:, -1:])
    for number, row in enumerate(rows):
        alone, own = opened.loop.step(row, opened.loop.empty_past())
        np.testing.assert_allclose(logits[number, width - row.shape[1] :], alone[0], atol=opened.allowed)
        alone, _ = opened.loop.step(following[number : number + 1], own)
        np.testing.assert_allclose(later[number], alone[0], atol=opened.allowed)


def test_pasts_joined_left_padded_go_on(opened: Opened) -> None:
    rows, width = prompts(), max(LENGTHS)
    pasts = [opened.loop.step(row, opened.loop.empty_past())[1] for row in rows]
    joined = {name: padded([past[name] for past in pasts], width, 2) for name in pasts[0]}
    following = np.array([[5], [6], [7]])
    mask = padded([np.ones((1, length + 1), np.int64) for length in LENGTHS], width + 1, 1)
    logits, after = opened.loop.step(following, joined, mask=mask, positions=np.array(LENGTHS)[:, None])
    for number, past in enumerate(pasts):
        alone, own = opened.loop.step(following[number : number + 1], past)
        np.testing.assert_allclose(logits[number], alone[0], atol=opened.allowed)
        for name, kept in own.items():
            np.testing.assert_allclose(after[name][number, :, -kept.shape[2] :], kept[0], atol=opened.allowed)


def test_prompt_in_pieces_is_as_whole(opened: Opened) -> None:
    (prompt,) = prompts((20,))
    whole, past = opened.loop.step(prompt, opened.loop.empty_past())
    pieces, found = opened.loop.empty_past(), []
    for begin, end in ((0, 1), (1, 8), (8, 20)):
        logits, pieces = opened.loop.step(prompt[:, begin:end], pieces)
        found.append(logits)
    np.testing.assert_allclose(np.concatenate(found, axis=1), whole, atol=opened.allowed)
    for name, kept in past.items():
        np.testing.assert_allclose(pieces[name], kept, atol=opened.allowed)


def test_mask_and_positions_are_heeded(opened: Opened) -> None:
    (prompt,) = prompts((8,))
    alone, _ = opened.loop.step(prompt, opened.loop.empty_past())
    positions = np.arange(8)[None]
    changes = [{"mask": np.array([[0, *[1] * 7]]), "positions": positions}, {"positions": positions * 2}]
    for changed in changes if opened.loop.wants_positions else changes[:1]:
        logits, _ = opened.loop.step(prompt, opened.loop.empty_past(), **changed)
        assert np.abs(logits[0, -1].astype(np.float32) - alone[0, -1]).max() > 0.2


@pytest.mark.parametrize("decoder", [TINY, TINY_GPT2], ids=["llama", "gpt2"])
def test_places_by_index_suit_unpadded_rows_alone(tmp_path: Path, decoder: Decoder) -> None:
    given, indexed = (
        NaiveLoop(decoder_models.write(replace(decoder, places=places), tmp_path / places))
        for places in ("given", "index")
    )
    (prompt,) = prompts((6,))
    expected, _ = given.step(prompt, given.empty_past())
    logits, _ = indexed.step(prompt, indexed.empty_past())
    np.testing.assert_array_equal(logits, expected)
    mask = np.array([[0, 0, *[1] * 6]])
    logits, _ = indexed.step(np.pad(prompt, ((0, 0), (2, 0))), indexed.empty_past(), mask=mask)
    # Rotary positions tell how far apart two tokens are, so shifting all of them changes nothing.
    assert np.allclose(logits[:, 2:], expected, atol=1e-4) == (decoder.family == "llama")


@pytest.mark.parametrize("decoder", DECODERS.values(), ids=DECODERS)
def test_tiny_decoders_are_small_files(tmp_path: Path, decoder: Decoder) -> None:
    assert (decoder_models.write(decoder, tmp_path) / "model.onnx").stat().st_size < 200_000


def test_fixed_cost_changes_no_logits(tmp_path: Path) -> None:
    costly, cheap = (
        NaiveLoop(decoder_models.write(replace(FIXED_COST, fixed_products=products), tmp_path / f"{products}"))
        for products in (1, 0)
    )
    (prompt,) = prompts((5,))
    logits, _ = costly.step(prompt, costly.empty_past())
    np.testing.assert_array_equal(logits, cheap.step(prompt, cheap.empty_past())[0])
