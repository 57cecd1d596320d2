"""Counting the bytes that go over the wire.

Lives here: a relay between a client and a server that counts bytes. Must not: understand them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

__all__ = ["Relay", "relaying"]


class Relay:
    """How many bytes have gone in each direction, and both ends of all connections."""

    def __init__(self) -> None:
        self.port = 0
        self.sent_bytes = 0
        self.answered_bytes = 0
        self.ends: list[asyncio.StreamWriter] = []

    def cut(self) -> None:
        """End all connections."""
        for end in self.ends:
            end.close()
        self.ends.clear()


@asynccontextmanager
async def relaying(port: int) -> AsyncIterator[Relay]:
    """A relay to `port`, with both ends on the loopback interface."""
    relay, tasks = Relay(), set[asyncio.Task[None]]()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, counter: str) -> None:
        try:
            while data := await reader.read(2**16):
                setattr(relay, counter, getattr(relay, counter) + len(data))
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        relay.ends += [writer, far_writer]
        for one in (pump(reader, far_writer, "sent_bytes"), pump(far_reader, writer, "answered_bytes")):
            tasks.add(asyncio.create_task(one))

    async with await asyncio.start_server(connect, "127.0.0.1", 0) as server:
        relay.port = server.sockets[0].getsockname()[1]
        try:
            yield relay
        finally:
            # The server waits for its connections, which end with these.
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
