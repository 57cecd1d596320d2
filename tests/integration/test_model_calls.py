"""Python models that call other models: what calls are to the models that they reach, and what becomes of them."""

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
from tests.wire import infer

CALL = "y = models['encoder'].infer({'INPUT0': x})['OUTPUT0']"
BATCHED = "max_batch_size: 8 dynamic_batching { }"


def allowing(root: Path) -> Settings:
    return Settings(paths=(root,), allow_python_models=True)


@asynccontextmanager
async def served(root: Path, config: str = BATCHED, *, calls: str = "encoder") -> AsyncIterator[Served]:
    """Model `m`, which calls `encoder`."""
    models.write(models.mlp(), root / "encoder" / "1" / "model.onnx")
    write_caller(root, config, calls=calls)
    async with serving(root, settings=allowing(root)) as started:
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


async def test_call_gives_what_a_client_gets(tmp_path: Path) -> None:
    async with served(tmp_path) as started:
        expected = numbers(await started.infer(infer("encoder", {"INPUT0": np.ones((1, 16), np.float32)})))
        assert numbers(await started.infer(asking(CALL, 1))) == expected
        counted = await statistics(started, "encoder")
        assert (counted.inference_count, counted.inference_stats.success.count) == (2, 2)
