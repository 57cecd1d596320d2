"""The standard health service, `grpc.health.v1`: Check, List and Watch, for the server as a whole and per service.

Lives here: the statuses and who watches them. Must not: decide whether the server is ready; it is told. The messages
are grpcio-health-checking's. Its servicer isn't used: it forgets every watcher of a service as soon as one of them
goes, and its Watch streams never end, which would hold up each shutdown for the whole grace period.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.server.rpc.calls import Context

__all__ = ["LIVENESS", "HealthService"]

LIVENESS = "liveness"
"""The service that is SERVING as long as the server answers and a restart wouldn't help. It is for whoever restarts
servers that aren't live: one that isn't ready, because a model is missing or it is about to end, gains nothing from a
restart; one that has lost its devices does."""

_Response = health_pb2.HealthCheckResponse


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """All of `services`, and "" for the server, have the same status: SERVING once `set_serving(True)` was called.
    LIVENESS is SERVING from the beginning, unless `set_serving` says otherwise; its Watch streams also end at
    `close`."""

    def __init__(self, services: Iterable[str]) -> None:
        self._services = frozenset(("", LIVENESS, *services))
        self._serving = False
        self._live = True
        self._closed = False
        self._changed = asyncio.Event()

    def set_serving(self, serving: bool, live: bool = True) -> None:
        """Set the status, and that of LIVENESS, and tell the watchers. Has no effect after `close`."""
        if self._closed:
            return
        self._serving, self._live = serving, live
        self._tell()

    def close(self) -> None:
        """Set the status to NOT_SERVING for good; Watch streams report it and end."""
        self._serving = False
        self._closed = True
        self._tell()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        if request.service not in self._services:
            refusal = context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service '{request.service}'")
            # As in `answering`: the error that ends the call is kept with it, and its traceback holds this frame.
            del request, context
            await refusal
        return _Response(status=self._status(request.service))

    async def List(self, request: health_pb2.HealthListRequest, context: Context) -> health_pb2.HealthListResponse:
        """The status of each service. Called only if grpcio-health-checking has its messages, from 1.85 on."""
        statuses = {service: _Response(status=self._status(service)) for service in self._services}
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        """Send the status now and at each change. An unknown service is SERVICE_UNKNOWN, and stays so."""
        last: int | None = None
        while True:
            # Read these together: any of them may change while a response is being written.
            changed, closed = self._changed, self._closed
            status = self._status(request.service)
            if status != last:
                await context.write(_Response(status=status))
                last = status
            if closed:
                return
            await changed.wait()

    def _status(self, service: str) -> int:
        if service not in self._services:
            return int(_Response.SERVICE_UNKNOWN)
        serving = self._live if service == LIVENESS else self._serving
        status: int = _Response.SERVING if serving else _Response.NOT_SERVING
        return status

    def _tell(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
