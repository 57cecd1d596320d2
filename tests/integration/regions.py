"""Shared-memory regions over the wire: registering them, listing them, and requests to model `m` with tensors in them.

Lives here: what the tests of shared memory need again and again. Must not: assertions about behaviour.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from paceline.protos import inference_pb2 as pb
from paceline.server.config import Settings
from tests.integration.serving import Served
from tests.shared_objects import add_shared_input, request_shared_output

__all__ = ["ROW", "in_region", "regions", "register", "settings", "unregister"]

ROW = 8
"""Bytes of a row of two floats."""


def settings(path: Path, **more: Any) -> Settings:
    return Settings(paths=(path,), allow_client_shm=True, **more)


async def register(served: Served, name: str, key: str, size: int, offset: int = 0) -> None:
    await served.stub.SystemSharedMemoryRegister(
        pb.SystemSharedMemoryRegisterRequest(name=name, key=key, offset=offset, byte_size=size), timeout=20
    )


async def unregister(served: Served, name: str = "") -> None:
    await served.stub.SystemSharedMemoryUnregister(pb.SystemSharedMemoryUnregisterRequest(name=name), timeout=20)


async def regions(served: Served, name: str = "") -> dict[str, tuple[str, int, int]]:
    status = await served.stub.SystemSharedMemoryStatus(pb.SystemSharedMemoryStatusRequest(name=name), timeout=20)
    assert all(key == one.name for key, one in status.regions.items())
    return {one.name: (one.key, one.offset, one.byte_size) for one in status.regions.values()}


def in_region(
    rows: int = 1, offset: int = 0, region: str = "r", model: str = "m", target: int | None = None
) -> pb.ModelInferRequest:
    """`rows` rows of two floats, from shared memory; the answer goes to offset `target` there, or into the response."""
    request = pb.ModelInferRequest(model_name=model)
    add_shared_input(request, "a", "FP32", [rows, 2], region, rows * ROW, offset)
    if target is not None:
        request_shared_output(request, "x", region, rows * ROW, target)
    return request
