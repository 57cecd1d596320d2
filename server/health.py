"""Whether the server is live and ready, and who is told.

Lives here: what the start and end of the server, its models and its ports add up to. Must not: decide what any of them
is (`models.repository`, `memory.cuda_region`), or start or stop anything.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Protocol

from paceline.server.memory.cuda_region import CudaRegions
from paceline.server.models.repository import Repository
from paceline.server.telemetry.metrics import Metrics
from paceline.server.telemetry.probes import LoopProbe

__all__ = ["Health", "HealthService"]

_log = logging.getLogger("paceline.server")


class HealthService(Protocol):
    """What answers clients of gRPC's health service."""

    def set_serving(self, serving: bool, live: bool = True) -> None: ...

    @property
    def is_open(self) -> bool: ...


class Health:
    """Tells gRPC's health service, the metrics, probes and the log. From `open` to `close` the models decide; before
    and after that the server isn't ready."""

    def __init__(self, repository: Repository, cuda: CudaRegions, metrics: Metrics, service: HealthService) -> None:
        self._repository = repository
        self._cuda = cuda
        self._metrics = metrics
        self._service = service
        self._why_closed = "starting"
        self._was_ready = False
        self._where = ""

    def open(self, where: str) -> None:
        """The server accepts requests. `where` is for the log. On the event loop's thread."""
        self._why_closed, self._where = "", where
        self._repository.on_change = self._tell
        self._cuda.on_loss = partial(_call_soon, asyncio.get_running_loop(), self._tell)
        self._tell()
        if why_not := self.why_not_ready():
            _log.info("serving, not ready: %s: %s", why_not, where)

    def close(self) -> None:
        """The server is about to stop."""
        self._why_closed = "stopping"
        self._metrics.set_health(False, 0)
        self._service.set_serving(False)

    def why_not_live(self) -> str:
        """What only a new process can mend; "" if there is nothing."""
        lost = self._cuda.lost and f"CUDA shared memory: {self._cuda.lost}"
        return "; ".join(filter(None, (self._repository.why_not_live, lost)))

    def why_not_ready(self) -> str:
        """Why clients should send nothing for now; "" if they may."""
        nobody = "" if self._service.is_open else "no frontend is listening; another is being started"
        return self._why_closed or self._repository.why_not_ready or nobody

    def probes(self) -> dict[str, LoopProbe]:
        """What answers HTTP probes, by path."""
        loop = asyncio.get_running_loop()
        return {"/livez": LoopProbe(loop, self.why_not_live), "/readyz": LoopProbe(loop, self.why_not_ready)}

    def _tell(self) -> None:
        if self._why_closed:
            return
        ready = self._repository.ready
        self._service.set_serving(ready, not self.why_not_live())
        self._metrics.set_health(ready, len(self._repository.failures))
        if ready and not self._was_ready:
            self._was_ready = True
            _log.info("ready: %s", self._where)


def _call_soon(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    """May be called on any thread, which may outlive the loop."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(function)
