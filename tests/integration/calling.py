"""Servers with a Python model that calls others.

Lives here: serving them, and requests by which the model runs code. Must not: assertions about behaviour.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from paceline.protos import inference_pb2 as pb
from paceline.server.config import Settings
from tests import models
from tests.calling_puppet import write_caller
from tests.integration.serving import Served, serving
from tests.memory_models import MemoryModel
from tests.wire import infer

__all__ = ["ALONE", "BATCHED", "ECHO", "ENCODE", "TELL", "asking", "echoing", "numbers", "served", "statistics"]

ENCODE = "y = models['encoder'].infer({'INPUT0': x})['OUTPUT0']"
ECHO = "y = models['echo'].infer({'a': x})['x'][:, :4]"
TELL = """
try:
    %s
except models.CallFailed as error:
    raise ValueError(f'{error.status}: {error}')
"""
BATCHED = "max_batch_size: 8 dynamic_batching { }"
ALONE = "max_batch_size: 1"


@asynccontextmanager
async def served(
    root: Path, config: str = BATCHED, *, calls: str = "encoder", settings: Settings | None = None
) -> AsyncIterator[Served]:
    """Model `m`, which calls `encoder`."""
    models.write(models.mlp(), root / "encoder" / "1" / "model.onnx")
    write_caller(root, config, calls=calls)
    async with serving(root, settings=settings or Settings(paths=(root,), allow_python_models=True)) as started:
        yield started


@asynccontextmanager
async def echoing(root: Path, echo: MemoryModel, config: str = BATCHED, calls: str = "echo") -> AsyncIterator[Served]:
    """Model `m`, which calls `echo`, a model of the test's."""
    write_caller(root, config, calls=calls)
    settings = Settings(paths=(root,), allow_python_models=True)
    async with serving(root, {"echo": echo}, config=BATCHED, settings=settings) as started:
        yield started


def asking(code: str, first: float = 0, rows: int = 1, model: str = "m") -> pb.ModelInferRequest:
    """A request by which the model runs `code`."""
    x = np.full((rows, 16), first, np.float32)
    return infer(model, {"run": np.full((rows, 1), code.encode(), object), "x": x})


def numbers(response: pb.ModelInferResponse) -> list[float]:
    listed: list[float] = np.frombuffer(response.raw_output_contents[0], np.float32).tolist()
    return listed


async def statistics(started: Served, name: str) -> pb.ModelStatistics:
    reply = await started.stub.ModelStatistics(pb.ModelStatisticsRequest(name=name), timeout=20)
    return reply.model_stats[0]
