"""What a model sees of a step besides its inputs, controls and states, and what a step leaves behind.

Lives here: making a step's payload, and executing payloads on an instance's thread. Must not: decide which step goes
(`scheduler.sequences`), join or split arrays (`backends.batching`), or say where states are (`device_states`). The
rules: a state is a copy of one sequence's rows, so that none keeps a whole batch's memory; what a failed execution
leaves is nowhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from paceline.backends.base import DeviceTensor, Execution
from paceline.backends.batching import Share
from paceline.backends.errors import ExecutionError
from paceline.backends.lengths import Lengths
from paceline.backends.spec import Array, Control, ControlKind, ModelSpec, SequenceSpec, Tensors
from paceline.protos.datatypes import by_name
from paceline.scheduler.request import AnyRequest
from paceline.scheduler.sequence import AnySequence
from paceline.server.codec.codec import memory_bytes
from paceline.server.errors import GpuLost, InvalidRequest, StateTooLarge, as_value
from paceline.server.memory.reading import ExecuteInputs, read_now
from paceline.server.memory.region_tensors import Inputs, TargetedInputs

States = tuple[Array | DeviceTensor, ...]


class Step:
    """A step at the batcher: its `inputs`, as the model sees them, controls and states included. `row`: the row in its
    batch, -1 for any. `after`: the states that it left, if it has succeeded and isn't the last one; LOST if those that
    it needed are."""

    __slots__ = ("after", "inputs", "is_last", "row")

    def __init__(self, inputs: Inputs, row: int, is_last: bool = False) -> None:
        self.inputs = inputs
        self.row = row
        self.is_last = is_last
        self.after: States | object = None


class StepMaker:
    """Makes the steps of a model that serves `spec`."""

    def __init__(self, spec: ModelSpec) -> None:
        sequence = spec.sequence
        assert sequence is not None
        self._rows = sequence.rows
        kept = {state.output.name for state in sequence.states}
        self._kept = [index for index, tensor in enumerate(spec.outputs) if tensor.name in kept]
        self._initial = tuple(state.initial for state in sequence.states)
        # The lengths that states have, and in which axes of which state.
        first = len(spec.inputs) + len(sequence.controls)
        self._lengths = [
            (number, index - first, axis)
            for number, length in enumerate(spec.lengths)
            for index, axis in length.inputs
            if index >= first
        ]
        # Where steps differ in what they may share a batch with: the other free axes.
        self._free = [
            (place, frozenset([axis for _, at, axis in self._lengths if at == place]))
            for place, state in enumerate(sequence.states)
            if -1 in state.input.dims
        ]
        # What all steps have in common that are the first or the last of their sequence, or are not.
        self._controls = {
            (start, end): tuple(_control(control, spec, {ControlKind.START: start, ControlKind.END: end})
                                for control in sequence.controls)
            for start in (False, True)
            for end in (False, True)
        }  # fmt: skip
        self._ids = [place for place, control in enumerate(sequence.controls) if control.kind is ControlKind.CORRID]
        self._spec, self._sequence = spec, sequence

    # hot path: 2 us
    def __call__(self, request: AnyRequest, sequence: AnySequence) -> Step:
        inputs, step, place = request.payload, request.step, sequence.place
        assert step is not None
        assert place is not None
        if type(inputs) is Step:
            # It starts anew, and the instance that it was made for is lost: it goes to another one as it is.
            inputs.row = place.row if self._rows else -1
            return inputs
        states: States = self._initial if step.start or sequence.state is None else sequence.state  # type: ignore[assignment]
        controls: Sequence[Array] = self._controls[step.start, step.end]
        if self._ids:
            if sequence.note is None:
                sequence.note = [_id(self._sequence.controls[at], self._spec, step.id) for at in self._ids]
            controls = [*controls]
            for at, array in zip(self._ids, sequence.note, strict=True):  # type: ignore[call-overload]
                controls[at] = array
        if self._free:
            shapes = [_but_for(states[at].shape, axes) if axes else states[at].shape for at, axes in self._free]
            request.key = request.key, tuple(shapes)
        if self._lengths:
            sizes = [*request.sizes]
            for number, at, axis in self._lengths:
                sizes[number] = max(1, states[at].shape[axis])  # an empty state costs something, too
            request.sizes = tuple(sizes)
        whole: Inputs = (*inputs, *controls, *states)  # type: ignore[arg-type]
        if type(inputs) is TargetedInputs:
            # Not of states, or those would be in the client's memory: they are written there with the answer.
            targets = {index: span for index, span in inputs.targets.items() if index not in self._kept}
            whole = TargetedInputs.to(targets, whole) if targets else whole
        request.payload = made = Step(whole, place.row if self._rows else -1, step.end)
        return made


ExecuteSteps = Callable[[Sequence[Step], int], Execution]


def executing_steps(execute: ExecuteInputs, model: str, spec: ModelSpec, max_state_bytes: int = 0) -> ExecuteSteps:
    """`execute` for steps of `model`, which serves `spec`. A step that can't be read, or doesn't fit its state, gets an
    InvalidRequest or GpuLost in the place of its results; a StateTooLarge if it leaves states for another step that
    take more than `max_state_bytes`, unless 0."""
    sequence = spec.sequence
    assert sequence is not None
    outputs = {tensor.name: index for index, tensor in enumerate(spec.executed.outputs)}
    kept = [outputs[state.output.name] for state in sequence.states]
    # Others always take as much as the first ones, which fit.
    grow = any(-1 in one.output.dims or one.output.datatype == "BYTES" for one in sequence.states)

    def execute_steps(steps: Sequence[Step], padded_rows: int) -> Execution:
        done = execute([step.inputs for step in steps], padded_rows)
        too_large: dict[int, Exception] = {}
        for number, (step, result) in enumerate(zip(steps, done.results, strict=True)):
            if kept and not (step.is_last or isinstance(result, Exception)):
                states = _states_in(result, kept)
                if grow and max_state_bytes and (size := _bytes_of(states)) > max_state_bytes:
                    too_large[number] = StateTooLarge(model, max_state_bytes, size)
                else:
                    step.after = states
        if not too_large:
            return done
        return replace(done, results=[too_large.get(number, one) for number, one in enumerate(done.results)])

    run: ExecuteSteps = execute_steps
    if sequence.rows:
        run = _in_rows(run, nobody_of(spec, sequence))
    # Of a length that clients' inputs and states have, only now both are there.
    first = len(spec.inputs)
    mixed = any(len({index < first for index, _ in one.inputs}) > 1 for one in spec.lengths)
    return _of_fitting(run, model, sequence.rows, Lengths(spec.executed) if mixed else None)


def _in_rows(execute: ExecuteSteps, nobody: Callable[[Inputs], Inputs]) -> ExecuteSteps:
    """`execute` with each step in its own row."""

    def execute_rows(steps: Sequence[Step], padded_rows: int) -> Execution:
        # A row without a step gets what another one has; nobody will see what the model makes of that.
        by_row: list[Step] = [Step(nobody(steps[0].inputs), row) for row in range(1 + max(step.row for step in steps))]
        for step in steps:
            by_row[step.row] = step
        done = execute(by_row, padded_rows)
        return replace(done, results=[done.results[step.row] for step in steps])

    return execute_rows


def _of_fitting(execute: ExecuteSteps, model: str, reads: bool, lengths: Lengths | None) -> ExecuteSteps:
    """`execute` for those steps that can be read, if it `reads` them, and have one size in each of `lengths`."""
    if not reads and lengths is None:
        return execute

    def execute_fitting(steps: Sequence[Step], padded_rows: int) -> Execution:
        failures: dict[Step, Exception] = {}
        for step in steps:
            try:
                if reads:
                    # A step that can't be read leaves its row empty, or those behind it would move up.
                    step.inputs = read_now(step.inputs)
                if lengths is not None:
                    lengths.sizes_of(step.inputs)  # type: ignore[arg-type]  # what isn't read yet has a shape, too
            except (InvalidRequest, GpuLost) as error:
                failures[step] = as_value(error)
            except ExecutionError as error:
                failures[step] = InvalidRequest(f"model '{model}': {error}")
        there = [step for step in steps if step not in failures]
        done = execute(there, padded_rows) if there else Execution([], 0, 0, 0, ran=False)
        results = iter(done.results)
        return replace(done, results=[failures.get(step) or next(results) for step in steps])

    return execute_fitting


def _states_in(result: Tensors, kept: Sequence[int]) -> States:
    """The states in a step's result, copied unless they were left on a device."""
    if type(result) is Share:
        # Without arrays of all its other outputs.
        arrays, start, stop = result.outputs.arrays, result.start, result.stop
        return tuple([arrays[index][start:stop].copy() for index in kept])
    left: list[Array | DeviceTensor] = [result[index] for index in kept]
    return tuple([one if type(one) is DeviceTensor else np.array(one, order="C") for one in left])


