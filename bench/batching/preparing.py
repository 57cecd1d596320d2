"""A server whose models prepare for each new number of rows, as runtimes do that compile or tune for a shape.

Lives here: the product's server over such a backend. Its command line, `python -m bench.batching.preparing REPOSITORY`,
accepts the flags of `paceline serve` that the tests' harness uses, and ignores them: it always takes free loopback
ports. Must not: batch.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from bench.batching.costs import MS, FirstUse
from paceline.backends.base import Device, ModelSource
from paceline.backends.identity import IdentityBackend, IdentityModel
from paceline.server.app import Server
from paceline.server.config import Settings
from tests.harness import ServerProcess

__all__ = ["FIRST_USE_MS", "PreparingProcess"]

FIRST_USE_MS = 100


class _PreparingBackend(IdentityBackend):
    """Identity models with the configured delays; the first batch of each size takes `FIRST_USE_MS` longer."""

    def open(self, source: ModelSource, device: Device) -> IdentityModel:
        model = super().open(source, device)
        latency = model.latency
        assert latency is not None
        cost = FirstUse(lambda rows: int(latency(rows) * 1e9), FIRST_USE_MS * MS)
        model.latency = lambda rows: cost(rows) / 1e9
        return model


class PreparingProcess(ServerProcess):
    """This module in a process of its own, for as long as the context lasts."""

    def __init__(self, repository: Path) -> None:
        super().__init__(repository, fresh=True)
        self._command = [sys.executable, "-m", "bench.batching.preparing", str(repository)]


async def _serve(repository: Path) -> None:
    settings = Settings(paths=(repository,), grpc_address="127.0.0.1", grpc_port=0, metrics_port=0)
    server = Server(settings, lambda name: _PreparingBackend())
    await server.start()
    message = f"ready: gRPC on 127.0.0.1:{server.grpc_port}, metrics on port {server.metrics_port}"
    print(json.dumps({"message": message}), file=sys.stderr, flush=True)
    await asyncio.Event().wait()  # until the process is ended


if __name__ == "__main__":
    asyncio.run(_serve(Path(sys.argv[1])))
