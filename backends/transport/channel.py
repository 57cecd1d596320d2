"""Messages over a socket, on an event loop, with few wake-ups.

Lives here: sending and receiving. Must not: know a message. The rule: what is sent during one iteration of the loop
leaves together, at its end or, to wake the other end less often, a few iterations later; what has arrived is processed
all at once. The cost is per wake-up.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable

from paceline.backends.transport.frames import FrameReader, Message, frame
from paceline.backends.transport.gathering import Gathering

__all__ = ["Channel", "socket_pair"]

_log = logging.getLogger("paceline.transport")

_RECEIVE_BYTES = 256 * 1024
_BUFFER_BYTES = 2**20
"""Of the socket. The system may grant less."""


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Two connected ends, one per process."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
    return ends


class Channel:
    """One end. `on_messages` gets what has arrived, in order; `on_end` is called once, when the other end is gone.

    Belongs to the event loop that `start` ran on. `gathering` decides how long messages wait for others; without it
    they leave at the end of the iteration.
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
        """What the other end hasn't made room for, not counting what was collected in this iteration of the loop."""
        return len(self._unsent)

    def start(self, on_messages: Callable[[list[Message]], None], on_end: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_messages = on_messages
        self._on_end = on_end
        self._loop.add_reader(self._socket.fileno(), self._receive)

    # hot path
    def send(self, message: Message) -> None:
        """Send `message` together with whatever else is sent now. If the channel is closed, it is dropped."""
        if not self._collected:
            assert self._loop is not None
            if self._gathering is None:
                self._loop.call_soon(self.flush)
            else:
                self._loop.call_soon(self._flush_unless_more, self._gathering, 1, 0, 0)
        self._collected.append(message)

    # hot path
    def _flush_unless_more(self, gathering: Gathering, seen: int, quiet: int, iterations: int) -> None:
        """Send, unless more messages are likely to come right away."""
        messages = len(self._collected)
        quiet = quiet + 1 if messages == seen else 0
        if self._loop is not None and gathering.is_worth_waiting(messages, quiet, iterations):
            self._loop.call_soon(self._flush_unless_more, gathering, messages, quiet, iterations + 1)
        else:
            gathering.on_sent(messages)
            self.flush()

    # hot path: 2 us and a system call
    def flush(self) -> None:
        """Send now what was collected. Raises ValueError if something can't be marshalled; then none of it is sent, but
        later messages are."""
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
        """Stop sending and receiving, without calling `on_end`. May be called before `start`."""
        if self._closed:
            return
        self._closed = True
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_writer(self._socket.fileno())
        self._unsent.clear()
        self._socket.close()
        # The owners of these callbacks hold this channel: without the cycle, neither waits for the garbage collector.
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
            # Reading notices that as well, and gets what the other end sent before it went.
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
