"""What a decoder, and its encoder, are tried for before anybody relies on them: how requests may share executions.

Lives here: some executions with made-up tokens, compared with each other. Must not: sessions, files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from paceline.backends.errors import ExecutionError
from paceline.backends.onnx.decoder_block import NO_TOKEN, Block, StepsModel
from paceline.backends.onnx.decoder_in_place import block_type
from paceline.backends.onnx.decoder_layout import DecoderLayout
from paceline.backends.onnx.encoder import Encoder, EncoderLayout
from paceline.backends.spec import Array

_CLOSE, _ON_GPU = {"FP32": 1e-3, "FP16": 2e-2}, {"FP32": 1e-2, "FP16": 2e-2}
"""How far logits may be from what they are alone, in parts of the largest, by the datatype of the pasts. A GPU
multiplies many rows of FP32 with ten bits of fraction (TF32), and maybe a single one with all."""


@dataclass(frozen=True, slots=True)
class Trial:
    """`vocabulary`: how many tokens the model knows. `pads`: rows of different lengths give together what they give
    alone; `pads_prompts`: also where they begin. `in_pieces`: a prompt in pieces gives what the whole gives.
    `pads_sources`: rows whose encoder has got texts of different lengths give together what they give alone."""

    vocabulary: int
    pads: bool = True
    pads_prompts: bool = True
    in_pieces: bool = True
    pads_sources: bool = False


def try_steps(
    model: StepsModel,
    layout: DecoderLayout,
    said: Mapping[str, Any],
    sources: Sequence[Array] = (),
    *,
    on_gpu: bool = False,
) -> Trial:
    """`said` is what files beside the model say, `sources` what its encoder has left of two requests, if it has one.
    Blocks for some executions. Raises ExecutionError, also if a token after a prompt doesn't give what it gives as part
    of it."""
    known, close = said.get("vocab_size"), (_ON_GPU if on_gpu else _CLOSE)[layout.pasts[0].datatype]
    tokens = np.arange(1, 7) % (known if isinstance(known, int) and known > 0 else 8)
    source, other_source = sources or (None, None)
    kind = block_type(layout)
    whole, stepped, pieces, short, *beside = (kind.empty(row, layout, source) for row in range(8))
    in_one = whole.step(model, tokens[None], layout)
    prompt = stepped.step(model, tokens[None, :5], layout)
    begun = np.concatenate([prompt, short.step(model, tokens[None, :3], layout)])
    pieces.step(model, tokens[None, :2], layout)
    in_pieces = _gives(prompt, pieces, model, tokens[None, 2:5], layout, close)
    for block, length in zip(beside, (5, 3), strict=False):
        block.step(model, tokens[None, :length], layout)
    both, prompts = kind.of((4, 5), beside[:2]), kind.of((6, 7), beside[2:])
    alone = [block.step(model, tokens[None, 5:], layout) for block in (stepped, short)]
    if not _are_close(in_one, alone[0], close):
        raise ExecutionError("a token after a prompt doesn't give what it gives as part of it")
    pads = _gives(np.concatenate(alone), both, model, tokens[[5, 5], None], layout, close)
    filled = np.array([tokens[:5], [NO_TOKEN, NO_TOKEN, *tokens[:3]]])
    pads_prompts = _gives(begun, prompts, model, filled, layout, close) and _gives(
        np.concatenate(alone), prompts, model, tokens[[5, 5], None], layout, close
    )
    trial = Trial(in_one.shape[1], pads, pads_prompts, in_pieces)
    if other_source is None:
        return trial
    return replace(trial, pads_sources=_pads_sources(model, layout, sources, tokens, close))


def _pads_sources(
    model: StepsModel, layout: DecoderLayout, sources: Sequence[Array], tokens: Array, close: float
) -> bool:
    """Whether rows with these `sources` give together what they give alone, at their beginning and later."""
    kind = block_type(layout)
    alone, joined, begun = ([kind.empty(row, layout, source) for row, source in enumerate(sources)] for _ in range(3))
    wanted = np.concatenate([block.step(model, tokens[None, :5], layout) for block in alone])
    both = kind.of((0, 1), begun)
    if not _gives(wanted, both, model, tokens[None, :5].repeat(2, axis=0), layout, close):
        return False
    for block in joined:
        block.step(model, tokens[None, :5], layout)
    last = np.concatenate([block.step(model, tokens[None, 5:], layout) for block in alone])
    return _gives(last, kind.of((0, 1), joined), model, tokens[[5, 5], None], layout, close)


def try_encoder(
    model: StepsModel, layout: EncoderLayout, vocabulary: int, *, on_gpu: bool = False
) -> tuple[list[Array], bool]:
    """What it leaves of two made-up requests, and whether it leaves that of texts of different lengths together. Blocks
    for some executions. Raises ExecutionError, also if requests of equal size aren't left what they are left alone."""
    encoder, close = Encoder(model, layout), (_ON_GPU if on_gpu else _CLOSE)[layout.executed.outputs[0].datatype]
    made_up = layout.made_up(vocabulary)
    alone = [encoder.execute([one])[0] for one in made_up]
    if layout.has_mask and _are_left(alone, encoder, made_up, close):
        return alone, True
    length = min(map(len, made_up))
    same = [one[:length] for one in made_up]
    if not _are_left([encoder.execute([one])[0] for one in same], encoder, same, close):
        raise ExecutionError("its encoder leaves something else of two requests together than of each alone")
    return alone, False


def _are_left(alone: Sequence[Array], encoder: Encoder, sources: Sequence[Array], close: float) -> bool:
    try:
        together = encoder.execute(sources)
    except ExecutionError:
        return False
    return all(_are_close(one, other, close) for one, other in zip(alone, together, strict=True))


def _gives(wanted: Array, block: Block, model: StepsModel, tokens: Array, layout: DecoderLayout, close: float) -> bool:
    """Whether stepping `block` gives logits close to `wanted`."""
    try:
        return _are_close(wanted, block.step(model, tokens, layout), close)
    except ExecutionError:
        return False


def _are_close(one: Array, other: Array, close: float) -> bool:
    if one.shape != other.shape or not np.isfinite(one).all():
        return False
    return bool(np.abs(one - other).max() <= close * max(1.0, float(np.abs(one).max())))
