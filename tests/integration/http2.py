"""Calls written by hand, frame by frame, to send what no client would.

Lives here: the little of HTTP/2 that this takes, by RFC 9113 and gRPC's mapping onto it. Must not: understand answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import MappingProxyType

__all__ = ["begun_calls", "call_by_hand", "call_frames", "calls_unread", "frames_until_the_end", "pings_answered"]

_DATA, _HEADERS, _SETTINGS, _PING = 0, 1, 4, 6
_END_STREAM, _END_HEADERS, _ACK = 1, 4, 1
_INITIAL_WINDOW_SIZE = 4


def call_frames(data: bytes, headers: Mapping[str, str] = MappingProxyType({}), *, compressed: bool = False) -> bytes:
    """All that a client sends to call ModelInfer with one message of `data` and additional `headers`."""
    message = bytes([compressed]) + len(data).to_bytes(4, "big") + data
    return _PREFACE + _headers(1, headers) + _frame(_DATA, _END_STREAM, 1, message)


def begun_calls(number: int) -> bytes:
    """What a client sends to begin `number` calls of ModelInfer, without any of their messages."""
    acknowledged = _frame(_SETTINGS, 1, 0, b"")
    return _PREFACE + acknowledged + b"".join(_headers(1 + 2 * one, {}) for one in range(number))


def calls_unread(number: int, data: bytes) -> bytes:
    """What a client sends to call ModelInfer `number` times with `data` without ever receiving the messages of the
    answers: it has no window for them."""
    message = b"\x00" + len(data).to_bytes(4, "big") + data
    window = _frame(_SETTINGS, 0, 0, _INITIAL_WINDOW_SIZE.to_bytes(2, "big") + bytes(4))
    streams = range(1, 2 * number, 2)
    calls = (_headers(one, {}) + _frame(_DATA, _END_STREAM, one, message) for one in streams)
    return _PREFACE + window + _frame(_SETTINGS, 1, 0, b"") + b"".join(calls)


async def call_by_hand(port: int, data: bytes, headers: Mapping[str, str], *, compressed: bool = False) -> bytes:
    """Make the call and return all bytes received up to trailers or a reset."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(call_frames(data, headers, compressed=compressed))
    received = b""
    while not any(said in received for said in (b"grpc-status", b"\x00\x00\x04\x03")):
        more = await asyncio.wait_for(reader.read(4096), 10)
        assert more, f"the connection ended after {received!r}"
        received += more
    writer.close()
    return received


async def frames_until_the_end(port: int, *, pings: int = 0) -> list[int]:
    """Connect, send `pings` pings at once and then nothing more, and return the kinds of all frames that arrive until
    the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    kinds = []
    try:
        writer.write(_PREFACE)
        for number in range(pings):
            writer.write(_frame(_PING, 0, 0, number.to_bytes(8, "big")))
        while head := await asyncio.wait_for(reader.read(1), 20):
            head += await reader.readexactly(8)
            await reader.readexactly(int.from_bytes(head[:3], "big"))
            kinds.append(head[3])
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
            head = b""
            while head[3:5] != bytes([_PING, _ACK]):
                head = await asyncio.wait_for(reader.readexactly(9), 20)
                await reader.readexactly(int.from_bytes(head[:3], "big"))
            answered += 1
    except (ConnectionError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()
    return answered


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
