"""Servers of a model that is written for Triton's Python backend and runs what requests ask for.

Lives here: serving it, asking it, and reading what it answers. Must not: assertions about behaviour.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from paceline.protos import inference_pb2 as pb
from paceline.server.config import Settings
from tests import triton_puppet
from tests.integration.serving import Served, serving
from tests.triton_puppet import TENSORS
from tests.wire import infer

__all__ = ["BATCHED", "INTERNAL", "TOGETHER", "asking", "number", "served", "text"]

INTERNAL = grpc.StatusCode.INTERNAL
BATCHED = f"max_batch_size: 8 dynamic_batching {{ }} {TENSORS}"
TOGETHER = f"max_batch_size: 4 dynamic_batching {{ max_queue_delay_microseconds: 100000000 }} {TENSORS}"
"""Batches of four."""


@asynccontextmanager
async def served(
    root: Path, config: str = BATCHED, source: str = triton_puppet.SOURCE, **more: Any
) -> AsyncIterator[Served]:
    triton_puppet.write(root, config, source)
    async with serving(root, settings=Settings(paths=(root,), allow_python_models=True, **more)) as started:
        yield started


def asking(code: str = "", request_id: str = "", outputs: Sequence[str] = ("y",)) -> pb.ModelInferRequest:
    """A request by which the model runs `code`."""
    request = infer("m", {"x": np.array([[1]], np.int64)})
    request.id = request_id
    if code:
        request.parameters["run"].string_param = code
    for name in outputs:
        request.outputs.add(name=name)
    return request


def number(response: pb.ModelInferResponse) -> int:
    return int(np.frombuffer(response.raw_output_contents[0], np.int64)[0])


async def text(served: Served, request: pb.ModelInferRequest) -> Any:
    """What the model answers with as JSON in its output z."""
    del request.outputs[:]
    request.outputs.add(name="z")
    return json.loads((await served.infer(request)).raw_output_contents[0][4:])
