"""What of the memory between a server and its fronts is in use."""

from __future__ import annotations

from tests.integration.serving import Served
from tests.polling import eventually_awaited

__all__ = ["held_bytes", "nothing_held"]


async def held_bytes(served: Served, direction: str) -> float:
    return await served.metric("paceline_frontend_memory_bytes", f'direction="{direction}"')


async def nothing_held(served: Served) -> None:
    async def is_so() -> bool:
        return not (await held_bytes(served, "in") or await held_bytes(served, "out"))

    await eventually_awaited(is_so, "no shared memory held")
