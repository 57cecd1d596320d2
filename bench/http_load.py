"""A closed loop over HTTP, for rivals that have no gRPC: `python -m bench.http_load TARGET FILE …` prints JSON.

Lives here: asking once, and clients that each send their next request when they have the answer to the last, on a
connection of their own that stays open. Must not: start servers, read their counters. A request is a row's bytes, and
so is an answer, which is compared with the length of the first. It is one process of Python with asyncio, as the load
over gRPC is, and cheaper: there is no HTTP/2.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.stats import percentile

__all__ = ["PATH", "ask", "load"]

PATH = "/predict"
_TYPE = {"Content-Type": "application/octet-stream"}
_ASK_S = 60.0
_LENGTH = b"content-length:"


def ask(target: str, body: bytes) -> tuple[int, bytes]:
    """The status and the body of one answer. Raises OSError or http.client.HTTPException without one."""
    host, _, port = target.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=_ASK_S)
    try:
        connection.request("POST", PATH, body, _TYPE)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


class _Client(asyncio.Protocol):
    """One client; `ended` gets the time that each answer came, and its latency, in seconds. The first answer that isn't
    as expected fails `over`."""

    def __init__(self, request: bytes, output_bytes: int, ended: list[tuple[float, float]], over: Any) -> None:
        self._request, self._output_bytes = request, output_bytes
        self._ended, self._over = ended, over
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport
        self._send()

    def connection_lost(self, error: Exception | None) -> None:
        self._fail(f"the server closed the connection: {error or self._received[:200]!r}")

    def data_received(self, data: bytes) -> None:
        # hot path: an answer comes in one or two pieces
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        if not end:
            return
        if not head.startswith(b"HTTP/1.1 200 ") or _LENGTH not in head.lower():
            self._fail(f"expected 200 with a length, got {head!r}")
            return
        length = int(head.lower().partition(_LENGTH)[2].split(b"\r\n", 1)[0])
        if len(body) < length:
            return
        if len(body) != self._output_bytes:
            self._fail(f"expected {self._output_bytes} bytes, got {len(body)}")
            return
        now_s = time.perf_counter()
        self._ended.append((now_s, now_s - self._sent_s))
        self._received = b""
        self._send()

    def _send(self) -> None:
        self._sent_s = time.perf_counter()
        self._transport.write(self._request)

    def _fail(self, reason: str) -> None:
        if not self._over.done():
            self._over.set_exception(ConnectionError(reason))


async def load(target: str, body: bytes, clients: int, seconds: float, warmup_s: float) -> dict[str, Any]:
    """What `clients` that send `body` get out of a server. Raises ConnectionError for any answer but a right one."""
    host, _, port = target.rpartition(":")
    status, output = await asyncio.to_thread(ask, target, body)
    if status != http.client.OK:
        raise ConnectionError(f"expected 200, got {status}: {output[:200]!r}")
    lines = [f"POST {PATH} HTTP/1.1", f"Host: {target}", *(f"{key}: {value}" for key, value in _TYPE.items())]
    request = "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body
    loop = asyncio.get_running_loop()
    ended: list[tuple[float, float]] = []
    over: asyncio.Future[None] = loop.create_future()
    begin_s, used_s = time.perf_counter() + warmup_s, time.process_time()
    connections = []
    try:
        for _ in range(clients):
            made = await loop.create_connection(lambda: _Client(request, len(output), ended, over), host, int(port))
            connections.append(made[0])
        await asyncio.wait([over], timeout=begin_s + seconds - time.perf_counter())
        if over.done():
            over.result()
    finally:
        over.cancel()
        for connection in connections:
            connection.abort()
        await asyncio.sleep(0)  # in which the sockets are closed
    cores = (time.process_time() - used_s) / (seconds + warmup_s)
    latencies = sorted(latency_s for at_s, latency_s in ended if begin_s <= at_s < begin_s + seconds)
    if not latencies:
        raise ConnectionError(f"no answer within {seconds:g} s")
    return {
        "requests_per_s": len(latencies) / seconds,
        **{f"p{percent}_ms": 1_000 * percentile(latencies, percent) for percent in (50, 90, 99)},
        "cores": cores,
        "answers": len(ended) + 1,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.http_load", description=__doc__.partition("\n")[0])
    parser.add_argument("target")
    parser.add_argument("file", type=Path, help="with the body of each request")
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--warmup", type=float, default=0.5, help="seconds that don't count (default: %(default)s)")
    got = parser.parse_args(arguments)
    found = load(got.target, got.file.read_bytes(), got.clients, got.seconds, got.warmup)
    print(json.dumps(asyncio.run(found)), flush=True)


if __name__ == "__main__":
    main()
