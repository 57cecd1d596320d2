"""Engines over models in memory, whose gates are open at the end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import paceline
from paceline import BlockingEngine, Engine
from paceline.backends.base import Backend
from tests.integration.serving import write_model
from tests.memory_models import MemoryBackend, MemoryModel

BATCHED = "max_batch_size: 8 dynamic_batching { }"
PROMPT = [5, 6, 7]
BROKEN = "x\ud800"


def backend_of(**models: MemoryModel) -> Callable[[str], Backend]:
    return lambda _: MemoryBackend(models)


@asynccontextmanager
async def engine_of(root: Path, config: str = BATCHED, **models: MemoryModel) -> AsyncIterator[Engine]:
    for name in models:
        write_model(root, name, config)
    async with Engine(root, backend_of=backend_of(**models)) as engine:
        try:
            yield engine
        finally:
            for model in models.values():
                model.gate.open()


@contextmanager
def blocking_engine(root: Path, model: MemoryModel) -> Iterator[BlockingEngine]:
    write_model(root, "m", BATCHED)
    with BlockingEngine(root, backend_of=backend_of(m=model)) as engine:
        try:
            yield engine
        finally:
            model.gate.open()


def row(value: float, width: int = 2) -> dict[str, Any]:
    return {"a": np.full((1, width), value, np.float32)}


async def failure(what: Coroutine[Any, Any, object]) -> paceline.InferenceError:
    with pytest.raises(paceline.InferenceError) as raised:
        await what
    return raised.value
