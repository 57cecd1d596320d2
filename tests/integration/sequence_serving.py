"""Servers of a model with memory, sequences for it, and what its answers should be.

Lives here: serving it, its steps, sent in one way or another, and the sums that it answers with. Must not: assertions.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import onnx

from paceline.protos import inference_pb2 as pb
from paceline.server.config import Settings
from tests import models
from tests.integration.serving import Served, serving
from tests.integration.streams import Stream
from tests.wire import Array, infer

__all__ = [
    "KEEPS",
    "PATIENT",
    "STATE",
    "TOLD",
    "Inputs",
    "numbers",
    "over_a_stream",
    "over_calls",
    "result",
    "served_with",
    "step",
    "steps",
    "sums",
]


PATIENT = "max_sequence_idle_microseconds: 60000000"
"""Sequences outlast a machine that stands still for longer than the default, a second."""


STATE = f'{PATIENT} state {{ input_name: "STATE" output_name: "STATE_OUT" }}'


KEEPS = f"max_batch_size: 8 sequence_batching {{ oldest {{ }} {STATE} }}"


TOLD = f"""
    max_batch_size: 4
    sequence_batching {{
      {PATIENT} %s
      control_input {{ name: "START" control {{ kind: CONTROL_SEQUENCE_START int32_false_true: [0, 1] }} }}
      control_input {{ name: "READY" control {{ kind: CONTROL_SEQUENCE_READY int32_false_true: [0, 1] }} }}
      control_input {{ name: "CORRID" control {{ kind: CONTROL_SEQUENCE_CORRID data_type: TYPE_UINT64 }} }}
    }}
"""


Inputs = dict[str, Array]


@asynccontextmanager
async def served_with(
    root: Path, model: onnx.ModelProto, config: str, settings: Settings | None = None
) -> AsyncIterator[Served]:
    path = models.write(model, root / "m" / "1" / "model.onnx")
    (path.parents[1] / "config.pbtxt").write_text(config)
    async with serving(root, settings=settings) as served:
        yield served


def step(id_: int | str, inputs: Inputs, *, start: bool = False, end: bool = False) -> pb.ModelInferRequest:
    return infer("m", inputs, parameters={"sequence_id": id_, "sequence_start": start, "sequence_end": end})


def steps(id_: int | str, inputs: Sequence[Inputs]) -> list[pb.ModelInferRequest]:
    """A whole sequence."""
    last = len(inputs) - 1
    return [step(id_, one, start=not number, end=number == last) for number, one in enumerate(inputs)]


def result(answer: pb.ModelInferResponse, output: int = 0) -> Array:
    dtype = {"FP32": np.float32, "INT32": np.int32, "UINT64": np.uint64}[answer.outputs[output].datatype]
    return np.frombuffer(answer.raw_output_contents[output], dtype).reshape(answer.outputs[output].shape)


def numbers(sequence: int, length: int, size: int = 2) -> list[Inputs]:
    """Whole numbers, so that sums are exact."""
    random = np.random.default_rng(sequence)
    return [{"INPUT0": random.integers(-9, 9, (1, size)).astype(np.float32)} for _ in range(length)]


def sums(inputs: Sequence[Inputs]) -> Array:
    return np.cumsum([one["INPUT0"] for one in inputs], axis=0)


async def over_calls(served: Served, requests: Sequence[pb.ModelInferRequest]) -> list[Array]:
    return [result(await served.infer(one)) for one in requests]


async def over_a_stream(served: Served, requests: Sequence[pb.ModelInferRequest]) -> list[Array]:
    """All steps are sent at once."""
    stream = Stream(served)
    await stream.send(*requests)
    await stream.end()
    return [result((await stream.message()).infer_response) for _ in requests]
