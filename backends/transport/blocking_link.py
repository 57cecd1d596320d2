"""The connection to another process for threads that block.

Lives here: `link` without an event loop, for a thread that asks and gets an answer: a loop in between would cost two
more wake-ups of threads per question. Must not: know what is said. The rules: places that aren't needed any more are
reported with the next message, and no message is sent just for that; where the ends don't take turns, whoever receives
never waits for whoever sends, on either end, or both could wait for ever.
"""

from __future__ import annotations

import math
import socket
import sys
from collections import deque
from collections.abc import Sequence
from threading import Lock
from typing import Any

import numpy as np

from paceline.backends.spec import Array
from paceline.backends.transport.link import End
from paceline.backends.transport.memory import SharedRegion
from paceline.backends.transport.parcel import Message, Parcel, Place, frame, pack, unpack

_RECEIVE_BYTES = 256 * 1024
_MIN_BUFFER_BYTES = 128 * 1024
"""A place of its own for an array costs both ends some 10 us more than a part of another place does; copying this much
takes as long."""


class BlockingLink(End):
    """One end. `receive` and `receive_all` are for one thread, buffers for the one that packs what is in them; all else
    is for any."""

    def __init__(self, end: socket.socket, own: SharedRegion, other: int) -> None:
        super().__init__(end, own, other)
        self._buffers: dict[int, tuple[Array, Place]] = {}
        self._gone: deque[int] = deque()
        gone = self._gone

        def on_gone(start: int, *_: int) -> None:
            gone.append(start)  # atomic; a bound method would make a cycle of this and the window

        self._window.gone = on_gone
        # Two locks: one is held while the other end may have to read, the other never.
        self._memory, self._sending = Lock(), Lock()
        # Of those that came together.
        self._unreceived: deque[Message] = deque()
        self.unread = False
        """Whether the other end, now gone, left something unread that it was sent."""

    def buffer(self, number: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array | None:
        """An array with arbitrary contents, for one of those packed next. It then isn't copied, and belongs to the
        other end from then on. Another one for the same `number` replaces it. None if copying costs less, or there is
        no room."""
        if (before := self._buffers.pop(number, None)) is not None:
            self._free((before[1][0],))
        size = math.prod(shape) * dtype.itemsize
        if dtype.hasobject or size < _MIN_BUFFER_BYTES:
            return None
        with self._memory:
            start = self._own.allocate(size)
        if start is None:
            return None
        array = self._own.array(start, dtype, shape)
        self._buffers[number] = array, (start, size)
        return array

    def pack(self, arrays: Sequence[Array]) -> Parcel:
        """Copy `arrays` to where the other end finds them: into the message if memory has no room. The parcel must be
        given to `send`, or be `unsent`.

        Raises TypeError or ValueError for elements of object arrays that aren't `bytes`.
        """
        there = self._places_of(arrays) if self._buffers else {}
        parcel = None
        with self._memory:
            try:
                parcel = pack(arrays, self._own, there)
                whole = parcel or pack(arrays, self._own, inline_bytes=sys.maxsize)
                assert whole is not None
                return whole
            finally:
                if parcel is None:
                    for start, _ in there.values():
                        self._own.free(start)

    def unsent(self, parcel: Parcel) -> None:
        """What was packed won't be sent."""
        if parcel[1]:
            self._free((parcel[0],))

    def _places_of(self, arrays: Sequence[Array]) -> dict[int, Place]:
        """The places of those of `arrays` that are in buffers, by their ids. All other buffers are freed."""
        wanted, there = set(map(id, arrays)), {}
        for array, place in self._buffers.values():
            if id(array) in wanted:
                there[id(array)] = place
            else:
                self._free((place[0],))
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

    def send(self, kind: int, *content: Any, parcel: Parcel | None = None) -> bool:
        """Send the message, with the places to give back. Blocks. False if the other end is gone and will never get all
        of it.

        Raises ValueError for what a message can't hold; then `parcel`, which is in it, is `unsent`.
        """
        with self._sending:
            gone = []
            while self._gone:
                gone.append(self._gone.popleft())
            try:
                data = frame([(kind, gone, *content)])
            except ValueError:
                self._gone.extend(gone)
                if parcel is not None:
                    self.unsent(parcel)
                raise
            try:
                self._socket.sendall(data)
            except OSError:
                return False
            return True

    def receive(self) -> Message | None:
        """The next message: its kind and content; None once the other end is gone. Blocks."""
        if not self._unreceived:
            self._unreceived.extend(self.receive_all() or ())
        return self._unreceived.popleft() if self._unreceived else None

    def receive_all(self) -> list[Message] | None:
        """All messages that have come, at least one; None once the other end is gone. The places that they give back
        are free then. Blocks."""
        messages = [*self._unreceived]
        self._unreceived.clear()
        while not messages:
            try:
                data = self._socket.recv(_RECEIVE_BYTES)
            except OSError as error:
                # What Linux reports if something was left unread, see unix_release_sock in net/unix/af_unix.c.
                self.unread = isinstance(error, ConnectionResetError)
                return None
            if not data:
                return None
            for kind, gone, *content in self._reader.feed(data):
                self._free(gone)
                messages.append((kind, *content))
        return messages

    def _free(self, places: Sequence[int]) -> None:
        if places:
            with self._memory:
                for start in places:
                    self._own.free(start)

    def hang_up(self) -> None:
        """Make `receive` return, on whichever thread it waits. Repeated, or after `close`, it does nothing."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        """Nobody may be receiving. Memory stays as long as arrays over it do."""
        with self._sending:
            self._socket.close()
        self._window.forget()
