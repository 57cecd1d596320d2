"""A process's end of the connection to another, on an event loop: messages, and tensors in shared memory.

Lives here: sending and receiving with few wake-ups, and the giving back of places. Must not: know what is said. Each
end owns the memory that it writes to, and sees the other's. The rule: what is sent during one iteration of the loop
leaves together, at its end or, to wake the other end less often, a few iterations later; what has arrived is processed
all at once. The cost is per wake-up.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from threading import get_ident
from typing import NamedTuple, Self

from paceline.backends.spec import Array
from paceline.backends.transport.memory import SharedRegion, Window, new_region
from paceline.backends.transport.parcel import FrameReader, Message, Parcel, frame, pack, unpack

_log = logging.getLogger("paceline.transport")

_GIVE_BACK = 0
FIRST_KIND = 1
"""Kinds of messages from here on belong to the users of the link."""

_RECEIVE_BYTES = 256 * 1024
_BUFFER_BYTES = 2**20
"""Of the socket. The system may grant less."""

_CROWD_WEIGHT = 0.1
_CROWD_OF_ONE = 1.05
_QUIET_ITERATIONS = 8
_MAX_ITERATIONS = 64
_MAX_MESSAGES = 32


class Gathering:
    """Decides whether to wait for more messages, in iterations of an event loop that speaks gRPC.

    gRPC hands arrived requests to the loop one per iteration, and a wake-up of the other end costs more than handing
    one over. So if messages have had company lately, they wait until the loop has had no new ones for some iterations,
    a few microseconds each. A lone message leaves at once. 64 clients of a tiny model over two fronts: 10 rows per
    batch instead of 3.5, and two thirds of the processor time at the other end.
    """

    __slots__ = ("_crowd",)

    def __init__(self) -> None:
        self._crowd = 1.0

    def on_sent(self, messages: int) -> None:
        """Record that `messages` were sent together."""
        self._crowd += _CROWD_WEIGHT * (messages - self._crowd)

    def is_worth_waiting(self, messages: int, quiet: int, iterations: int) -> bool:
        """Whether to keep waiting with this many, after this many iterations, the last `quiet` of them without a new
        one."""
        if self._crowd < _CROWD_OF_ONE or messages >= _MAX_MESSAGES:
            return False
        return quiet < _QUIET_ITERATIONS and iterations < _MAX_ITERATIONS


class RemoteEnd(NamedTuple):
    """What another process inherits to be the other end: descriptors of its socket, its own memory and the other's."""

    socket: int
    own: int
    other: int

    def close(self) -> None:
        """To be called once the other process has the descriptors."""
        for descriptor in self:
            os.close(descriptor)


class End:
    """One end, whichever kind: memory of its own that it writes to, and a view of the other end's."""

    def __init__(self, end: socket.socket, own: SharedRegion, other: int) -> None:
        """Takes over `end`, and the descriptor `other` of the other end's memory."""
        self._socket = end
        self._own = own
        self._window = Window(other)
        self._reader = FrameReader()

    @classmethod
    def pair(cls, size_bytes: int) -> tuple[Self, RemoteEnd]:
        """An end for this process, and what another one needs to `join`, each with memory of `size_bytes`. Raises
        OSError, and leaves nothing open: a caller that tries again may be short of descriptors."""
        with ExitStack() as undo:
            here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
            for end in (here, there):
                undo.callback(end.close)
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
            theirs = new_region(size_bytes)
            undo.callback(os.close, theirs)
            ours = new_region(size_bytes)
            undo.callback(os.close, ours)
            made = cls(here, SharedRegion(os.dup(ours)), os.dup(theirs))
            undo.pop_all()
            return made, RemoteEnd(there.detach(), own=theirs, other=ours)

    @classmethod
    def join(cls, remote: RemoteEnd) -> Self:
        """The end that `remote` describes, in the process that has inherited it; that process's children don't."""
        end = socket.socket(fileno=remote.socket)
        end.set_inheritable(False)
        return cls(end, SharedRegion(remote.own), remote.other)

    @property
    def used_bytes(self) -> int:
        """How much of this end's own memory is taken, as far as this end knows."""
        return self._own.used_bytes


