"""What becomes of a step on its way to its model: by what it shares batches, and in which row it is executed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.backends.base import Device
from paceline.backends.spec import Array, Control, ControlKind, Length, ModelSpec, SequenceSpec, State, TensorSpec
from paceline.scheduler.request import Request, SequenceStep
from paceline.scheduler.sequence import ANYWHERE, Place
from paceline.scheduler.sequence import Sequence as Steps
from paceline.server.errors import InvalidRequest
from paceline.server.memory.reading import reading
from paceline.server.memory.region_tensors import Inputs, RegionTensor
from paceline.server.memory.system_region import open_system_region
from paceline.server.models.steps import Step, StepMaker, executing_steps
from tests.memory_models import MemoryModel
from tests.shared_objects import shared_object

READY = Control(ControlKind.READY, TensorSpec("READY", "INT32", (1,)), (0, 1))
SPEC = ModelSpec(
    (TensorSpec("a", "FP32", (2,)),),
    (TensorSpec("x", "FP32", (2,)), TensorSpec("ready", "INT32", (1,))),
    batched=True,
    sequence=SequenceSpec((READY,), places=4, rows=True),
)


def test_step_that_cannot_be_read_leaves_its_row_empty() -> None:
    seen: list[Sequence[Array]] = []

    def compute(inputs: Sequence[Array]) -> Sequence[Array]:
        seen.append(list(inputs))
        return inputs

    instance = MemoryModel(SPEC.executed, compute).instance(SPEC.executed, Device())
    execute = executing_steps(reading(instance.execute, SPEC.executed), "m", SPEC)
    ready = np.ones((1, 1), np.int32)
    with shared_object(16) as memory:
        region = open_system_region("r", memory.key, 0, 16)
        gone = RegionTensor("a", region, 8, np.dtype(np.float32), (1, 2))
        memory.resize(4)
        inputs: list[Inputs] = [
            (np.full((1, 2), 5, np.float32), ready),
            (gone, ready),
            (np.full((1, 2), 7, np.float32), ready),
        ]
        results = execute([Step(one, row) for row, one in zip((0, 1, 3), inputs, strict=True)], 0).results
    assert isinstance(results[1], InvalidRequest)
    ((given, told),) = seen
    assert told.ravel().tolist() == [1, 0, 0, 1]
    assert (given[0, 0], given[3, 0]) == (5, 7)
    assert not isinstance(results[2], Exception)
    assert results[2][0].tolist() == [[7, 7]]


def test_steps_differ_in_sizes_of_states_that_are_lengths() -> None:
    tensor = TensorSpec("past", "FP32", (-1, -1))
    spec = ModelSpec(
        (TensorSpec("now", "FP32", (-1,)),),
        (TensorSpec("x", "FP32", ()),),
        batched=True,
        lengths=(Length("new", ((0, 1),)), Length("past", ((1, 2),))),
        sequence=SequenceSpec(states=(State(tensor, tensor, np.zeros((1, 3, 0), np.float32)),)),
    )
    make = StepMaker(spec)
    made = []
    for state in (None, np.zeros((1, 3, 7), np.float32), np.zeros((1, 4, 7), np.float32)):
        request: Request[object, object] = Request([np.zeros((1, 5), np.float32)], 1, "key", sizes=(5, 1))
        request.step = SequenceStep(1)
        sequence: Steps[Request[object, object]] = Steps(1)
        sequence.place, sequence.state = ANYWHERE, state if state is None else (state,)
        make(request, sequence)
        made.append(request)
    assert [one.sizes for one in made] == [(5, 1), (5, 7), (5, 7)]
    assert made[0].key == made[1].key != made[2].key


def test_step_that_goes_to_another_instance_gets_its_row_there() -> None:
    spec = ModelSpec((), (), batched=True, sequence=SequenceSpec(places=2, rows=True))
    request: Request[object, object] = Request([], 1, "key")
    request.step = SequenceStep(1, start=True)
    sequence: Steps[Request[object, object]] = Steps(1)
    for row in (1, 0):
        sequence.place = Place(row, row)
        made = StepMaker(spec)(request, sequence)
        assert (made.row, made.inputs, request.payload) == (row, (), made)
