"""A process's end of the connection to another: messages, and tensors in shared memory.

Lives here: what joins channel and memory, and the giving back of places. Must not: know what is said. Each end owns the
memory that it writes to, and sees the other's.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from threading import get_ident
from typing import TypeVar

from paceline.backends.spec import Array
from paceline.backends.transport.channel import Channel, socket_pair
from paceline.backends.transport.frames import Message
from paceline.backends.transport.gathering import Gathering
from paceline.backends.transport.memory import SharedRegion, Window, new_region
from paceline.backends.transport.parcel import Parcel, pack, unpack

__all__ = ["FIRST_KIND", "Link", "RemoteEnd", "connect"]

T = TypeVar("T")

_GIVE_BACK = 0
FIRST_KIND = 1
"""Kinds of messages from here on belong to the users of the link."""


@dataclass(frozen=True, slots=True)
class RemoteEnd:
    """What another process inherits to be the other end: descriptors of its socket, its own memory and the other's."""

    socket: int
    own: int
    other: int

    @property
    def descriptors(self) -> tuple[int, int, int]:
        return self.socket, self.own, self.other

    def close(self) -> None:
        """To be called once the other process has the descriptors."""
        for descriptor in self.descriptors:
            os.close(descriptor)


def _open_ends(size_bytes: int) -> tuple[socket.socket, SharedRegion, int, RemoteEnd]:
    """This process's socket, its own memory of `size_bytes` and the descriptor of the other's, and what another process
    needs to `join`. Raises OSError, and leaves nothing open: a caller that tries again may be short of descriptors."""
    with ExitStack() as undo:
        here, there = socket_pair()
        undo.callback(here.close)
        undo.callback(there.close)
        theirs = new_region(size_bytes)
        undo.callback(os.close, theirs)
        ours = new_region(size_bytes)
        undo.callback(os.close, ours)
        seen = os.dup(theirs)
        undo.callback(os.close, seen)
        memory = SharedRegion(os.dup(ours))
        undo.pop_all()
        return here, memory, seen, RemoteEnd(there.detach(), own=theirs, other=ours)


def connect(make: Callable[[socket.socket, SharedRegion, int], T], size_bytes: int) -> tuple[T, RemoteEnd]:
    """What `make` makes of this process's end: its socket, its own memory of `size_bytes` and the descriptor of the
    other's; and what another process needs to `join`. Raises OSError, and leaves nothing open."""
    here, own, other, remote = _open_ends(size_bytes)
    try:
        return make(here, own, other), remote
    except OSError:
        here.close()
        remote.close()
        raise


class Link:
    """One end. Belongs to the event loop that `start` ran on; arrays may be dropped on any thread."""

    def __init__(self, end: socket.socket, own: SharedRegion, other: int, gathering: Gathering | None = None) -> None:
        """Takes over `end`, and the descriptor `other` of the other end's memory. With `gathering` it wakes the other
        end less often."""
        self._channel = Channel(end, gathering)
        self._own = own
        self._window = Window(other, self._on_gone)
        self._gone: deque[tuple[int, int]] = deque()
        self._seen_bytes = 0
        self._tells_soon = False
        self._loop: asyncio.AbstractEventLoop
        self._thread = 0
        self._on_messages: Callable[[list[Message]], None]
        self._on_room: Callable[[], None]

    @classmethod
    def pair(cls, size_bytes: int) -> tuple[Link, RemoteEnd]:
        """An end for this process, and what another one needs to `join`, each with memory of `size_bytes`. Raises
        OSError."""
        return connect(cls, size_bytes)

    @classmethod
    def join(cls, remote: RemoteEnd, gathering: Gathering | None = None) -> Link:
        """The end that `remote` describes, in the process that has inherited it."""
        return cls(socket.socket(fileno=remote.socket), SharedRegion(remote.own), remote.other, gathering)

    @property
    def size_bytes(self) -> int:
        """Of the memory at each end."""
        return self._own.size_bytes

    @property
    def used_bytes(self) -> int:
        """How much of this end's own memory is taken."""
        return self._own.used_bytes

    @property
    def seen_bytes(self) -> int:
        """How much of the other end's memory arrays here hold, or have just released."""
        return self._seen_bytes

    @property
    def unsent_bytes(self) -> int:
        """What the other end hasn't made room for."""
        return self._channel.unsent_bytes

    def start(
        self,
        on_messages: Callable[[list[Message]], None],
        on_end: Callable[[], None],
        on_room: Callable[[], None] = lambda: None,
    ) -> None:
        """Start to receive. `on_messages` gets all messages that arrived together; `on_end` is called once, when the
        other end is gone; `on_room` whenever places of this end's memory were given back."""
        self._loop = asyncio.get_running_loop()
        self._thread = get_ident()
        self._on_messages, self._on_room = on_messages, on_room

        def end() -> None:
            self._forget()
            on_end()

        self._channel.start(self._receive, end)

    # hot path
    def send(self, message: Message) -> None:
        """Send `message` together with whatever else is sent now; its kind is `FIRST_KIND` or more."""
        self._channel.send(message)

    # hot path
    def pack(self, arrays: Sequence[Array]) -> Parcel | None:
        """Copy `arrays` to where the other end finds them. None if this end's memory has no room now.

        The parcel must be sent, and unpacked there. Raises as `parcel.pack`.
        """
        return pack(arrays, self._own)

    # hot path
    def unpack(self, parcel: Parcel) -> tuple[Array, ...]:
        """The arrays that the other end packed. Once per parcel: its place is given back with the last array."""
        self._seen_bytes += parcel[1]
        return unpack(parcel, self._window)

    def close(self) -> None:
        """End. Memory stays as long as arrays over it do."""
        self._channel.close()
        self._forget()

    def _forget(self) -> None:
        """Drop the callbacks of this link's owner, and stop reporting places."""
        self._window.forget()
        self._on_messages, self._on_room = _ignore, _nothing

    def _receive(self, messages: list[Message]) -> None:
        if any(message[0] == _GIVE_BACK for message in messages):
            for message in messages:
                if message[0] == _GIVE_BACK:
                    for start in message[1]:
                        self._own.free(start)
            self._on_room()
            messages = [message for message in messages if message[0] != _GIVE_BACK]
        if messages:
            self._on_messages(messages)

    def _on_gone(self, start: int, size_bytes: int) -> None:
        """Called on any thread, and wherever the interpreter happens to drop an array."""
        self._gone.append((start, size_bytes))
        if self._tells_soon or self._channel.closed:
            return
        self._tells_soon = True
        if get_ident() == self._thread:
            self._loop.call_soon(self._give_back)
        elif not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._give_back)

    def _give_back(self) -> None:
        # Cleared first: whoever appends from here on makes sure that this is called again.
        self._tells_soon = False
        starts = []
        while self._gone:
            start, size_bytes = self._gone.popleft()
            self._seen_bytes -= size_bytes
            starts.append(start)
        if starts:
            self._channel.send((_GIVE_BACK, starts))


def _ignore(messages: list[Message]) -> None:
    pass


def _nothing() -> None:
    pass
