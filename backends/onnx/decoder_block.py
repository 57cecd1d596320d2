"""The keys and values of rows that are stepped together, and stepping them.

Lives here: one execution for all rows of a block; making a block of rows of others. Must not: which rows these are, or
what their tokens are chosen by. The rules: a row's past is at the right of its block's, masked on its left; what a step
leaves is the past of the next one, without a copy, as long as the rows stay the same. What a row has of an encoder is
at the left, masked on its right, and stays as the first step has left it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, Self

import numpy as np

from paceline.backends.errors import UnfitOutputs
from paceline.backends.onnx.decoder_layout import DecoderLayout
from paceline.backends.spec import Array, Tensors, TensorSpec

__all__ = ["NO_TOKEN", "Block", "Run", "StepsModel"]

NO_TOKEN = -1
"""In place of a token: the row has fewer than others."""

Run = Callable[[Sequence[Array]], Tensors]


class StepsModel(Protocol):
    """What executes the model itself, with tensors in the order of `DecoderLayout.executed`."""

    def run(self, inputs: Sequence[Array]) -> Tensors:
        """Its outputs. Blocks; raises ExecutionError."""

    def keeping(self, kept: Sequence[Array]) -> Run:
        """`run` with `kept` for the last inputs, where the last outputs are written: it takes and returns the
        others."""

    def abandon(self) -> None: ...

    def close(self) -> None: ...


class Block:
    """`rows`, whose pasts are of `lengths` tokens. `pasts`: [rows, heads, longest, size] each. `of_source`: as in
    `DecoderLayout`, of sources of `source_lengths`; the first [rows, longest source, size], others [rows, heads,
    longest source, size], or of length 0 before the first step."""

    __slots__ = ("lengths", "of_source", "pasts", "rows", "source_lengths")

    def __init__(self, rows: tuple[int, ...], lengths: Array, pasts: Sequence[Array]) -> None:
        self.rows = rows
        self.lengths = lengths
        self.pasts = pasts
        self.source_lengths = np.zeros(len(rows), np.int64)
        self.of_source: Sequence[Array] = ()

    @classmethod
    def empty(cls, row: int, layout: DecoderLayout, source: Array | None = None) -> Self:
        """Of one row that has no past yet. `source`: what its encoder has left, [1, length, size]."""
        block = cls((row,), np.zeros(1, np.int64), [_nothing(one) for one in layout.pasts])
        if source is not None:
            block.source_lengths[0] = source.shape[1]
            block.of_source = [source, *(_nothing(one) for one in layout.of_source[1:])]
        return block

    @classmethod
    def of(cls, rows: tuple[int, ...], blocks: Sequence[Self]) -> Self:
        """One of `rows`, in any order, each of which is in one of `blocks`, from where it may be taken: all of these
        have pasts, or none. Copies them, unless one of these has just those."""
        if len(blocks) == 1 and blocks[0].rows == rows:
            return blocks[0]
        where = {row: (block, place) for block in blocks for place, row in enumerate(block.rows)}
        # Rows that are beside each other in their block are copied at once.
        parts = list[tuple[Self, int, int]]()
        for block, place in map(where.__getitem__, rows):
            if parts and parts[-1][0] is block and parts[-1][2] == place:
                parts[-1] = (block, parts[-1][1], place + 1)
            else:
                parts.append((block, place, place + 1))
        lengths = np.concatenate([block.lengths[first:end] for block, first, end in parts])
        source_lengths = np.concatenate([block.source_lengths[first:end] for block, first, end in parts])
        longest, longest_source = int(lengths.max()), int(source_lengths.max())
        pasts = [
            _joined([block.pasts[number][first:end] for block, first, end in parts], longest, at_right=True)
            for number in range(len(blocks[0].pasts))
        ]
        block = cls(rows, lengths, pasts)
        block.source_lengths = source_lengths
        block.of_source = [
            _joined([block.of_source[number][first:end] for block, first, end in parts], longest_source, at_right=False)
            for number in range(len(blocks[0].of_source))
        ]
        return block

    @property
    def longest(self) -> int:
        return int(self.pasts[0].shape[2])

    def drop(self, row: int) -> None:
        """It has left, if it was here. Whoever steps the others makes a block of them."""

    def step(self, model: StepsModel, tokens: Array, layout: DecoderLayout) -> Array:
        """Add `tokens`, [rows, some], to the rows. If none has a past, rows may have fewer, after so many NO_TOKEN.
        Returns the last ones' logits as FP32, [rows, vocabulary]. If this raises, nothing has changed."""
        more, longest = tokens.shape[1], self.longest
        lengths = self.lengths + (tokens != NO_TOKEN).sum(axis=1)
        logits, *presents = model.run([*self._leads(tokens, lengths, layout), *self.pasts, *self.of_source[1:]])
        presents, crosses = presents[: len(self.pasts)], presents[len(self.pasts) :]
        if longest:
            crosses = [*self.of_source[1:]]  # in place of those there is nothing then
        wanted = [(*past.shape[:2], longest + more, past.shape[3]) for past in self.pasts]
        wanted += [(*one.shape[:2], self.of_source[0].shape[1], one.shape[3]) for one in self.of_source[1:]]
        got = [one.shape for one in (*presents, *crosses)]
        if logits.ndim != 3 or logits.shape[:2] != tokens.shape or got != wanted:
            differs = next((pair for pair in zip(wanted, got, strict=True) if pair[0] != pair[1]), (wanted[0], got[0]))
            raise UnfitOutputs(
                f"expected logits and present of shapes {[*tokens.shape, -1]} and {[*differs[0]]}, got "
                f"{[*logits.shape]} and {[*differs[1]]}"
            )
        self.pasts, self.lengths = presents, lengths
        self.of_source = [*self.of_source[:1], *crosses]
        last: Array = logits[:, -1].astype(np.float32, copy=False)
        return last

    def _leads(self, tokens: Array, lengths: Array, layout: DecoderLayout) -> list[Array]:
        """What is fed besides pasts; `lengths`: after this step."""
        more, longest = tokens.shape[1], self.longest
        inputs = list[Array]()
        for name in layout.leads:
            if name == "input_ids":
                inputs.append(np.maximum(tokens, 0))
            elif name == "attention_mask":
                begins = (longest + more - lengths)[:, None]
                inputs.append((np.arange(longest + more) >= begins).astype(np.int64))
            elif name == "position_ids":
                inputs.append(np.maximum((lengths - more)[:, None] + np.arange(more), 0))
            elif name == "use_cache_branch":
                inputs.append(np.array([longest > 0]))
            elif name == "encoder_attention_mask":
                ends = self.source_lengths[:, None]
                inputs.append((np.arange(self.of_source[0].shape[1]) < ends).astype(np.int64))
            else:
                inputs.append(self.of_source[0])
        return inputs


def _nothing(one: TensorSpec) -> Array:
    """Keys or values of a row that has none yet."""
    return np.zeros((1, one.dims[1], 0, one.dims[3]), np.float16 if one.datatype == "FP16" else np.float32)


def _joined(parts: Sequence[Array], longest: int, *, at_right: bool) -> Array:
    """The rows of `parts`, [rows, ..., as long as its block, size] each, in one array, for rows of up to `longest`.
    What a row has is at one side of its block, and will be there."""
    longest = min(longest, max(part.shape[-2] for part in parts))  # of what isn't made yet, there is none
    # What is masked must be finite all the same: it is multiplied by 0.
    joined = np.zeros((sum(map(len, parts)), *parts[0].shape[1:-2], longest, parts[0].shape[-1]), parts[0].dtype)
    at = 0
    for part in parts:
        own, width, end = joined[at : at + len(part)], min(longest, part.shape[-2]), part.shape[-2]
        if at_right:
            own[..., longest - width :, :] = part[..., end - width :, :]
        else:
            own[..., :width, :] = part[..., :width, :]
        at += len(part)
    return joined
