"""States of sequences that stay in a GPU's memory from step to step.

Lives here: which states do, where a step leaves them, and what becomes of those that aren't where a step executes. Must
not: memory and copies (`backends.device_blocks`, `backends.staging`). The rules: a step reads one block and writes
another one, so that its state is as before until it has succeeded; a state on another GPU comes through the host, as
any instance may execute any step; what was on a lost GPU isn't read, and its sequence ends.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from paceline.backends.base import DeviceBlock, DeviceTensor, Execution, ModelInstance, Slot, Slotted, Targets
from paceline.backends.errors import InstanceError
from paceline.backends.spec import ModelSpec, Tensors
from paceline.scheduler.sequence import LOST
from paceline.server.errors import as_value
from paceline.server.memory.reading import Room
from paceline.server.memory.region_tensors import Inputs, TargetedInputs
from paceline.server.models.steps import ExecuteSteps, States, Step

_UINT8 = np.dtype(np.uint8)


def gpu_of(instance: object) -> int | None:
    """The GPU in whose memory a slot can leave states."""
    return instance.gpu if isinstance(instance, Slot) else None


def may_leave_states(instances: Iterable[object]) -> bool:
    """Whether any of them leaves states on a GPU."""
    slots = [slot for one in instances if isinstance(one, Slotted) for slot in one.slots]
    return any(gpu_of(slot) is not None for slot in slots)


def room_on(instance: ModelInstance, spec: ModelSpec) -> Room | None:
    """Where steps of a model that serves `spec` leave their states; None if they do in the host's memory.

    That is so unless batches are staged, for which all tensors have to have the batch axis in front, and none may be
    text; and of a state that clients see, since its bytes have to come to the host anyhow, or that is put together of
    parts, as it is there.
    """
    if not isinstance(instance, Slot) or instance.gpu is None or spec.sequence is None:
        return None
    slot, executed, seen = instance, spec.executed, {tensor.name for tensor in spec.outputs}
    seen |= {executed.outputs[one.output].name for one in spec.joined}
    first = len(executed.inputs) - len(spec.sequence.states)
    outputs = {tensor.name: index for index, tensor in enumerate(executed.outputs)}
    kept = [
        (first + place, outputs[state.output.name], -1 in state.input.dims)
        for place, state in enumerate(spec.sequence.states)
        if state.output.name not in seen
    ]

    def room(inputs: Inputs) -> Targets:
        # hot path: 2 us a state
        targets = {}
        for index, output, varies in kept:
            size_bytes = inputs[index].nbytes
            if varies:
                # Room to grow: once it is used up, a step's states come to the host, from where the next step knows.
                size_bytes = 1 << size_bytes.bit_length()
            block = slot.lease(size_bytes)
            targets[output] = DeviceTensor(block, block.address, _UINT8, (block.size_bytes,))
        return targets

    return room if kept else None


def are_lost(states: object) -> bool:
    """Whether any of a sequence's `states` was on a GPU that is lost."""
    return any(_block(one).is_lost for one in cast("States", states) if type(one) is DeviceTensor)


def with_states_at_hand(execute: ExecuteSteps, spec: ModelSpec, gpu: int | None) -> ExecuteSteps:
    """`execute` on `gpu`, None for the host, for steps whose states may be anywhere. A step whose states can't be had
    gets an InstanceError in the place of its results."""
    assert spec.sequence is not None
    first, outputs = len(spec.executed.inputs) - len(spec.sequence.states), len(spec.outputs)

    def execute_steps(steps: Sequence[Step], padded_rows: int) -> Execution:
        failures: dict[int, Exception] = {}
        for number, step in enumerate(steps):
            try:
                step.inputs = _at_hand(step.inputs, first, gpu)
            except InstanceError as error:
                failures[number] = as_value(error)
                if are_lost(step.inputs[first:]):
                    step.after = LOST
        ready = [step for number, step in enumerate(steps) if number not in failures]
        done = execute(ready, padded_rows) if ready else Execution([], 0, 0, 0, ran=False)
        # Without the states, or an answer that leaves slowly would keep their memory.
        results = iter([one if isinstance(one, Exception) else _first(one, outputs) for one in done.results])
        placed = [failures.get(number) or next(results) for number in range(len(steps))]
        return replace(done, results=placed)

    return execute_steps


def _at_hand(inputs: Inputs, first: int, gpu: int | None) -> Inputs:
    """`inputs`, with states that aren't in the memory of `gpu` in the host's. Blocks if there are any. Raises
    DeviceLost or another InstanceError."""
    states = cast("States", inputs[first:])
    away = [one for one in states if type(one) is DeviceTensor and (_block(one).gpu != gpu or _block(one).is_lost)]
    if not away:
        return inputs
    there = [_block(one).read(one) if type(one) is DeviceTensor and one in away else one for one in states]
    whole = cast("Inputs", (*inputs[:first], *there))
    return TargetedInputs.to(inputs.targets, whole) if isinstance(inputs, TargetedInputs) else whole


def _block(state: DeviceTensor) -> DeviceBlock:
    return cast("DeviceBlock", state.owner)


def _first(result: Tensors, outputs: int) -> Tensors:
    return result[:outputs] if isinstance(result, list) else result
