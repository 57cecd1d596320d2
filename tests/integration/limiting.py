"""Servers with limits, and what they tell of them.

Lives here: settings, counters, and a request that occupies a model. Must not: assertions about behaviour.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from paceline.protos import inference_pb2 as pb
from paceline.server.config import Settings
from paceline.server.limits import Limits
from tests.integration.serving import Served
from tests.memory_models import MemoryModel
from tests.polling import eventually_awaited
from tests.wire import infer, rows_of_floats

__all__ = ["executing", "limited", "one", "refused", "used", "wait_for_value"]


def limited(folder: Path, **limits: int) -> Settings:
    return Settings(paths=(folder,), limits=Limits(**limits))


async def used(served: Served, limit: str) -> float:
    return await served.metric("paceline_limit_used", f'limit="{limit}"')


async def refused(served: Served, reason: str) -> float:
    return await served.metric("paceline_refused_rpcs", f'reason="{reason}"')


async def wait_for_value(served: Served, ask: Any, what: str, value: float) -> None:
    """Wait until `ask` returns `value` for `what`: frontends report their numbers only now and then."""

    async def is_so() -> bool:
        return bool(await ask(served, what) == value)

    await eventually_awaited(is_so, f"{value} of {what}")


def one(model: str = "m", columns: int = 1) -> pb.ModelInferRequest:
    return infer(model, {"a": rows_of_floats(1, columns)})


async def executing(served: Served, model: MemoryModel, name: str = "m") -> asyncio.Task[Any]:
    """A request that occupies the model until its gate opens."""
    model.gate.close()
    blocker = asyncio.create_task(served.infer(one(name)))
    await asyncio.to_thread(model.gate.wait_entered, 1)
    return blocker