class Link(End):
    """One end. Belongs to the event loop that `start` ran on; arrays may be dropped on any thread."""

    def __init__(self, end: socket.socket, own: SharedRegion, other: int) -> None:
        super().__init__(end, own, other)
        self._window.gone = self._on_gone
        end.setblocking(False)
        self._gathering: Gathering | None = None
        self._collected: list[Message] = []
        self._collected_bytes = 0
        self._unsent = bytearray()
        self._closed = False
        self._gone: deque[tuple[int, int]] = deque()
        self.seen_bytes = 0
        """How much of the other end's memory arrays here hold, or have just released."""
        self._tells_soon = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._on_messages: Callable[[list[Message]], None] = _ignore
        self._on_end: Callable[[], None] = _nothing
        self._on_room: Callable[[], None] = _nothing

    @classmethod
    def join(cls, remote: RemoteEnd, gathering: Gathering | None = None) -> Self:
        """As above. `gathering` decides how long messages wait for others; without it they leave at the end of the
        iteration."""
        made = super().join(remote)
        made._gathering = gathering
        return made

    @property
    def size_bytes(self) -> int:
        """Of the memory at each end."""
        return self._own.size_bytes

    @property
    def unsent_bytes(self) -> int:
        """What the other end hasn't made room for, and what `send` was told of messages that haven't left yet."""
        return len(self._unsent) + self._collected_bytes

    def start(
        self,
        on_messages: Callable[[list[Message]], None],
        on_end: Callable[[], None],
        on_room: Callable[[], None] = lambda: None,
    ) -> None:
        """Start to receive. `on_messages` gets all messages that arrived together, in order; `on_end` is called once,
        when the other end is gone; `on_room` whenever places of this end's memory were given back."""
        self._loop = asyncio.get_running_loop()
        self._thread = get_ident()
        self._on_messages, self._on_end, self._on_room = on_messages, on_end, on_room
        self._loop.add_reader(self._socket.fileno(), self._receive)

    # hot path
    def pack(self, arrays: Sequence[Array], shift_bytes: int = 0) -> Parcel | None:
        """Copy `arrays` to where the other end finds them. None if this end's memory has no room now.

        The parcel must be sent, and unpacked there. `shift_bytes`, and what this raises: as of `parcel.pack`.
        """
        return pack(arrays, self._own, shift_bytes=shift_bytes)

    # hot path
    def unpack(self, parcel: Parcel) -> tuple[Array, ...]:
        """The arrays that the other end packed. Once per parcel: its place is given back with the last array."""
        self.seen_bytes += parcel[1]
        return unpack(parcel, self._window)

    # hot path
    def send(self, message: Message, size_bytes: int = 0) -> None:
        """Send `message` together with whatever else is sent now; its kind is `FIRST_KIND` or more. Dropped if the link
        is closed. `size_bytes`, of a large one, counts as unsent at once."""
        if not self._collected:
            assert self._loop is not None
            if self._gathering is None:
                self._loop.call_soon(self._flush)
            else:
                self._loop.call_soon(self._flush_unless_more, self._gathering, 1, 0, 0)
        self._collected.append(message)
        self._collected_bytes += size_bytes

    def close(self) -> None:
        """End, without calling `on_end`. Memory stays as long as arrays over it do. May be called before `start`."""
        self._window.forget()
        # The owners of these callbacks hold this link: without the cycle, neither waits for the garbage collector.
        self._on_messages, self._on_end, self._on_room = _ignore, _nothing, _nothing
        if self._closed:
            return
        self._closed = True
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
        self._unsent.clear()
        self._socket.close()

    # hot path
    def _flush_unless_more(self, gathering: Gathering, seen: int, quiet: int, iterations: int) -> None:
        """Send, unless more messages are likely to come right away."""
        messages = len(self._collected)
        quiet = quiet + 1 if messages == seen else 0
        if self._loop is not None and gathering.is_worth_waiting(messages, quiet, iterations):
            self._loop.call_soon(self._flush_unless_more, gathering, messages, quiet, iterations + 1)
        else:
            gathering.on_sent(messages)
            self._flush()

    # hot path: 2 us and a system call
    def _flush(self) -> None:
        """Send now what was collected. Raises ValueError if a message can't be marshalled, or MemoryError; all others
        are sent."""
        messages, self._collected, self._collected_bytes = self._collected, [], 0
        if not messages or self._closed:
            return
        try:
            data = frame(messages)
        except (ValueError, MemoryError):
            if len(messages) == 1:
                raise
            half = len(messages) // 2
            try:
                self._collected = messages[:half]
                self._flush()
            finally:
                self._collected = messages[half:]
                self._flush()
            return
        if self._unsent:
            self._unsent += data
            return
        sent = self._try_send(data)
        if sent < len(data) and self._loop is not None:
            self._unsent += memoryview(data)[sent:]
            self._loop.add_writer(self._socket.fileno(), self._send_rest)

    def _send_rest(self) -> None:
        sent = self._try_send(self._unsent)
        del self._unsent[:sent]
        if not self._unsent and self._loop is not None:
            self._loop.remove_writer(self._socket.fileno())

    def _try_send(self, data: bytes | bytearray) -> int:
        try:
            return self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            # Reading notices that as well, and gets what the other end sent before it went.
            _log.debug("the other end is gone: %s", error)
            return len(data)

    def _receive(self) -> None:
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            _log.debug("the other end is gone: %s", error)
            data = b""
        if not data:
            on_end = self._on_end
            self.close()
            on_end()
            return
        messages = self._reader.feed(data)
        if given_back := [start for message in messages if message[0] == _GIVE_BACK for start in message[1]]:
            for start in given_back:
                self._own.free(start)
            self._on_room()
            messages = [message for message in messages if message[0] != _GIVE_BACK]
        if messages:
            self._on_messages(messages)

    def _on_gone(self, start: int, size_bytes: int) -> None:
        """Called on any thread, and wherever the interpreter happens to drop an array."""
        self._gone.append((start, size_bytes))
        if self._tells_soon or self._closed or self._loop is None:
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
            self.seen_bytes -= size_bytes
            starts.append(start)
        if starts:
            self.send((_GIVE_BACK, starts))


def _ignore(messages: list[Message]) -> None:
    pass


def _nothing() -> None:
    pass
