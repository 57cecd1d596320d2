"""Servers with two fronts, calls through each, and what of the memory between the processes is in use."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceStub
from paceline.server.config import Settings
from tests.fronts import channel_each
from tests.integration.serving import Served
from tests.polling import eventually_awaited

__all__ = ["BATCHED", "held_bytes", "nothing_held", "through_each", "two"]

BATCHED = "max_batch_size: 8 dynamic_batching { }"


def two(path: Path, memory_mb: int = 64, **more: Any) -> Settings:
    return Settings(paths=(path,), frontends=2, frontend_memory_mb=memory_mb, **more)


@asynccontextmanager
async def through_each(served: Served) -> AsyncIterator[tuple[Served, Served]]:
    """The server through its first front, and through its second."""
    async with channel_each(served.target, served.fronts) as channels:
        first, second = channels.values()
        yield tuple(  # type: ignore[misc]
            Served(served.server, channel, GRPCInferenceServiceStub(channel))  # type: ignore[no-untyped-call]
            for channel in (first, second)
        )


async def held_bytes(served: Served, direction: str) -> float:
    return await served.metric("paceline_frontend_memory_bytes", f'direction="{direction}"')


async def nothing_held(served: Served) -> None:
    async def is_so() -> bool:
        return not (await held_bytes(served, "in") or await held_bytes(served, "out"))

    await eventually_awaited(is_so, "no shared memory held")
