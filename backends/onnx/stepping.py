"""Executing rows of generations: which tokens of theirs go in, and where their keys and values are meanwhile.

Lives here: `Stepping`, from rows and numbers of tokens to logits, and whose fault it is if that fails. Must not: decide
who steps when (`scheduler.iterations`), choose tokens, know requests. For one thread, on which it executes; rows enter
on any.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from time import monotonic_ns
from typing import NamedTuple, cast

import numpy as np

from paceline.backends.errors import ExecutionError, InstanceError, OutOfMemory
from paceline.backends.onnx.decoder_block import GONE, NO_TOKEN, Block, StepsModel
from paceline.backends.onnx.decoder_in_place import block_type
from paceline.backends.onnx.decoder_layout import DecoderLayout
from paceline.backends.spec import Array
from paceline.scheduler.iterations import StepCosts


class Stepped(NamedTuple):
    """What an execution has come to. `more`: how many tokens it had of which rows. `rows`: these in their places, or
    GONE. `logits`: of each place's last token, FP32 [places, vocabulary]; or the rows' fault, and then nothing of them
    has changed."""

    more: Mapping[int, int]
    rows: Sequence[int]
    logits: Array | ExecutionError


class Stepping:
    """`costs` is told what executions take, by `now_ns`."""

    def __init__(
        self,
        model: StepsModel,
        layout: DecoderLayout,
        costs: StepCosts,
        now_ns: Callable[[], int] = monotonic_ns,
    ) -> None:
        self.began_ns = 0
        """When the present execution began; 0 between two."""
        self._model = model
        self._layout = layout
        self._kind = block_type(layout)
        self._costs = costs
        self._now_ns = now_ns
        # All tokens of each row; what its encoder has left; the block of one that has a past.
        self._tokens: dict[int, Sequence[int]] = {}
        self._sources: dict[int, Array] = {}
        self._blocks: dict[int, Block] = {}

    def enter(self, row: int, tokens: Sequence[int], source: Array | None = None) -> None:
        """A row without a past. `tokens` grows with it. `source`: what its encoder has left."""
        self._tokens[row] = tokens
        if source is not None:
            self._sources[row] = source

    def leave(self, row: int) -> None:
        self.forget(row)
        del self._tokens[row]
        self._sources.pop(row, None)

    def forget(self, row: int) -> None:
        """It has no past any more, and begins anew."""
        if (block := self._blocks.pop(row, None)) is not None:
            block.drop(row)

    # hot path: 25 to 33 us for each row of a step, with what follows from it (bench.generations_inside)
    def execute(self, more: Mapping[int, int]) -> list[Stepped]:
        """Compute so many more tokens of each of these rows: together, or if that fails, apart."""
        kept = [*map(self._blocks.get, more)]
        if None in kept:
            kept = [
                one or self._kind.empty(row, self._layout, self._sources.get(row))
                for row, one in zip(more, kept, strict=True)
            ]
        own = cast("list[Block]", [*dict.fromkeys(kept)])
        try:
            block = self._kind.of(more.keys(), own)
        except ExecutionError as error:  # a device's
            return [Stepped(more, [*more], error)]
        if len(own) > 1 or block is not own[0] or not block.longest:
            self._blocks.update(dict.fromkeys(more, block))
        longest, most = block.longest, max(more.values())
        began_ns = self._now_ns()
        done = self._step(block, more)
        # Of halves, it isn't known what they cost.
        if done[0].rows is block.rows and not isinstance(done[0].logits, ExecutionError):
            now_ns = self._now_ns()
            if not longest:
                self._costs.observe_begin(len(block.rows), most, now_ns - began_ns, now_ns)
            elif most == 1:
                self._costs.observe(len(block.rows), longest + 1, now_ns - began_ns)
        return done

    def _step(self, block: Block, more: Mapping[int, int]) -> list[Stepped]:
        """Step the rows of `block`, or if that fails, halves of it, until it is known whose fault that is."""
        most, lengths = max(more.values()), block.lengths.tolist()
        if most == 1:
            found = [
                0 if row == GONE else self._tokens[row][length] for row, length in zip(block.rows, lengths, strict=True)
            ]
            tokens = np.array(found)[:, None]
        else:
            tokens = np.full((len(block.rows), most), NO_TOKEN, np.int64)
            for own, row, length in zip(tokens, block.rows, lengths, strict=True):
                own[-more[row] :] = self._tokens[row][length : length + more[row]]
        self.began_ns = self._now_ns()
        try:
            return [Stepped(more, block.rows, block.step(self._model, tokens, self._layout))]
        except ExecutionError as error:
            is_one = len(block.rows) == 1
            if is_one or (isinstance(error, InstanceError) and not isinstance(error, OutOfMemory)):
                return [Stepped(more, block.rows, error)]
        finally:
            self.began_ns = 0
        rows = [row for row in block.rows if row != GONE]
        half, done = len(rows) // 2, list[Stepped]()
        halves = [{row: more[row] for row in some} for some in (rows[:half], rows[half:]) if some]
        try:
            blocks = [self._kind.of(one.keys(), (block,)) for one in halves]
        except ExecutionError as error:
            return [Stepped(more, rows, error)]
        for of, one in zip(blocks, halves, strict=True):
            self._blocks.update(dict.fromkeys(one, of))
            done += self._step(of, one)
        return done
