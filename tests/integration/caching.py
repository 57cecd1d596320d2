"""Servers with a response cache, for its tests.

Lives here: their settings, requests that wait for others' executions, and what was counted. Must not: assertions about
behaviour.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from paceline.protos import inference_pb2 as pb
from paceline.server.config import Settings
from tests.integration.scripted import Call, Script, request, send, totals
from tests.integration.serving import Served
from tests.memory_models import Gate
from tests.polling import eventually_async

__all__ = ["CACHED", "counts", "followed", "held", "until_hits", "with_cache"]

CACHED = "max_batch_size: 4 dynamic_batching { } response_cache { enable: true }"


def with_cache(path: Path, cache_bytes: int = 2**20, **more: object) -> Settings:
    return Settings(paths=(path,), cache_bytes=cache_bytes, **more)  # type: ignore[arg-type]  # any setting's type


async def held(served: Served, script: Script, mark: float = 0) -> tuple[Call, Gate]:
    """A call whose execution waits at a gate, and the gate."""
    gate = script.hold(mark)
    (call,) = send(served, request(mark))
    await asyncio.to_thread(gate.wait_entered, 1)
    return call, gate


async def followed(served: Served, *requests: pb.ModelInferRequest) -> list[Call]:
    """Calls in flight, each of which waits for another's execution before the next is sent."""
    responses = served.server.repository.get("m", "").responses
    assert responses is not None
    limits = responses.limits
    calls: list[Call] = []
    for one in requests:
        expected = limits.requests + 1
        calls += send(served, one)
        await eventually_async(lambda n=expected: limits.requests == n, f"{expected} requests waiting")
    return calls


async def until_hits(served: Served, count: int) -> None:
    statistics = served.server.repository.get("m", "").statistics
    await eventually_async(lambda: statistics.cache_hit.count == count, f"{count} hits")


async def counts(served: Served) -> dict[str, float]:
    """How requests have ended, and how many were hits and misses, if any were."""
    found = await served.metrics()
    labels = '{model="m",version="1"}'
    looked = {kind: found[f"nv_cache_num_{kind}_per_model{labels}"] for kind in ("hits", "misses")}
    return {kind: count for kind, count in {**totals(found), **looked}.items() if count}
