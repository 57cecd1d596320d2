"""Messages over a socket, on an event loop, with few wake-ups.

Lives here: sending and receiving. Must not: know a message. The rule: what is sent during one iteration of the loop
leaves together, at its end or, where the other end is to be woken seldom, a few iterations later; and what has arrived
is taken all at once, so that the price is per wake-up.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from backends.transport.frames import FrameReader, Message, frame
from backends.transport.gathering import Gathering

__all__ = ["Channel", "socket_pair"]

_log = logging.getLogger("paceline.transport")

_RECEIVE_BYTES = 256 * 1024
_BUFFER_BYTES = 2**20
"""Of the socket. The system may give less."""


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two ends, for a process each."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    return ends


class Channel:
    """One end. `on_messages` gets what has arrived, in order; `on_end` is called once, when the other end is gone.

    Belongs to the event loop that `start` ran on. `gathering` says what to wait for with messages; without it they
    leave at the end of the iteration.
    """

    def __init__(self, end: socket.socket, gathering: Gathering | None = None) -> None:
        end.setblocking(False)
        self._gathering = gathering
        self._socket = end
        self._reader = FrameReader()
        self._collected: list[Message] = []
        self._unsent = bytearray()
        self._closed = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_messages: Callable[[list[Message]], None] = _ignore
        self._on_end: Callable[[], None] = _nothing

    @property
    def closed(self) -> bool:
        return self._closed

    @property
    def unsent_bytes(self) -> int:
        """What the other side hasn't made room for, without what was collected in this iteration of the loop."""
        return len(self._unsent)

    def start(self, on_messages: Callable[[list[Message]], None], on_end: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_messages = on_messages
        self._on_end = on_end
        self._loop.add_reader(self._socket.fileno(), self._receive)

    # hot path
    def send(self, message: Message) -> None:
        """Send it with what else there is to send now. Into a closed channel goes nothing."""
        if not self._collected:
            assert self._loop is not None
            if self._gathering is None:
                self._loop.call_soon(self.flush)
            else:
                self._loop.call_soon(self._flush_unless_more, self._gathering, 1, 0, 0)
        self._collected.append(message)

    # hot path
    def _flush_unless_more(self, gathering: Gathering, seen: int, quiet: int, iterations: int) -> None:
        """Send, unless more is likely to come up right away."""
        messages = len(self._collected)
        quiet = quiet + 1 if messages == seen else 0
        if self._loop is not None and gathering.is_worth_waiting(messages, quiet, iterations):
            self._loop.call_soon(self._flush_unless_more, gathering, messages, quiet, iterations + 1)
        else:
            gathering.on_sent(messages)
            self.flush()

    # hot path: 2 us and a system call
    def flush(self) -> None:
        """Send what was collected now. Raises ValueError for what can't be marshalled, and then nothing of it is sent;
        what comes later is."""
        messages, self._collected = self._collected, []
        if not messages or self._closed:
            return
        data = frame(messages)
        if self._unsent:
            self._unsent += data
            return
        sent = self._try_send(data)
        if sent < len(data) and self._loop is not None:
            self._unsent += memoryview(data)[sent:]
            self._loop.add_writer(self._socket.fileno(), self._send_rest)

    def close(self) -> None:
        """Send no more, receive no more. `on_end` isn't called for it. Before `start` it is fine too."""
        if self._closed:
            return
        self._closed = True
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
        self._unsent.clear()
        self._socket.close()
        # What these belong to has this channel: without them neither waits for the garbage collector.
        self._on_messages, self._on_end = _ignore, _nothing

    def _receive(self) -> None:
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            _log.debug("the other end is gone: %s", error)
            data = b""
        if not data:
            self._end()
            return
        if messages := self._reader.feed(data):
            self._on_messages(messages)

    def _try_send(self, data: bytes | bytearray) -> int:
        try:
            return self._socket.send(data)
        except (BlockingIOError, InterruptedError):
            return 0
        except OSError as error:
            # Reading finds out as well, and has what the other end said before it went.
            _log.debug("the other end is gone: %s", error)
            return len(data)

    def _send_rest(self) -> None:
        sent = self._try_send(self._unsent)
        del self._unsent[:sent]
        if not self._unsent and self._loop is not None:
            self._loop.remove_writer(self._socket.fileno())

    def _end(self) -> None:
        tell = self._on_end
        self.close()
        tell()


def _ignore(messages: list[Message]) -> None:
    pass


def _nothing() -> None:
    pass
