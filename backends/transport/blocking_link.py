"""The connection to another process for threads that ask, block, and get an answer.

Lives here: `link` without an event loop, for a thread that has nothing else to do meanwhile: a loop in between would
cost two more wake-ups of threads per question. Must not: know what is said. The rule: the ends take turns, so places
that aren't needed any more are reported with the next message, and no message is sent just for that.
"""

from __future__ import annotations

import math
import socket
import sys
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from paceline.backends.spec import Array
from paceline.backends.transport.link import RemoteEnd, connect
from paceline.backends.transport.memory import SharedRegion, Window
from paceline.backends.transport.parcel import FrameReader, Message, Parcel, Place, frame, pack, unpack

_RECEIVE_BYTES = 256 * 1024
_MIN_BUFFER_BYTES = 128 * 1024
"""A place of its own for an array costs both ends some 10 us more than a part of another place does; copying this much
takes as long."""


class BlockingLink:
    """One end. For one thread at a time, except `hang_up`; arrays may be dropped on any thread."""

    def __init__(self, end: socket.socket, own: SharedRegion, other: int) -> None:
        """Takes over `end`, and the descriptor `other` of the other end's memory."""
        self._socket = end
        self._own = own
        self._buffers: dict[int, tuple[Array, Place]] = {}
        self._gone: deque[int] = deque()
        gone = self._gone

        def on_gone(start: int, *_: int) -> None:
            gone.append(start)  # atomic; a bound method would make a cycle of this and the window

        self._window = Window(other, on_gone)
        self._reader = FrameReader()
        # Of those that came together.
        self._unreceived: deque[Message] = deque()
        self.unread = False
        """Whether the other end, now gone, left something unread that it was sent."""

    @classmethod
    def pair(cls, size_bytes: int) -> tuple[BlockingLink, RemoteEnd]:
        """An end for this process, and what another one needs to `join`, each with memory of at most `size_bytes`.
        Raises OSError."""
        return connect(cls, size_bytes)

    @classmethod
    def join(cls, remote: RemoteEnd) -> BlockingLink:
        """The end that `remote` describes, in the process that has inherited it; that process's children don't."""
        end = socket.socket(fileno=remote.socket)
        end.set_inheritable(False)
        return cls(end, SharedRegion(remote.own), remote.other)

    @property
    def used_bytes(self) -> int:
        """How much of this end's own memory is taken, as far as this end knows."""
        return self._own.used_bytes

    def buffer(self, number: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array | None:
        """An array with arbitrary contents, for one of those packed next. It then isn't copied, and belongs to the
        other end from then on. Another one for the same `number` replaces it. None if copying costs less, or there is
        no room."""
        if (before := self._buffers.pop(number, None)) is not None:
            self._own.free(before[1][0])
        size = math.prod(shape) * dtype.itemsize
        if dtype.hasobject or size < _MIN_BUFFER_BYTES:
            return None
        start = self._own.allocate(size)
        if start is None:
            return None
        array = self._own.array(start, dtype, shape)
        self._buffers[number] = array, (start, size)
        return array

    def pack(self, arrays: Sequence[Array]) -> Parcel:
        """Copy `arrays` to where the other end finds them: into the message if memory has no room. The parcel must be
        sent.

        Raises TypeError or ValueError for elements of object arrays that aren't `bytes`.
        """
        there = self._places_of(arrays) if self._buffers else {}
        parcel = None
        try:
            parcel = pack(arrays, self._own, there)
            whole = parcel or pack(arrays, self._own, inline_bytes=sys.maxsize)
            assert whole is not None
            return whole
        finally:
            if parcel is None:
                for start, _ in there.values():
                    self._own.free(start)

    def _places_of(self, arrays: Sequence[Array]) -> dict[int, Place]:
        """The places of those of `arrays` that are in buffers, by their ids. All other buffers are freed."""
        wanted, there = set(map(id, arrays)), {}
        for array, place in self._buffers.values():
            if id(array) in wanted:
                there[id(array)] = place
            else:
                self._own.free(place[0])
        self._buffers = {}
        return there

    def release_buffers(self) -> None:
        """What was made in buffers won't be packed."""
        if self._buffers:
            self._places_of(())

    def unpack(self, parcel: Parcel) -> tuple[Array, ...]:
        """The arrays that the other end packed. Once per parcel: its place is given back after the last array is
        gone."""
        return unpack(parcel, self._window)

    def send(self, kind: int, *content: Any) -> bool:
        """Send the message, with the places to give back. Blocks. False if the other end is gone and will never get all
        of it.

        Raises ValueError for what a message can't hold.
        """
        gone = []
        while self._gone:
            gone.append(self._gone.popleft())
        try:
            data = frame([(kind, gone, *content)])
        except ValueError:
            self._gone.extend(gone)
            raise
        try:
            self._socket.sendall(data)
        except OSError:
            return False
        return True

    def receive(self) -> Message | None:
        """The next message: its kind and content; None once the other end is gone. Blocks."""
        while not self._unreceived:
            messages = self._frames()
            if messages is None:
                return None
            self._unreceived.extend(messages)
        kind, _, *content = self._unreceived.popleft()
        return (kind, *content)

    def _frames(self) -> list[Message] | None:
        """What has come: messages, each with the places that it gives back, which are free now; maybe none yet. None
        once the other end is gone. Blocks."""
        try:
            data = self._socket.recv(_RECEIVE_BYTES)
        except OSError as error:
            # What Linux reports if something was left unread, see unix_release_sock in net/unix/af_unix.c.
            self.unread = isinstance(error, ConnectionResetError)
            return None
        if not data:
            return None
        messages = self._reader.feed(data)
        for message in messages:
            if message[1]:
                self._free(message[1])
        return messages

    def _free(self, places: Sequence[int]) -> None:
        for start in places:
            self._own.free(start)

    def hang_up(self) -> None:
        """Make `receive` return, on whichever thread it waits. Repeated, or after `close`, it does nothing."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        """Nobody may be sending or receiving. Memory stays as long as arrays over it do."""
        self._socket.close()
        self._window.forget()
