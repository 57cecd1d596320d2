"""The keys and values of rows that are stepped together, and stepping them.

Lives here: one execution for all rows of a block; making a block of rows of others. Must not: which rows these are, or
what their tokens are chosen by. The rules: a row's past is at the right of its block's, masked on its left; what a step
leaves is the past of the next one, without a copy, as long as no more rows come than have gone. What a row has of an
encoder is at the left, masked on its right, and stays as the first step has left it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from typing import Any, Protocol, Self, cast

import numpy as np

from paceline.backends.errors import OutOfMemory, UnfitOutputs
from paceline.backends.onnx.decoder_layout import DecoderLayout
from paceline.backends.onnx.device_steps import Kept
from paceline.backends.spec import Array, Tensors, TensorSpec

NO_TOKEN = -1
"""In place of a token: the row has fewer than others."""
GONE = -1
"""In place of a row: the one that was here has left, and what is computed here is nobody's."""
_MOST_WASTE = 4
"""One part of so many of a block may be left by rows that have gone."""
_MASKED_AHEAD = 64
"""For so many further tokens a mask is made at once."""

Run = Callable[[Sequence[Array]], Tensors]
Past = Array | Kept
"""Where the model that is stepped leaves it."""


class StepsModel(Protocol):
    """What executes the model itself, with tensors in the order of `DecoderLayout.executed`."""

    def run(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Its outputs: arrays, but what isn't the first may be `Kept`, for inputs to come. Blocks; raises
        ExecutionError."""

    def keeping(self, kept: Sequence[Array]) -> Run:
        """`run` with `kept` for the last inputs, where the last outputs are written: it takes and returns the
        others."""

    def abandon(self) -> None: ...

    def close(self) -> None: ...


class Block:
    """`rows` in their places, or GONE; `count` are there. Their pasts are of `lengths` tokens, of those gone of 0.
    `pasts`: [places, heads, longest, size] each. `of_source`: as in `DecoderLayout`, of sources of `source_lengths`;
    the first [places, longest source, size], others [places, heads, longest source, size], or of length 0 before the
    first step."""

    __slots__ = ("_heads", "_mask", "_most", "_wasted", "lengths", "of_source", "pasts", "rows", "source_lengths")

    def __init__(self, rows: tuple[int, ...], lengths: Array, pasts: Sequence[Past]) -> None:
        self.rows = rows
        self.lengths = lengths
        self.pasts = pasts
        self.source_lengths = np.zeros(len(rows), np.int64)
        self.of_source: Sequence[Past] = ()
        # The largest of `lengths`; what steps have computed for nobody since these rows have their memory; the mask of
        # this step and of some further ones, in which each row has one more.
        self._most = int(lengths.max(initial=0))
        self._wasted = 0
        self._mask: Array | None = None
        self._heads = [past.shape[1::2] for past in pasts]

    @classmethod
    def empty(cls, row: int, layout: DecoderLayout, source: Array | None = None) -> Self:
        """Of one row that has no past yet. `source`: what its encoder has left, [1, length, size]."""
        block = cls((row,), np.zeros(1, np.int64), [_nothing(one) for one in layout.pasts])
        if source is not None:
            block.source_lengths[0] = source.shape[1]
            block.of_source = [source, *(_nothing(one) for one in layout.of_source[1:])]
        return block

    @classmethod
    def of(cls, rows: Collection[int], blocks: Sequence[Self]) -> Self:
        """One of `rows`, in any order, each of which is in one of `blocks`, from where it is taken: all of these have
        pasts, or none. If it can be, the largest of these with the others in places of those that are gone; else all
        are copied."""
        block = max(blocks, key=lambda one: one.count) if len(blocks) > 1 else blocks[0]
        if block._takes(rows, blocks):
            return block
        where = {row: (one, place) for one in blocks for place, row in enumerate(one.rows)}
        # Rows that are beside each other in their block are copied at once.
        parts = list[tuple[Self, int, int]]()
        for one, place in map(where.__getitem__, rows):
            if parts and parts[-1][0] is one and parts[-1][2] == place:
                parts[-1] = (one, parts[-1][1], place + 1)
            else:
                parts.append((one, place, place + 1))
        lengths = np.concatenate([one.lengths[first:end] for one, first, end in parts])
        source_lengths = np.concatenate([one.source_lengths[first:end] for one, first, end in parts])
        longest, longest_source = int(lengths.max()), int(source_lengths.max())
        pasts = [
            _joined([(one.pasts[number], first, end) for one, first, end in parts], longest, at_right=True)
            for number in range(len(block.pasts))
        ]
        made = cls(tuple(rows), lengths, pasts)
        made.source_lengths = source_lengths
        made.of_source = [
            _joined([(one.of_source[number], first, end) for one, first, end in parts], longest_source, at_right=False)
            for number in range(len(block.of_source))
        ]
        for one in blocks:
            one._drop(rows)
        return made

    @property
    def count(self) -> int:
        return len(self.rows) - self.rows.count(GONE)

    @property
    def longest(self) -> int:
        return int(self.pasts[0].shape[2])

    def drop(self, row: int) -> None:
        """It has left, if it was here. Its place remains until another takes it, or it costs more than a copy."""
        self._drop((row,))

    def _drop(self, rows: Collection[int]) -> None:
        places = [place for place, row in enumerate(self.rows) if row in rows]
        if places:
            self.rows = tuple([GONE if row in rows else row for row in self.rows])
            # As if they had begun anew, so that no model finds too many tokens in them.
            self.lengths[places] = 0
            self._most = max(self.lengths.tolist())
            if self._mask is not None:
                self._mask[places, : self.longest] = 0
            if not self.count:
                self.pasts = self.of_source = ()  # somebody may still hold the block

    def step(self, model: StepsModel, tokens: Array, layout: DecoderLayout) -> Array:
        """Add `tokens`, [places, some], to the rows. If none has a past, rows may have fewer, after so many NO_TOKEN.
        Returns the last ones' logits as FP32, [places, vocabulary]. If this raises, nothing has changed."""
        more, longest = tokens.shape[1], self.longest
        # With one more each, few operations do: after the model has used the caches, even a small one takes 10 us.
        new = 1 if more == 1 else (tokens != NO_TOKEN).sum(axis=1)
        logits, *presents = model.run([*self._leads(tokens, new, layout), *self.pasts, *self.of_source[1:]])
        presents, crosses = presents[: len(self.pasts)], presents[len(self.pasts) :]
        if longest:
            crosses = [*self.of_source[1:]]  # in place of those there is nothing then
        places, width = len(self.rows), longest + more
        wanted = [(places, heads, width, size) for heads, size in self._heads]
        wanted += [(*one.shape[:2], self.of_source[0].shape[1], one.shape[3]) for one in self.of_source[1:]]
        got = [one.shape for one in (*presents, *crosses)]
        if logits.ndim != 3 or logits.shape[:2] != tokens.shape or got != wanted:
            differs = next((pair for pair in zip(wanted, got, strict=True) if pair[0] != pair[1]), (wanted[0], got[0]))
            raise UnfitOutputs(
                f"expected logits and present of shapes {[*tokens.shape, -1]} and {[*differs[0]]}, got "
                f"{[*logits.shape]} and {[*differs[1]]}"
            )
        self.pasts, self.of_source = presents, [*self.of_source[:1], *crosses]
        self.lengths = self.lengths + new
        self._most = self._most + 1 if more == 1 else int(self.lengths.max())
        count = self.count
        if count < places:
            self.lengths[[place for place, row in enumerate(self.rows) if row == GONE]] = 0
        waste = places * width - count * self._most
        self._wasted = self._wasted + waste if waste else 0
        last: Array = logits[:, -1]
        return last if last.dtype == np.float32 else last.astype(np.float32)

    def _takes(self, rows: Collection[int], blocks: Sequence[Self]) -> bool:
        """Whether it is a block of just these `rows` now, after it may have taken some from others. Not if what nobody
        needs of it has cost as much as a copy of the rest, or is too much to keep."""
        count, places, width = self.count, len(self.rows), self.longest
        if len(blocks) == 1 and count == len(rows) == places:
            return True
        new = list[tuple[Self, int]]()
        if len(blocks) > 1:
            new = [(one, at) for one in blocks if one is not self for at, row in enumerate(one.rows) if row in rows]
        if count + len(new) != len(rows) or len(rows) > places or not width:
            return False
        most = self._most
        for one, at in new:
            most = max(most, int(one.lengths[at]))
            # What is on the host, for lack of memory, stays there.
            are_apart = [*map(type, one.of_source)] != [*map(type, self.of_source)]
            if are_apart or one.source_lengths[at] > self._source_width:
                return False
        needed = len(rows) * most
        if most > width or _MOST_WASTE * (places * width - needed) > places * width or self._wasted > needed:
            return False
        gone = [place for place, row in enumerate(self.rows) if row == GONE]
        for (one, at), place in zip(new, gone, strict=False):
            self._put(place, one, at)
        return True

    @property
    def _source_width(self) -> int:
        return int(self.of_source[0].shape[1]) if self.of_source else 0

    def _put(self, place: int, other: Self, at: int) -> None:
        """Take the row that another block has at a place."""
        length, source_length = int(other.lengths[at]), int(other.source_lengths[at])
        for past, theirs in zip(self.pasts, other.pasts, strict=True):
            _put(past, place, theirs, at, length, at_right=True)
        for mine, theirs in zip(self.of_source, other.of_source, strict=True):
            _put(mine, place, theirs, at, source_length, at_right=False)
        row = other.rows[at]
        self.rows = (*self.rows[:place], row, *self.rows[place + 1 :])
        self.lengths[place], self.source_lengths[place] = length, source_length
        self._most = max(self._most, length)
        if self._mask is not None:
            self._mask[place, : self.longest - length] = 0
            self._mask[place, self.longest - length :] = 1
        other._drop((row,))

    def _leads(self, tokens: Array, new: Array | int, layout: DecoderLayout) -> list[Past]:
        """What is fed besides pasts; `new`: how many of `tokens` are some, of each row."""
        more, longest = tokens.shape[1], self.longest
        inputs = list[Past]()
        for name in layout.leads:
            if name == "input_ids":
                inputs.append(tokens if more == 1 else np.maximum(tokens, 0))
            elif name == "attention_mask":
                if self._mask is None or self._mask.shape[1] < longest + more:
                    begins = (longest + more - self.lengths - new)[:, None]
                    self._mask = (np.arange(longest + more + _MASKED_AHEAD) >= begins).astype(np.int64)
                inputs.append(self._mask[:, : longest + more])
            elif name == "position_ids" and more == 1:
                inputs.append(self.lengths[:, None])
            elif name == "position_ids":
                inputs.append(np.maximum((self.lengths + new - more)[:, None] + np.arange(more), 0))
            elif name == "use_cache_branch":
                inputs.append(np.array([longest > 0]))
            elif name == "encoder_attention_mask":
                ends = self.source_lengths[:, None]
                inputs.append((np.arange(self._source_width) < ends).astype(np.int64))
            else:
                inputs.append(self.of_source[0])
        return inputs


def _nothing(one: TensorSpec) -> Array:
    """Keys or values of a row that has none yet."""
    return np.zeros((1, one.dims[1], 0, one.dims[3]), np.float16 if one.datatype == "FP16" else np.float32)


def _joined(parts: Sequence[tuple[Past, int, int]], longest: int, *, at_right: bool) -> Past:
    """The rows of `parts`, from where and to where they are in which, [rows, ..., as long as its block, size] each, in
    one array, for rows of up to `longest`. What a row has is at one side of its block, and will be there."""
    longest = min(longest, max(one.shape[-2] for one, _, _ in parts))  # of what isn't made yet, there is none
    first, rows = parts[0][0], sum(end - begin for _, begin, end in parts)
    if all(isinstance(part, Kept) for part, _, _ in parts):
        # From the host, it comes into memory of the execution's own, when what it is copied of isn't held any more.
        with suppress(OutOfMemory):
            kept = cast("Sequence[tuple[Kept, int, int]]", parts)
            return kept[0][0].joined(kept, longest, at_right=at_right)
    arrays = dict[int, Array]()
    for one, _, _ in parts:
        if id(one) not in arrays:
            arrays[id(one)] = one.numpy() if isinstance(one, Kept) else one
    # What is masked must be finite all the same: it is multiplied by 0.
    joined, at = np.zeros((rows, *first.shape[1:-2], longest, first.shape[-1]), first.dtype), 0
    for one, begin, end in parts:
        part = arrays[id(one)]
        width = min(longest, part.shape[-2])
        mine, theirs = _filled(joined, width, at_right=at_right), _filled(part, width, at_right=at_right)
        mine[at : at + end - begin] = theirs[begin:end]
        at += end - begin
    return joined


def _put(mine: Past, place: int, theirs: Past, at: int, length: int, *, at_right: bool) -> None:
    """Replace a row by that of another, which has so much."""
    if isinstance(mine, Kept):
        mine.put(place, cast("Kept", theirs), at, length, at_right=at_right)
    else:
        mine[place] = 0
        _filled(mine, length, at_right=at_right)[place] = _filled(cast("Array", theirs), length, at_right=at_right)[at]


def _filled(array: Array, length: int, *, at_right: bool) -> Array:
    """The side of it that has so much."""
    return array[..., array.shape[-2] - length :, :] if at_right else array[..., :length, :]
