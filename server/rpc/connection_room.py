"""How many connections this process has descriptors for, while models and others take some too.

Lives here: the bound, as it is at any moment, and closing connections whose descriptors others need. Must not: know
what else needs descriptors. gRPC closes connections beyond a number that it is given when it starts to listen. If
models take more after that, it accepts until the process has no descriptor left, not even for a probe; so the latest
connections are closed here once less than the reserve is free.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import stat
from contextlib import suppress

from paceline.server.descriptors import allowed, free, opened, reserve

__all__ = ["ConnectionRoom"]

_log = logging.getLogger("paceline.server")

_LOOK_EVERY_S = 1.0


class ConnectionRoom:
    """Room for at most `most` connections. `bound` is how many there may be now; what it is at first, gRPC has to be
    given."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._first_bound = self.bound = max(1, min(most, free() - reserve()))
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
            left = free()
            # Only then can there be too many; looking at a descriptor takes a microsecond or two.
            scarce = left < reserve() + self._first_bound or allowed() - left > self._first_bound
            found = self.accepted() if scarce else set()
            # A new one has the lowest number that is free, so those that have come since the last look are in order,
            # mostly.
            self._seen = {one: None for one in self._seen if one in found} | dict.fromkeys(sorted(found))
            self.bound = max(1, min(self._first_bound, len(found) + left - reserve()))
            if (full := len(found) >= self.bound) and not was_full:
                _log.warning(
                    "%d connections are open, as many as there may be: later ones are closed. --grpc-max-connections "
                    "allows this process %d; of the %d files that it may open (ulimit -Hn), models and others have %d, "
                    "and %d are kept for probes and scrapes",
                    *(len(found), self._most, allowed(), allowed() - left - len(found), reserve()),
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
        for descriptor in opened():
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
