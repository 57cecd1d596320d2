"""Calls written by hand, frame by frame, to send what no client would.

Lives here: the little of HTTP/2 that this takes, by RFC 9113 and gRPC's mapping onto it. Must not: understand what
frames carry.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

__all__ = [
    "begun_calls",
    "call_by_hand",
    "call_frames",
    "calls_around",
    "calls_unread",
    "frames_until_the_end",
    "next_answer",
    "next_reset",
    "pings_answered",
]

_DATA, _HEADERS, _RST_STREAM, _SETTINGS, _PING = 0, 1, 3, 4, 6
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_INITIAL_WINDOW_SIZE = 4


def call_frames(data: bytes, headers: Mapping[str, str] = MappingProxyType({}), *, compressed: bool = False) -> bytes:
    """All that a client sends to call ModelInfer with one message of `data` and additional `headers`."""
    message = bytes([compressed]) + len(data).to_bytes(4, "big") + data
    return _PREFACE + _headers(1, headers) + _frame(_DATA, _END_STREAM, 1, message)


def begun_calls(number: int, path: str = "/inference.GRPCInferenceService/ModelInfer") -> bytes:
    """What a client sends to begin `number` calls, without any of their messages."""
    acknowledged = _frame(_SETTINGS, 1, 0, b"")
    return _PREFACE + acknowledged + b"".join(_headers(1 + 2 * one, {":path": path}) for one in range(number))


def calls_around(number: int, first: str, last: str) -> bytes:
    """What a client sends to begin `number` calls without their messages, then to call `first` with an empty message,
    then to begin as many again, and then to call `last`."""
    begun = [_headers(1 + 2 * one, {}) for one in range(2 * number + 2)]
    for position, path in ((number, first), (2 * number + 1, last)):
        stream = 1 + 2 * position
        begun[position] = _headers(stream, {":path": path}) + _frame(_DATA, _END_STREAM, stream, bytes(5))
    return _PREFACE + _frame(_SETTINGS, 1, 0, b"") + b"".join(begun)


def calls_unread(number: int, data: bytes) -> bytes:
    """What a client sends to call ModelInfer `number` times with `data` without ever receiving the messages of the
    answers: it has no window for them."""
    message = b"\x00" + len(data).to_bytes(4, "big") + data
    window = _frame(_SETTINGS, 0, 0, _INITIAL_WINDOW_SIZE.to_bytes(2, "big") + bytes(4))
    streams = range(1, 2 * number, 2)
    calls = (_headers(one, {}) + _frame(_DATA, _END_STREAM, one, message) for one in streams)
    return _PREFACE + window + _frame(_SETTINGS, 1, 0, b"") + b"".join(calls)


async def call_by_hand(port: int, data: bytes, headers: Mapping[str, str], *, compressed: bool = False) -> bytes:
    """Make the call and return the payloads of all frames that answer it, up to trailers or a reset."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(call_frames(data, headers, compressed=compressed))
    answer = b""
    ended = False
    while not ended:
        frame = await asyncio.wait_for(_read_frame(reader), 20)
        # A connection's own frames, which carry random bytes, have stream 0.
        if frame.stream == 1:
            answer += frame.payload
            ended = frame.kind == _RST_STREAM or (frame.kind in (_DATA, _HEADERS) and bool(frame.flags & _END_STREAM))
    writer.close()
    return answer


async def frames_until_the_end(port: int, *, pings: int = 0) -> list[int]:
    """Connect, send `pings` pings at once and then nothing more, and return the kinds of all frames that arrive until
    the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    kinds = []
    try:
        writer.write(_PREFACE)
        for number in range(pings):
            writer.write(_frame(_PING, 0, 0, number.to_bytes(8, "big")))
        while True:
            kinds.append((await asyncio.wait_for(_read_frame(reader), 20)).kind)
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()
    return kinds


async def pings_answered(port: int, pings: int, *, calls: int) -> int:
    """Connect, begin `calls` calls, and send up to `pings` pings, each when the previous one is answered. Returns how
    many were answered before the server closed the connection, if it did."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    answered = 0
    try:
        writer.write(begun_calls(calls))
        while answered < pings:
            writer.write(_frame(_PING, 0, 0, bytes(8)))
            while True:
                frame = await asyncio.wait_for(_read_frame(reader), 20)
                if (frame.kind, frame.flags) == (_PING, _ACK):
                    break
            answered += 1
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()
    return answered


async def next_answer(reader: asyncio.StreamReader) -> int:
    """The number of the next stream that the server sends a message on; other frames are skipped."""
    while True:
        frame = await asyncio.wait_for(_read_frame(reader), 60)
        if frame.kind == _DATA:
            return frame.stream


async def next_reset(reader: asyncio.StreamReader) -> int:
    """The number of the next stream that the server resets; other frames are skipped."""
    while True:
        frame = await asyncio.wait_for(_read_frame(reader), 20)
        if frame.kind == _RST_STREAM:
            return frame.stream


class _Frame(NamedTuple):
    kind: int
    flags: int
    stream: int
    payload: bytes


async def _read_frame(reader: asyncio.StreamReader) -> _Frame:
    """Raises asyncio.IncompleteReadError if the connection ends."""
    head = await reader.readexactly(9)
    payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
    return _Frame(head[3], head[4], int.from_bytes(head[5:], "big"), payload)


def _headers(stream: int, more: Mapping[str, str]) -> bytes:
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": "/inference.GRPCInferenceService/ModelInfer",
        ":authority": "x",
        "te": "trailers",
        "content-type": "application/grpc",
        **more,
    }
    names = b"".join(b"\x00" + _text(name) + _text(value) for name, value in fields.items())
    return _frame(_HEADERS, _END_HEADERS, stream, names)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _text(value: str) -> bytes:
    return bytes([len(value)]) + value.encode()


_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0, b"")
