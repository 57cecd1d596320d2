"""What tensors and models are: names, types and shapes.

Lives here: the specs, in plain values. Must not: anything that executes. A *request* is a sequence of arrays, one per
input of the served spec, in its order and in the shapes that the model sees (`TensorSpec.model_dims`); a *result* is
the same for outputs. An optional tensor that is left out is `MISSING`, in all requests of a batch or in none. BYTES are
object arrays of `bytes`, BF16 `uint16` bit patterns.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Tensors = Sequence[Array]
Shape = tuple[int, ...]

MISSING: Final[Array] = np.empty(0, np.bool_)
"""Stands for an optional tensor that was left out. Compared by identity (`is`), never by content."""


def fits(shape: Sequence[int], dims: Sequence[int]) -> bool:
    """Whether `dims`, in which -1 stands for any size, allow `shape`."""
    return len(shape) == len(dims) and all(dim in (-1, size) for size, dim in zip(shape, dims, strict=True))


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One input or output.

    `datatype` is the v2 name (`FP32`, `BYTES`, …). `dims` are the sizes of the axes as clients see them, -1 for any
    size; the spec of a batched model leaves out the batch axis. `utf8`: BYTES elements must be valid UTF-8. `reshape`:
    the dims that the model sees instead, with the same number of elements.

    `optional`: requests (for an output: results) may leave it out. `ragged`: requests of different dims share a batch,
    and the model sees all their elements concatenated into one vector. `shape_tensor`: has no batch axis even if the
    model is batched; all requests of a batch have the same value, which the model sees once. `any_rank`: after the
    batch axis, if there is one, any number of axes of any size is allowed, and `dims` mean nothing. `assumed`: the
    `dims` of an output are only what the model says of itself, which may be wrong, so results may have others. `fill`:
    what an input is filled up with along its length axes; nothing is written into one of BYTES, whose elements are then
    empty. `axis_names`: the model's own names of its axes, batch axis included, "" for one without; empty if it has
    none. `batch_axis`: where the batch axis of a batched model's tensor is, which only a state may have elsewhere than
    in front.
    """

    name: str
    datatype: str
    dims: tuple[int, ...]
    utf8: bool = False
    reshape: tuple[int, ...] | None = None
    optional: bool = False
    ragged: bool = False
    shape_tensor: bool = False
    any_rank: bool = False
    assumed: bool = False
    fill: int | float = 0
    axis_names: tuple[str, ...] = field(default=(), compare=False)
    batch_axis: int = 0

    @property
    def model_dims(self) -> tuple[int, ...]:
        """`dims` as the model sees them."""
        return self.dims if self.reshape is None else self.reshape

    def dims_of(self, rank: int) -> tuple[int, ...]:
        """`dims`, or for a tensor that isn't bound to them those of any tensor of `rank` axes."""
        return (-1,) * rank if self.any_rank or self.assumed else self.dims


class BatchInputKind(Enum):
    """What an input made per batch says about an input of the requests (`BatchInput.Kind`)."""

    ELEMENT_COUNT = "BATCH_ELEMENT_COUNT"
    ACCUMULATED_ELEMENT_COUNT = "BATCH_ACCUMULATED_ELEMENT_COUNT"
    ACCUMULATED_ELEMENT_COUNT_WITH_ZERO = "BATCH_ACCUMULATED_ELEMENT_COUNT_WITH_ZERO"
    MAX_ELEMENT_COUNT_AS_SHAPE = "BATCH_MAX_ELEMENT_COUNT_AS_SHAPE"
    ITEM_SHAPE = "BATCH_ITEM_SHAPE"
    ITEM_SHAPE_FLATTEN = "BATCH_ITEM_SHAPE_FLATTEN"


@dataclass(frozen=True, slots=True)
class BatchInput:
    """Model inputs (`targets`) that no request brings: computed from the shapes of input `source` in a batch."""

    kind: BatchInputKind
    targets: tuple[str, ...]
    datatype: str
    source: str


@dataclass(frozen=True, slots=True)
class BatchOutput:
    """Outputs (`targets`) that are split by the shapes of input `source` instead of by rows. Each of their free dims,
    including the batch axis, has the size of the same axis of a request's `source`."""

    targets: tuple[str, ...]
    source: str


@dataclass(frozen=True, slots=True)
class Length:
    """Axes that have the same size in a request, which differs from request to request: the words of a text, the frames
    of a sound. Requests of different sizes share a batch: their inputs are filled up to a common size, and outputs are
    cut back to each request's own.

    `inputs` and `outputs` are pairs of a tensor's index among those of `ModelSpec.executed` and one of its axes, of
    which 0 is the batch's: of states, whose batch axis may be another, the axes are counted without it. The common size
    is one of `sizes`, in ascending order, or for a request beyond the largest its own. `in_steps`: without `sizes`, it
    is one of few, so that a device sees few shapes; otherwise it is the longest request's.
    """

    name: str
    inputs: tuple[tuple[int, int], ...]
    outputs: tuple[tuple[int, int], ...] = ()
    sizes: tuple[int, ...] = ()
    in_steps: bool = False

    def padded(self, longest: int) -> int:
        """The common size of a batch whose longest request has the size `longest`."""
        place = bisect_left(self.sizes, longest)
        if place < len(self.sizes):
            return self.sizes[place]
        return stepped(longest) if self.in_steps and not self.sizes else longest


