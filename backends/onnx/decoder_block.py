"""The keys and values of rows that are stepped together, and stepping them.

Lives here: one execution for all rows of a block; making a block of rows of others. Must not: which rows these are, or
what their tokens are chosen by. The rules: a row's past is at the right of its block's, masked on its left; what a step
leaves is the past of the next one, without a copy, as long as the rows stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, Self

import numpy as np

from paceline.backends.errors import UnfitOutputs
from paceline.backends.onnx.decoder_layout import DecoderLayout
from paceline.backends.spec import Array, Tensors

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
    """`rows`, whose pasts are of `lengths` tokens. `pasts`: [rows, heads, longest, size] each."""

    __slots__ = ("lengths", "pasts", "rows")

    def __init__(self, rows: tuple[int, ...], lengths: Array, pasts: Sequence[Array]) -> None:
        self.rows = rows
        self.lengths = lengths
        self.pasts = pasts

    @classmethod
    def empty(cls, row: int, layout: DecoderLayout) -> Self:
        """Of one row that has no past yet."""
        pasts = [
            np.zeros((1, one.dims[1], 0, one.dims[3]), np.float16 if one.datatype == "FP16" else np.float32)
            for one in layout.pasts
        ]
        return cls((row,), np.zeros(1, np.int64), pasts)

    @classmethod
    def of(cls, rows: tuple[int, ...], blocks: Sequence[Self]) -> Self:
        """One of `rows`, in any order, each of which is in one of `blocks`, from where it may be taken. Copies them,
        unless one of these has just those."""
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
        longest, pasts = int(lengths.max()), list[Array]()
        for number, like in enumerate(blocks[0].pasts):
            # What is masked must be finite all the same: it is multiplied by 0.
            joined, at = np.zeros((len(rows), like.shape[1], longest, like.shape[3]), like.dtype), 0
            for block, first, end in parts:
                width = min(longest, block.longest)
                own = block.pasts[number][first:end, :, block.longest - width :]
                joined[at : at + end - first, :, longest - width :] = own
                at += end - first
            pasts.append(joined)
        return cls(rows, lengths, pasts)

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
        inputs = list[Array]()
        for name in layout.leads:
            if name == "input_ids":
                inputs.append(np.maximum(tokens, 0))
            elif name == "attention_mask":
                begins = (longest + more - lengths)[:, None]
                inputs.append((np.arange(longest + more) >= begins).astype(np.int64))
            elif name == "position_ids":
                inputs.append(np.maximum((lengths - more)[:, None] + np.arange(more), 0))
            else:
                inputs.append(np.array([longest > 0]))
        logits, *presents = model.run([*inputs, *self.pasts])
        wanted = [(*past.shape[:2], longest + more, past.shape[3]) for past in self.pasts]
        if logits.ndim != 3 or logits.shape[:2] != tokens.shape or [one.shape for one in presents] != wanted:
            got = [list(one.shape) for one in (logits, *presents[:1])]
            raise UnfitOutputs(
                f"expected logits and present of shapes {[*tokens.shape, -1]} and {list(wanted[0])}, got {got}"
            )
        self.pasts, self.lengths = presents, lengths
        last: Array = logits[:, -1].astype(np.float32, copy=False)
        return last
