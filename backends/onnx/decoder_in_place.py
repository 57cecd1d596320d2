"""The keys and values of rows that are stepped together, in buffers where they stay, for models whose attention adds to
them there.

Lives here: a block whose steps copy no past, nor do rows that enter or leave, but their own. Must not: which rows these
are, or what their tokens are chosen by. The rules: the first places of the buffers have the block's rows; a row's past
is at the left of its place, and what is behind that has no meaning, whatever it is; the last row moves to where one has
left.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Self

import numpy as np

from paceline.backends.errors import UnfitOutputs
from paceline.backends.onnx.decoder_block import NO_TOKEN, Block, Run, StepsModel
from paceline.backends.onnx.decoder_layout import DecoderLayout
from paceline.backends.spec import Array

_SPARE = 2
"""Buffers that are more than so many times as large as they need be are changed for smaller ones."""
_LEAST_TOKENS = 16
"""What a place grows by, at least."""


class InPlaceBlock(Block):
    """`pasts`: [places, heads, longest or more, size] each."""

    __slots__ = ("_least", "_run")
    pasts: Sequence[Array]

    def __init__(self, rows: tuple[int, ...], lengths: Array, pasts: Sequence[Array], least: int = 0) -> None:
        super().__init__(rows, lengths, pasts)
        self._least = least
        # For all rows in their places, until these or the buffers change.
        self._run: Run | None = None

    @classmethod
    def empty(cls, row: int, layout: DecoderLayout, source: Array | None = None) -> Self:
        block = super().empty(row, layout, source)
        block._least = layout.least_past
        return block

    @classmethod
    def of(cls, rows: Collection[int], blocks: Sequence[Self]) -> Self:
        """One of `blocks` that has no others, with the rest of `rows`; only if there is none, another."""
        mine = [block for block in blocks if {*block.rows} <= {*rows}]
        block = max(mine, key=lambda one: len(one.rows), default=None)
        if block is None:
            pasts = [one[:0, :, :0] for one in blocks[0].pasts]
            block = cls((), np.zeros(0, np.int64), pasts, blocks[0]._least)
        block._take({*rows} - {*block.rows}, blocks)
        return block

    @property
    def longest(self) -> int:
        return int(self.lengths.max(initial=0))

    def drop(self, row: int) -> None:
        if row not in self.rows:
            return
        place, (*others, last) = self.rows.index(row), self.rows
        if row != last:
            others[place] = last
            length = int(self.lengths[-1])
            for past in self.pasts:
                past[place, :, :length] = past[len(others), :, :length]
            self.lengths[place] = length
        self.rows, self.lengths, self._run = tuple(others), self.lengths[:-1], None

    def step(self, model: StepsModel, tokens: Array, layout: DecoderLayout) -> Array:
        more, count = tokens.shape[1], len(self.rows)
        after = self.lengths + (tokens != NO_TOKEN).sum(axis=1)
        self._fit(count, self.longest + more)
        if more > 1 and count > 1 and self.lengths.any():
            # GroupQueryAttention takes some tokens after a past, or some rows.
            each = [slice(place, place + 1) for place in range(count)]
            runs = [(model.keeping([past[at] for past in self.pasts]), at) for at in each]
        else:
            self._run = self._run or model.keeping([past[:count] for past in self.pasts])
            runs = [(self._run, slice(0, count))]
        last = [_last_logits(run, tokens[at], self.lengths[at], after[at], layout) for run, at in runs]
        self.lengths = after
        return np.concatenate(last) if len(last) > 1 else last[0]

    def _take(self, rows: set[int], blocks: Sequence[Self]) -> None:
        found = [(block, row) for block in blocks for row in block.rows if row in rows]
        lengths = [int(block.lengths[block.rows.index(row)]) for block, row in found]
        self._fit(len(self.rows) + len(found), max(self.longest, *lengths, 0))
        for (block, row), length in zip(found, lengths, strict=True):
            place = block.rows.index(row)
            for past, theirs in zip(self.pasts, block.pasts, strict=True):
                past[len(self.rows), :, :length] = theirs[place, :, :length]
            self.rows, self.lengths, self._run = (*self.rows, row), np.append(self.lengths, length), None
            block.drop(row)

    def _fit(self, rows: int, longest: int) -> None:
        """Change the buffers if they have too little room, or far too much. Places that aren't taken need no memory
        before they are; the rest of one may, so that grows by a quarter at most."""
        places, _, room, _ = self.pasts[0].shape
        grain = max(_LEAST_TOKENS, 1 << max(0, longest.bit_length() - 3))
        least_places, least_room = 1 << (rows - 1).bit_length(), max(self._least, -(-longest // grain) * grain)
        if places * room > _SPARE * least_places * least_room:
            places, room = least_places, least_room
        places, room = max(places, least_places), max(room, least_room)
        if (places, room) == self.pasts[0].shape[::2]:
            return
        pasts = list[Array]()
        for past in self.pasts:
            larger = np.empty((places, past.shape[1], room, past.shape[3]), past.dtype)
            for place, length in enumerate(self.lengths.tolist()):
                larger[place, :, :length] = past[place, :, :length]
            pasts.append(larger)
        self.pasts, self._run = pasts, None


def _last_logits(run: Run, tokens: Array, lengths: Array, after: Array, layout: DecoderLayout) -> Array:
    """Those of the last tokens of rows that have `lengths` before and `after`."""
    counts, more = after - lengths, tokens.shape[1]
    if is_filled := bool((counts < more).any()):
        # On the left; here rows begin there.
        tokens = np.array([np.roll(row, own) for row, own in zip(tokens, counts, strict=True)])
    inputs, longest = list[Array](), int(after.max())
    for one in layout.executed.inputs[: len(layout.leads)]:
        if one.name == "input_ids":
            inputs.append(np.maximum(tokens, 0))
        elif one.name == "attention_mask":
            inputs.append((np.arange(longest) < after[:, None]).astype(np.int64))
        elif one.name == "position_ids":
            inputs.append(lengths[:, None] + np.arange(more))
        else:
            told = after - 1 if one.name == "seqlens_k" else np.array(longest)
            inputs.append(told.astype(np.int32).reshape(one.dims))
    (logits,) = run(inputs)
    # Some exports leave out all but the last one's.
    wanted = [more] if is_filled else [more, 1]
    if logits.ndim != 3 or logits.shape[0] != len(tokens) or logits.shape[1] not in wanted:
        raise UnfitOutputs(f"expected logits of shape {[*tokens.shape, -1]}, got {list(logits.shape)}")
    last = logits[np.arange(len(tokens)), counts - 1] if is_filled else logits[:, -1]
    found: Array = last.astype(np.float32, copy=False)
    return found


def block_type(layout: DecoderLayout) -> type[Block]:
    return InPlaceBlock if layout.in_place else Block
