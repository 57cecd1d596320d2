"""Messages and tensors in transit: as bytes of a stream, and in shared memory.

Lives here: pure framing; which tensors go into the message and which into memory, and the way back. Must not: sockets,
or what the tensors are for. A message is a tuple of what `marshal` supports: None, bools, numbers, strings, bytes,
tuples and lists of these; a frame is several messages preceded by their length. Marshal takes 0.6 of pickle's time, and
both ends are the same Python.
"""

from __future__ import annotations

import marshal
import struct
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np

from paceline.backends.spec import MISSING, Array
from paceline.backends.transport.memory import ALIGNMENT, SharedRegion, Window

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


_INLINE_BYTES = 8 * 1024
"""Tensors up to this size go into the message. A place has to be found, made an array, dropped and given back, 3 us in
all, while each KiB in the message costs 0.1 us; see bench/micro.py."""

_LENGTHS = np.dtype("<u4")

Place: TypeAlias = tuple[int, int]
"""Its start in shared memory, and its size in bytes."""

Tensor: TypeAlias = tuple[str, tuple[int, ...], bytes | int | Place] | None
"""Dtype, shape, and one of: the bytes themselves, their offset from the parcel's start, or a place of their own. None
for MISSING. The bytes of an object array are the length of each element as a uint32, followed by the elements."""

Parcel: TypeAlias = tuple[int, int, tuple[Tensor, ...]]
"""Start and size of its place in shared memory, both 0 if it has none, and its tensors."""

_NOWHERE: Mapping[int, Place] = {}


# hot path: 1 us for a small tensor, 3 us and the copy for others
def pack(
    arrays: Sequence[Array],
    memory: SharedRegion,
    there: Mapping[int, Place] = _NOWHERE,
    inline_bytes: int = _INLINE_BYTES,
    shift_bytes: int = 0,
) -> Parcel | None:
    """A parcel of copies of `arrays`, of which it contains those of up to `inline_bytes`. Its place is taken until its
    start is freed. None if there is no room. Arrays whose `id` is in `there` are at that place of `memory` already, and
    aren't copied. The first one in memory begins `shift_bytes` after a multiple of ALIGNMENT, so that what is aligned
    is something in it.

    Raises TypeError or ValueError for elements of object arrays that aren't `bytes`, or have 4 GiB or more.
    """
    tensors: list[Tensor] = []
    large: list[tuple[int, Array]] = []
    size = shift_bytes
    for array in arrays:
        if array is MISSING:
            tensors.append(None)
            continue
        dtype, data = array.dtype, array
        if there and (place := there.get(id(array))) is not None:
            tensors.append((dtype.str, array.shape, place))
            continue
        if dtype.hasobject:
            data = _elements(array)
        if data.nbytes <= inline_bytes:
            tensors.append((dtype.str, array.shape, data.tobytes()))
        else:
            tensors.append((dtype.str, array.shape, size))
            large.append((size, data))
            size += -(-data.nbytes // ALIGNMENT) * ALIGNMENT
    if not large:
        return 0, 0, tuple(tensors)
    start = memory.allocate(size)
    if start is None:
        return None
    for offset, data in large:
        memory.array(start + offset, data.dtype, data.shape)[...] = data
    return start, size, tuple(tensors)


# hot path: 0.5 us for a small tensor, 1.5 us for others
def unpack(parcel: Parcel, window: Window) -> tuple[Array, ...]:
    """The arrays, read-only: views of the message or of shared memory, whose place stays taken as long as any of them
    exists. Object arrays are new."""
    start, size, tensors = parcel
    place = window.place(start, size) if size else None
    return tuple(MISSING if tensor is None else _unpacked(tensor, place, window) for tensor in tensors)


def _unpacked(tensor: tuple[str, tuple[int, ...], bytes | int | Place], place: Array | None, window: Window) -> Array:
    code, shape, where = tensor
    dtype = _dtype(code)
    if isinstance(where, bytes):
        return _read_elements(where, shape) if dtype.hasobject else np.ndarray(shape, dtype, where)
    if isinstance(where, tuple):
        return np.ndarray(shape, dtype, window.place(*where))
    assert place is not None
    if dtype.hasobject:
        return _read_elements(place.data[where:], shape)
    return np.ndarray(shape, dtype, place, where)


@cache
def _dtype(code: str) -> np.dtype[Any]:
    return np.dtype(code)


def _elements(array: Array) -> Array:
    """The bytes that represent an object array."""
    elements = array.ravel().tolist()
    lengths = list(map(len, elements))
    if lengths and max(lengths) >= 2**32:
        raise ValueError(f"expected elements of less than 4 GiB, got {max(lengths)} bytes")
    data = b"".join((np.array(lengths, _LENGTHS).tobytes(), *elements))
    return np.frombuffer(data, np.uint8)


def _read_elements(data: bytes | memoryview, shape: tuple[int, ...]) -> Array:
    array: Array = np.empty(shape, object)
    head = array.size * _LENGTHS.itemsize
    ends = list(accumulate(np.frombuffer(data, _LENGTHS, array.size).tolist(), initial=head))
    flat = array.reshape(-1)
    for number in range(array.size):
        flat[number] = bytes(data[ends[number] : ends[number + 1]])
    return array
