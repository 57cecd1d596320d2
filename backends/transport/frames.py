"""Messages as bytes of a stream.

Lives here: pure framing. Must not: sockets. A message is a tuple of what `marshal` supports: None, bools, numbers,
strings, bytes, tuples and lists of these; a frame is several messages preceded by their length. Marshal takes 0.6 of
pickle's time, and both ends are the same Python.
"""

from __future__ import annotations

import marshal
import struct
from typing import Any

__all__ = ["FrameReader", "Message", "frame"]

Message = tuple[Any, ...]
"""Its kind, a number, and its contents."""

_LENGTH = struct.Struct("<Q")
# Since version 3 repeated objects are written as references, which pays off for many messages.
_LONE, _SHARING = 2, 4


# hot path: 0.8 us for one message, 0.2 us for each of many
def frame(messages: list[Message]) -> bytes:
    """One frame with all of `messages`. Raises ValueError for what can't be marshalled."""
    body = marshal.dumps(messages, _LONE if len(messages) == 1 else _SHARING)
    return _LENGTH.pack(len(body)) + body


class FrameReader:
    """Reassembles messages from pieces of a stream."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._wanted = _LENGTH.size

    # hot path
    def feed(self, data: bytes) -> list[Message]:
        """The messages that `data` completes, in order."""
        rest = self._rest
        if rest or len(data) < _LENGTH.size:
            rest += data
            # A long frame comes in many pieces, and isn't parsed before all are there.
            if len(rest) < self._wanted:
                return []
            data = bytes(rest)
            rest.clear()
        messages: list[Message] = []
        at, end = 0, len(data)
        self._wanted = _LENGTH.size
        while end - at >= _LENGTH.size:
            until = at + _LENGTH.size + _LENGTH.unpack_from(data, at)[0]
            if until > end:
                self._wanted = until - at
                break
            messages += marshal.loads(memoryview(data)[at + _LENGTH.size : until])
            at = until
        rest += memoryview(data)[at:]
        return messages
