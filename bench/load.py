"""A closed-loop load generator: each client sends its next request when it has the answer to the last.

Lives here: sending, counting, timing; the outcome is one line of JSON. Must not: know models or build messages.
Requests come as files of serialized bytes and answers stay bytes, so that the generator takes as little of the machine
as it can: it shares the cores with what it measures. Each request is a call, or each client has a stream and sends its
requests on that.

It runs on grpc.aio over uvloop. Of what grpcio offers, one thread per client cost this side a third more CPU time per
request and got a third fewer answers out of the same echo server; futures with callbacks cost the same and got a tenth
fewer; the event loop, asyncio's own or uvloop, made no difference that stood out from the noise (64 clients, 2 cores).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import uvloop

from bench.stats import percentile

__all__ = [
    "METHOD",
    "STREAM_METHOD",
    "Plan",
    "Tally",
    "drive",
    "open_channel",
    "read_messages",
    "summary",
    "write_messages",
]

METHOD = "/inference.GRPCInferenceService/ModelInfer"
STREAM_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"
_STREAM_ERROR = b"\x0a"  # a ModelStreamInferResponse that begins with its field 1, error_message
_LAST_ANSWERS_S = 30.0
_PAUSE_AFTER_ERROR_S = 0.01
_MAX_MESSAGE_BYTES = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Plan:
    """What to send, where, by how many, for how long. Client i begins with payload i and goes round; with `own`, it
    goes round in `own[i]`."""

    target: str
    payloads: tuple[bytes, ...]
    clients: int = 64
    channels: int = 1
    seconds: float = 3.0
    warmup_s: float = 0.5
    stream: bool = False
    own: tuple[tuple[bytes, ...], ...] = ()


Ask = Callable[[bytes], Awaitable[bytes]]
"""Send a request, wait for the answer."""


@dataclass(slots=True)
class Tally:
    """What came back in one stretch of time."""

    latencies_ns: list[int] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)
    refused_ns: list[int] = field(default_factory=list)

    @property
    def answers(self) -> int:
        return len(self.latencies_ns) + self.errors.total()


class _Clients:
    """The clients, and the tally to which answers are added at present."""

    def __init__(self, stream: bool) -> None:
        self._stream = stream
        self._stopping = False
        self.tally = Tally()
        self.answered = asyncio.Event()

    def stop(self) -> None:
        self._stopping = True

    def switch(self) -> Tally:
        """Begin a new tally; returns what was counted until now."""
        counted, self.tally = self.tally, Tally()
        self.answered.clear()
        return counted

    async def run(self, ask: Ask, payloads: Sequence[bytes], first: int) -> None:
        number = first
        while not self._stopping:
            payload = payloads[number % len(payloads)]
            number += 1
            began_ns = time.perf_counter_ns()
            try:
                answer = await ask(payload)
            except grpc.aio.AioRpcError as error:
                self.tally.errors[error.code().name] += 1
                self.answered.set()
                await asyncio.sleep(_PAUSE_AFTER_ERROR_S)
                continue
            self.answered.set()
            if not answer:
                self.tally.errors["EMPTY"] += 1
            elif answer[:1] == _STREAM_ERROR and self._stream:
                self.tally.errors["STREAM"] += 1
            else:
                self.tally.latencies_ns.append(time.perf_counter_ns() - began_ns)


async def drive(plan: Plan) -> dict[str, Any]:
    """Run `plan` and sum it up. Ends by itself, whatever the server does."""
    channels = [open_channel(plan.target) for _ in range(plan.channels)]
    clients = _Clients(plan.stream)
    asks = [_asking(channels[i % len(channels)], plan.stream) for i in range(plan.clients)]
    starts = [(own, 0) for own in plan.own] or [(plan.payloads, i) for i in range(plan.clients)]
    running = [
        asyncio.create_task(clients.run(ask, *start)) for ask, start in zip(asks, starts[: plan.clients], strict=True)
    ]
    try:
        await asyncio.sleep(plan.warmup_s)
        before, began_s, cpu_s = clients.switch(), time.perf_counter(), time.process_time()
        await asyncio.sleep(plan.seconds)
        # On a machine that has other work, a short measurement may be over before the first answer.
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_ANSWERS_S):
                await clients.answered.wait()
        counted, elapsed_s, cpu_s = clients.switch(), time.perf_counter() - began_s, time.process_time() - cpu_s
        clients.stop()
        ended, late = await asyncio.wait(running, timeout=_LAST_ANSWERS_S)
        for task in ended:
            task.result()
        counted.errors.update({"UNANSWERED": len(late)} if late else {})
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for channel in channels:
            await channel.close(None)
    total = before.answers + counted.answers + clients.tally.answers
    return {**summary(counted, elapsed_s), "cores": cpu_s / elapsed_s, "answers_in_all": total}


def summary(counted: Tally, elapsed_s: float) -> dict[str, Any]:
    """Rates and percentiles of what came back within `elapsed_s`."""
    latencies_ns = sorted(counted.latencies_ns)
    times = {
        f"p{percent}_ms": percentile(latencies_ns, percent) / 1e6 if latencies_ns else None for percent in (50, 90, 99)
    }
    return {
        "ok": len(latencies_ns),
        "errors": dict(counted.errors),
        "elapsed_s": elapsed_s,
        "requests_per_s": len(latencies_ns) / elapsed_s,
        **times,
    }


def _asking(channel: grpc.aio.Channel, stream: bool) -> Ask:
    """The function by which one client asks on `channel`."""
    if not stream:
        call: Ask = channel.unary_unary(METHOD, None, None)
        return call
    open_stream: Any = channel.stream_stream(STREAM_METHOD, None, None)
    talk = open_stream()

    async def ask(payload: bytes) -> bytes:
        await talk.write(payload)
        answer = await talk.read()
        return answer if isinstance(answer, bytes) else b""  # the end of the stream isn't bytes

    return ask


def open_channel(target: str) -> grpc.aio.Channel:
    """A channel with a connection of its own: without a pool of its own, it would share the connection of the first."""
    options = [("grpc.max_receive_message_length", _MAX_MESSAGE_BYTES), ("grpc.use_local_subchannel_pool", 1)]
    return grpc.aio.insecure_channel(target, options=options)


def write_messages(path: Path, messages: Sequence[bytes]) -> Path:
    """Write a client's own payloads, each after its length; returns `path`."""
    path.write_bytes(b"".join(len(message).to_bytes(4, "little") + message for message in messages))
    return path


