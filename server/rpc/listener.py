"""gRPC's server with what every listening process has: the port, room for connections, health and reflection.

Lives here: opening it, setting its health, closing it once hardly any calls arrive; how many connections it has
descriptors for, while models and others take some too. Must not: know what the inference service does, or what else
needs descriptors.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from urllib.parse import unquote

import grpc
from grpc_health.v1 import health_pb2_grpc

from paceline.server.addresses import SocketFile, host_and_port, socket_path
from paceline.server.config import Settings
from paceline.server.errors import StartError
from paceline.server.rpc.credentials import Tokens
from paceline.server.rpc.gate import Admission, Gate, Registry, Usage
from paceline.server.rpc.standard_services import INFERENCE_SERVICE, HealthService, Reflection
from paceline.server.rpc.tls import Certificates
from paceline.server.tuning import allowed_descriptors, free_descriptors, open_descriptors, reserved_descriptors

_log = logging.getLogger("paceline.server")

_UNTIL_STOP_S = 1e6
"""Replaced by the grace of `stop`: gRPC uses the shortest grace that it is given."""

# gRPC chooses the algorithm: the one of this level among those that the client accepts.
_COMPRESSION_LEVELS = {"none": 0, "low": 1, "medium": 2, "high": 3}

_LOOK_EVERY_S = 1.0

_QUIET_S = 0.05
_LONGEST_S = 1.0


def _open_tokens(settings: Settings) -> Tokens | None:
    """The tokens that callers need; None if they need none. Raises StartError."""
    if settings.token_file is None:
        return None
    tokens = Tokens(settings.token_file)
    tokens.open()
    return tokens


def check_access(settings: Settings) -> None:
    """Check that tokens and certificates can be read, before minutes go into loading. Raises StartError if they can't;
    logs a warning if every user can read the key, or the certificate is out of date."""
    _open_tokens(settings)
    if settings.tls is not None:
        certificates = Certificates(settings.tls)
        certificates.credentials()
        certificates.warn()


class Listener:
    """Serves what `add_services` adds. `end_streams` ends the streams that are open. `shares_port`: other processes of
    this server listen on the same port."""

    def __init__(
        self,
        settings: Settings,
        add_services: Callable[[Registry], None],
        end_streams: Callable[[], None],
        *,
        shares_port: bool = False,
    ) -> None:
        self._settings = settings
        self._add_services = add_services
        self._end_streams = end_streams
        self._shares_port = shares_port
        self._health = HealthService([INFERENCE_SERVICE])
        self._reflection = Reflection()
        path = socket_path(settings.grpc_address)
        self._socket = None if path is None else SocketFile(path, settings.grpc_socket_mode)
        self._server: grpc.aio.Server | None = None
        self._leaving: asyncio.Task[None] | None = None
        self._keeping: list[asyncio.Task[None]] = []
        self._room: ConnectionRoom | None = None
        # The limits are for all processes together.
        self._admission = Admission(
            max_rpcs=-(-settings.limits.rpcs // settings.frontends),
            max_streams=-(-settings.limits.streams // settings.frontends),
        )

    async def open(self, port: int) -> int:
        """Listen on `port`, on a free one if it is 0. Returns the port; 0 for a Unix socket. Raises StartError."""
        settings = self._settings
        # The limits are for all processes together.
        self._room = room = ConnectionRoom(-(-settings.limits.connections // settings.frontends))
        options = {
            "grpc.max_allowed_incoming_connections": room.bound,
            "grpc.default_compression_level": _COMPRESSION_LEVELS[settings.grpc_infer_response_compression_level],
            # Another server on the same port is a mistake, not a wish for load sharing.
            "grpc.so_reuseport": int(self._shares_port),
            **dict(settings.limits.grpc_options()),
            **dict(settings.connections.grpc_options()),
        }
        server = grpc.aio.server(options=list(options.items()))
        patience_s = settings.grpc_message_timeout_secs
        gate = Gate(self._admission, _open_tokens(settings), settings.restrictions, patience_s)
        self._add_services(gate)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, gate)
        self._reflection.add_to(gate)
        gate.add_to(server)
        where: AbstractContextManager[str] = nullcontext(host_and_port(settings.grpc_address, port))
        with self._socket.appearing() if self._socket else where as target:
            try:
                if settings.tls is None:
                    port = server.add_insecure_port(target)
                else:
                    port = server.add_secure_port(target, Certificates(settings.tls).credentials())
            except RuntimeError:
                raise StartError(f"gRPC can't listen on {target}") from None
            self._server = server
            local = unquote(target.removeprefix("unix:")) if self._socket else port
            keeping = gate.end_overdue_calls(), room.keep_reserve(local)
            self._keeping = [asyncio.get_running_loop().create_task(one) for one in keeping]
            # Even if cancelled meanwhile: it takes no time, and a server cancelled halfway through it couldn't be
            # stopped in order.
            starting = asyncio.ensure_future(server.start())
            try:
                await asyncio.shield(starting)
            finally:
                await asyncio.wait((starting,))
        return 0 if self._socket else port

    @property
    def usage(self) -> Usage:
        """Calls in progress, how many were refused, and how many connections there may be."""
        return self._admission.usage()._replace(max_connections=self._room.bound if self._room else 0)

    def give_way(self) -> int:
        """Have connections give way to models, which are about to take descriptors. Returns how many connections have.
        On any thread."""
        if self._room is None:
            return 0
        self._room.look_now()
        return len(self._room.accepted())

    @property
    def is_open(self) -> bool:
        """Whether the server was opened."""
        return self._server is not None

    def set_serving(self, serving: bool, live: bool = True) -> None:
        """Set what health says."""
        self._health.set_serving(serving, live)

    def announce_end(self) -> None:
        """Health says NOT_SERVING for good; its streams and those of reflection end."""
        self._health.close()
        self._reflection.close()

    def leave(self) -> None:
        """Stop listening and send GOAWAY to clients; calls in progress go on until `stop`. gRPC cancels calls that
        cross with the GOAWAY, so make sure that there are few."""
        if self._socket is not None:
            self._socket.remove()
        if self._server is not None and self._leaving is None:
            self._leaving = asyncio.get_running_loop().create_task(self._server.stop(_UNTIL_STOP_S))

    async def stop(self, grace_s: float) -> None:
        """End streams, and give answers on their way out `grace_s` seconds. May be called without `open`."""
        self._end_streams()
        if self._socket is not None:
            self._socket.remove()
        if self._server is not None:
            await self._server.stop(grace_s)
        for task in self._keeping:
            task.cancel()
        if self._leaving is not None:
            await self._leaving


async def until_quiet(arrivals: Callable[[], int]) -> None:
    """Return when nothing has arrived for a moment, by the count that `arrivals` returns, or after a second.

    gRPC's server cancels calls that cross with its GOAWAY, or that have arrived but aren't taken up when it stops: they
    end with CANCELLED, through no fault of the caller, whose client doesn't try elsewhere. Callers that are refused
    before that come back after `TRY_AGAIN_MS`, so it is quiet soon where callers wait for answers.

    A pause that lasted much longer than it should proves nothing: what arrived meanwhile isn't counted yet.
    """
    until_s = time.monotonic() + _LONGEST_S
    first = seen = arrivals()
    quiet = 0
    while quiet < (1 if seen == first else 2) and time.monotonic() < until_s:
        before, began_s = seen, time.monotonic()
        await asyncio.sleep(_QUIET_S)
        seen = arrivals()
        quiet = quiet + 1 if seen == before and time.monotonic() - began_s < 2 * _QUIET_S else 0


class ConnectionRoom:
    """Room for at most `most` connections. `bound` is how many there may be now; what it is at first, gRPC has to be
    given, and closes connections beyond that. If models take more descriptors after that, it accepts until the process
    has none left, not even for a probe; so the latest connections are closed here once less than the reserve is free.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._first_bound = self.bound = max(1, min(most, free_descriptors() - reserved_descriptors()))
        self._where: int | str = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._look = asyncio.Event()
        # By descriptor and number of the socket; the earliest first.
        self._seen: dict[tuple[int, int], None] = {}

    async def keep_reserve(self, where: int | str) -> None:
        """Close the latest connections to `where`, a port or a Unix socket's path, whenever less than the reserve is
        free. Logs when there are as many as there may be."""
        self._where = where
        self._loop = asyncio.get_running_loop()
        was_full = False
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._look.wait(), _LOOK_EVERY_S)
            self._look.clear()
            left, allowed, reserve = free_descriptors(), allowed_descriptors(), reserved_descriptors()
            # Only then can there be too many; looking at a descriptor takes a microsecond or two.
            scarce = left < reserve + self._first_bound or allowed - left > self._first_bound
            found = self.accepted() if scarce else set()
            # A new one has the lowest number that is free, so those that have come since the last look are in order,
            # mostly.
            self._seen = {one: None for one in self._seen if one in found} | dict.fromkeys(sorted(found))
            self.bound = max(1, min(self._first_bound, len(found) + left - reserve))
            if (full := len(found) >= self.bound) and not was_full:
                _log.warning(
                    "%d connections are open, as many as there may be: later ones are closed. --grpc-max-connections "
                    "allows this process %d; of the %d files that it may open (ulimit -Hn), models and others have %d, "
                    "and %d are kept for probes and scrapes",
                    *(
                        len(found),
                        self._most,
                        allowed,
                        allowed - left - len(found),
                        reserve,
                    ),
                )
            was_full = full
            for descriptor, _ in list(self._seen)[self.bound :]:
                _shut(descriptor)

    def look_now(self) -> None:
        """See at once whether less than the reserve is free: something is about to take more. On any thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._look.set)

    def accepted(self) -> set[tuple[int, int]]:
        """Connections, each as its descriptor and the number of its socket. On any thread. Takes no descriptor itself,
        as there may be none."""
        found = set()
        for descriptor in open_descriptors():
            with suppress(OSError):  # closed meanwhile, or not connected to anything any more
                status = os.fstat(descriptor)
                if stat.S_ISSOCK(status.st_mode) and _is_accepted(descriptor, self._where):
                    found.add((descriptor, status.st_ino))
        return found


def _is_accepted(descriptor: int, where: int | str) -> bool:
    one = socket.socket(fileno=descriptor)
    try:
        name = one.getsockname()
        listens = one.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
        return not listens and where == (name[1] if isinstance(name, tuple) else name)
    finally:
        one.detach()


def _shut(descriptor: int) -> None:
    """gRPC, which owns the socket, closes it then, as if the client had gone."""
    one = socket.socket(fileno=descriptor)
    try:
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
    finally:
        one.detach()