@dataclass(frozen=True, slots=True)
class JoinedAxis:
    """An axis of output `output`, a state's, along which parts lie one after the other: what a step was given and what
    it adds. `parts` are the numbers of the lengths that they have, and None for what isn't filled up. To be cut back,
    each part is by itself."""

    output: int
    axis: int
    parts: tuple[int | None, ...]


def stepped(size: int) -> int:
    """`size`, rounded up to one of eight sizes between a power of two and the next."""
    step = 1 << max(0, (size - 1).bit_length() - 4)
    return -(-size // step) * step


class ControlKind(Enum):
    """What a control says of the step in its row (`ModelSequenceBatching.Control.Kind`): that it is its sequence's
    first, that there is one at all, that it is the last, and which sequence it is of."""

    START = "CONTROL_SEQUENCE_START"
    READY = "CONTROL_SEQUENCE_READY"
    END = "CONTROL_SEQUENCE_END"
    CORRID = "CONTROL_SEQUENCE_CORRID"


@dataclass(frozen=True, slots=True)
class Control:
    """An input that tells the model about the step in each row; clients neither see nor send it. `values` are those for
    false and true; empty for CORRID, whose value is the sequence's id."""

    kind: ControlKind
    tensor: TensorSpec
    values: tuple[int | float | bool, ...] = ()


@dataclass(frozen=True, slots=True)
class State:
    """What a sequence keeps from step to step: the output `output` of a step is the input `input` of the next one.
    `initial` is the first step's, of one row; as all arrays of requests and results, with the batch axis in front. The
    two tensors have the same datatype and batch axis; their free dims may change from step to step."""

    input: TensorSpec
    output: TensorSpec
    initial: Array = field(compare=False)


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """How steps of sequences are executed. `places`: how many sequences an instance holds at a time; each of its
    sequences stays on it from start to end, as the model may keep something of it. 0: the model can't tell, so any
    instance may execute any step. `rows`: a sequence's row in a batch is always that of its place, and rows without a
    step are executed too, with READY false. `iterative`: each request is a sequence of its own, of as many steps as the
    model likes."""

    controls: tuple[Control, ...] = ()
    states: tuple[State, ...] = ()
    places: int = 0
    rows: bool = False
    iterative: bool = False


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Inputs and outputs, in the model's own order. `batched`: every tensor except shape tensors has a batch axis in
    front of its `dims`. `batch_inputs` are not among `inputs`: clients neither see nor send them. `lengths`: the axes
    along which requests of different sizes are filled up and cut back, `joined` those that are joined of several.
    `fixed_rows`: the only number of rows that the model takes, to which each batch is padded; 0: any number.
    `sequence`: its requests are steps of sequences."""

    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    batched: bool = False
    batch_inputs: tuple[BatchInput, ...] = ()
    batch_outputs: tuple[BatchOutput, ...] = ()
    lengths: tuple[Length, ...] = ()
    joined: tuple[JoinedAxis, ...] = ()
    fixed_rows: int = 0
    sequence: SequenceSpec | None = None

    @property
    def executed(self) -> ModelSpec:
        """What instances serve: this spec with controls and states, which clients don't see, after its own tensors."""
        if self.sequence is None:
            return self
        controls = tuple(control.tensor for control in self.sequence.controls)
        kept = {state.output.name: state.output for state in self.sequence.states}
        # A state that clients also get has to fit as the next step's input, whatever they are told of its dims.
        seen = tuple(kept.pop(tensor.name, tensor) for tensor in self.outputs)
        return replace(
            self,
            inputs=(*self.inputs, *controls, *(state.input for state in self.sequence.states)),
            outputs=(*seen, *kept.values()),
            sequence=None,
        )

    @property
    def rows_in_front(self) -> ModelSpec:
        """This spec as if all its tensors had the batch axis in front, as they are joined and split."""
        inputs, outputs = (tuple(map(_rows_in_front, side)) for side in (self.inputs, self.outputs))
        return replace(self, inputs=inputs, outputs=outputs)

    def with_fills(self, executed: Sequence[TensorSpec]) -> ModelSpec:
        """This spec with the fills of these inputs of its `executed`."""
        fills = {one.name: one.fill for one in executed}
        inputs = tuple(replace(one, fill=fills[one.name]) for one in self.inputs)
        sequence = self.sequence
        if sequence is not None:
            states = (replace(one, input=replace(one.input, fill=fills[one.input.name])) for one in sequence.states)
            sequence = replace(sequence, states=tuple(states))
        return replace(self, inputs=inputs, sequence=sequence)

    @property
    def by_rows(self) -> bool:
        """Whether every tensor of a batch is simply stacked and split along its first axis."""
        special = (
            tensor.optional or tensor.shape_tensor or tensor.batch_axis for tensor in (*self.inputs, *self.outputs)
        )
        return self.paddable and not any(special)

    @property
    def paddable(self) -> bool:
        """Whether a batch may be padded with rows: not if tensors are joined or split other than by rows."""
        return not (self.batch_inputs or self.batch_outputs or any(tensor.ragged for tensor in self.inputs))


def _rows_in_front(tensor: TensorSpec) -> TensorSpec:
    at, names = tensor.batch_axis, tensor.axis_names
    return replace(tensor, batch_axis=0, axis_names=(*names[at : at + 1], *names[:at], *names[at + 1 :]))
