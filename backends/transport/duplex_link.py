"""The connection to another process whose ends don't take turns.

Lives here: a `BlockingLink` on which any thread sends at any time, while one receives. Must not: know what is said. The
rule: whoever receives never waits for whoever sends, on either end, or both could wait for ever.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from threading import Lock

from paceline.backends.spec import Array
from paceline.backends.transport.blocking_link import BlockingLink
from paceline.backends.transport.memory import SharedRegion
from paceline.backends.transport.parcel import Message, Parcel


class DuplexLink(BlockingLink):
    """One end. `receive` and `receive_all` are for one thread, all else for any."""

    def __init__(self, end: socket.socket, own: SharedRegion, other: int) -> None:
        super().__init__(end, own, other)
        # Two locks: one is held while the other end may have to read, the other never.
        self._memory, self._sending = Lock(), Lock()

    def pack(self, arrays: Sequence[Array]) -> Parcel:
        with self._memory:
            return super().pack(arrays)

    def unsent(self, parcel: Parcel) -> None:
        """What was packed won't be sent."""
        start, size_bytes, _ = parcel
        if size_bytes:
            self._free([start])

    def send(self, kind: int, *content: object) -> bool:
        with self._sending:
            return super().send(kind, *content)

    def receive_all(self) -> list[Message] | None:
        """All messages that have come, at least one; None once the other end is gone. Blocks."""
        first = self.receive()
        if first is None:
            return None
        others = [(kind, *content) for kind, _, *content in self._unreceived]
        self._unreceived.clear()
        return [first, *others]

    def close(self) -> None:
        with self._sending:
            super().close()

    def _free(self, places: Sequence[int]) -> None:
        with self._memory:
            super()._free(places)
