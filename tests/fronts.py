"""The processes that speak gRPC for a server, as the operating system sees them.

Lives here: finding them, and a channel to each. Must not: assertions about behaviour.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import grpc

__all__ = ["channel_each", "fronts_of", "is_alive"]

_MANY = 64
_ESTABLISHED = "01"


def fronts_of(pid: int) -> list[int]:
    """The fronts of the server that runs in process `pid`, oldest first."""
    born = {number: time for number in map(int, _numbers("/proc")) if (time := _front_since(number, pid)) is not None}
    return sorted(born, key=lambda number: (born[number], number))  # numbers begin anew now and then


def is_alive(pid: int) -> bool:
    """Whether the process exists, and hasn't ended."""
    try:
        return _stat(pid)[0] not in "ZX"
    except OSError:
        return False


@asynccontextmanager
async def channel_each(target: str, fronts: Sequence[int]) -> AsyncIterator[dict[int, grpc.aio.Channel]]:
    """A connected channel to each of the server's `fronts`, by the front's own pid. The system chooses which front gets
    a connection, so this tries until each has got one. Nobody else may connect meanwhile."""
    port = int(target.rpartition(":")[2])
    channels: dict[int, grpc.aio.Channel] = {}
    async with AsyncExitStack() as stack:
        for _ in range(_MANY):
            before = {front: _connections(front, port) for front in fronts}
            options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
            channel = await stack.enter_async_context(grpc.aio.insecure_channel(target, options=options))
            await channel.channel_ready()
            (front,) = (one for one in fronts if _connections(one, port) - before[one])
            channels.setdefault(front, channel)
            if len(channels) == len(fronts):
                break
        assert len(channels) == len(fronts), f"{_MANY} connections went to {len(channels)} of {len(fronts)} fronts"
        yield channels


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines()


def _numbers(folder: str) -> list[str]:
    return [name for name in os.listdir(folder) if name.isdecimal()]


def _front_since(number: int, parent: int) -> int | None:
    """When process `number` was started, if it is a front of `parent`, in ticks."""
    try:
        stat = _stat(number)
        if stat[1] != str(parent) or not is_alive(number):
            return None
        return int(stat[19]) if b"paceline-front" in Path(f"/proc/{number}/cmdline").read_bytes() else None
    except OSError:
        return None


def _stat(pid: int) -> list[str]:
    """State, parent and more of a process; its name may have spaces and parentheses."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()


def _connections(pid: int, port: int) -> frozenset[str]:
    """The connections to our `port` that the process has accepted."""
    sockets = set()
    for number in _numbers(f"/proc/{pid}/fd"):
        try:
            sockets.add(os.readlink(f"/proc/{pid}/fd/{number}"))
        except FileNotFoundError:
            continue
    rows = [line.split() for name in ("tcp", "tcp6") for line in _lines(f"/proc/{pid}/net/{name}")]
    return frozenset(
        row[9]
        for row in rows
        if row[3] == _ESTABLISHED and int(row[1].rpartition(":")[2], 16) == port and f"socket:[{row[9]}]" in sockets
    )