def _bytes_of(states: States) -> int:
    # hot path
    sizes = [
        one.nbytes if isinstance(one, DeviceTensor) or not one.dtype.hasobject else memory_bytes(one) for one in states
    ]
    return sum(sizes)


def _but_for(shape: tuple[int, ...], axes: frozenset[int]) -> tuple[int, ...]:
    return tuple([-1 if axis in axes else size for axis, size in enumerate(shape)])


def _control(control: Control, spec: ModelSpec, holds: dict[ControlKind, bool]) -> Array:
    """The control's value for one row. READY holds unless told otherwise."""
    if control.kind is ControlKind.CORRID:
        return _id(control, spec, 0)
    return _one(control, spec, control.values[holds.get(control.kind, True)])


def shown_id(sequence: SequenceSpec, spec: ModelSpec, id_: int | str) -> int | str | bytes:
    """The id of a sequence as the model sees it in its control, if it has one."""
    for control in sequence.controls:
        if control.kind is ControlKind.CORRID:
            shown: int | bytes = _id(control, spec, id_).item()
            return shown
    return id_


def _id(control: Control, spec: ModelSpec, id_: int | str) -> Array:
    if control.tensor.datatype == "BYTES":
        return _one(control, spec, str(id_ or "").encode())
    bits = by_name(control.tensor.datatype).dtype.itemsize * 8
    # Types of 32 bits carry the low ones, as in Triton.
    assert isinstance(id_, int)
    unsigned = np.array(id_ & (1 << bits) - 1, f"u{bits // 8}")
    return _one(control, spec, unsigned.view(by_name(control.tensor.datatype).dtype))


def _one(control: Control, spec: ModelSpec, value: object) -> Array:
    shape = (*((1,) if spec.batched else ()), *control.tensor.model_dims)
    array = np.empty(shape, by_name(control.tensor.datatype).dtype)
    array[...] = value
    array.flags.writeable = False
    return array


def nobody_of(spec: ModelSpec, sequence: SequenceSpec) -> Callable[[Inputs], Inputs]:
    """What makes the inputs of a row without a step of those of a step."""
    none = dict.fromkeys(ControlKind, False)
    controls = [_control(control, spec, none) for control in sequence.controls]
    first = len(spec.inputs)

    def inputs_of(inputs: Inputs) -> Inputs:
        return (*inputs[:first], *controls, *inputs[first + len(controls) :])

    return inputs_of
