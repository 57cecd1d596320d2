"""Parsing messages where memory may be short.

Lives here: telling a message that is faulty from one that there is no room for. Must not: know any message. The rule:
what lacks memory raises MemoryError, as it does everywhere else in Python. protobuf calls a valid message faulty then,
and the process ends if it finds no room for bytes to add to a message or for what it writes: whoever does that with
large ones looks for room beforehand.
"""

from __future__ import annotations

from typing import Final, TypeVar

import numpy as np
from google.protobuf.message import DecodeError, Message

__all__ = ["ensure_room", "parse"]

MessageT = TypeVar("MessageT", bound=Message)

_MOST_PARSED: Final = 16
"""How much a message takes once parsed, by its bytes: a packed integer of one byte takes eight, and an array that grows
leaves its smaller predecessors behind."""


def parse(kind: type[MessageT], data: bytes) -> MessageT:
    """The message in `data`. Raises DecodeError if it is no such message, MemoryError if there is no room for it."""
    try:
        return kind.FromString(data)
    except DecodeError:
        ensure_room(_MOST_PARSED * len(data))
        raise


def ensure_room(size_bytes: int) -> None:
    """Raise MemoryError if the address space has no room for so many bytes. Takes no memory."""
    try:
        np.empty(size_bytes, np.uint8)
    except MemoryError:
        raise MemoryError(f"no room for {size_bytes} bytes") from None
