"""Rows of sequences' places: each step is executed in its own, whatever becomes of the others."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.backends.base import Device
from paceline.backends.spec import Array, Control, ControlKind, ModelSpec, SequenceSpec, TensorSpec
from paceline.server.errors import InvalidRequest
from paceline.server.memory.reading import reading
from paceline.server.memory.region_tensors import Inputs, RegionTensor
from paceline.server.memory.system_region import open_system_region
from paceline.server.models.steps import Step, executing_steps
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
    execute = executing_steps(reading(instance.execute, SPEC.executed), SPEC)
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