def read_messages(path: Path) -> tuple[bytes, ...]:
    """What `write_messages` has written."""
    data, at, messages = path.read_bytes(), 0, []
    while at < len(data):
        end = at + 4 + int.from_bytes(data[at : at + 4], "little")
        messages.append(data[at + 4 : end])
        at = end
    return tuple(messages)


def _asked(arguments: Sequence[str] | None) -> tuple[Plan, bool]:
    """What to do, and whether to wait for a line on stdin first."""
    parser = argparse.ArgumentParser(prog="python -m bench.load", description="Closed-loop load; prints one JSON line.")
    parser.add_argument("target", help="HOST:PORT of a server")
    parser.add_argument("payloads", nargs="+", type=Path, help="files, each with a serialized ModelInferRequest")
    parser.add_argument("--clients", type=int, default=64, help="requests in flight (default: %(default)s)")
    parser.add_argument("--channels", type=int, default=1, help="connections they share (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long to measure (default: %(default)s)")
    parser.add_argument("--warmup", type=float, default=0.5, help="seconds before, not counted (default: %(default)s)")
    parser.add_argument("--stream", action="store_true", help="one ModelStreamInfer per client instead of calls")
    parser.add_argument("--own", action="store_true", help="each file has all payloads of one client, in turn")
    parser.add_argument("--wait", action="store_true", help="print {} when ready, start at the first line of stdin")
    got = parser.parse_args(arguments)
    own = tuple(map(read_messages, got.payloads)) if got.own else ()
    payloads = () if own else tuple(path.read_bytes() for path in got.payloads)
    return Plan(got.target, payloads, got.clients, got.channels, got.seconds, got.warmup, got.stream, own), got.wait


def main(arguments: Sequence[str] | None = None) -> None:
    plan, waits = _asked(arguments)
    if waits:
        print("{}", flush=True)
        if not sys.stdin.readline():
            return  # whoever was to tell it to begin has given up
    print(json.dumps(uvloop.run(drive(plan))), flush=True)


if __name__ == "__main__":
    main()
