"""Clients of a decoder, each with a stream or, for whole answers, with calls: one asks for its next answer when it has
the last token of the one before.

Lives here: sending, counting tokens, timing them; the outcome is one line of JSON. Must not: build requests or look at
tokens. What is under way when the time is over is cancelled.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle
from math import prod
from pathlib import Path
from typing import Any

import grpc
import uvloop

from bench.generation_requests import read_messages
from bench.stats import percentile
from paceline.clients.load.sending import METHOD, STREAM_METHOD
from paceline.protos import inference_pb2 as pb

__all__ = ["drive", "main", "tokens_in"]

_FINAL = "triton_final_response"
_FIRST_ANSWER_S = 60.0


@dataclass(slots=True)
class _Tally:
    """What came in one stretch of time. `first_ns`: from asking to the first token; `gaps_ns`: from one answer with
    tokens to the next, by token."""

    tokens: int = 0
    answers: int = 0
    first_ns: list[int] = field(default_factory=list)
    gaps_ns: list[float] = field(default_factory=list)
    errors: Counter[str] = field(default_factory=Counter)


class _Clients:
    def __init__(self) -> None:
        self.tally = _Tally()
        self.heard = asyncio.Event()

    def switch(self) -> _Tally:
        """Begin a new tally; returns the old one."""
        counted, self.tally = self.tally, _Tally()
        return counted

    async def run(self, channel: grpc.aio.Channel, payloads: Sequence[bytes], is_timed: bool) -> None:
        open_stream: Any = channel.stream_stream(STREAM_METHOD, None, pb.ModelStreamInferResponse.FromString)
        talk = open_stream()
        for payload in cycle(payloads):
            await talk.write(payload)
            asked_ns, last_ns = time.perf_counter_ns(), 0
            while True:
                read = await talk.read()
                now_ns = time.perf_counter_ns()
                self.heard.set()
                if not isinstance(read, pb.ModelStreamInferResponse):
                    self.tally.errors["END"] += 1
                    return
                if read.error_message:
                    self.tally.errors[read.error_message] += 1
                    return
                if tokens := tokens_in(read.infer_response):
                    self.tally.tokens += tokens
                    if is_timed and last_ns:
                        self.tally.gaps_ns += [(now_ns - last_ns) / tokens] * tokens
                    elif is_timed:
                        self.tally.first_ns.append(now_ns - asked_ns)
                    last_ns = now_ns
                if read.infer_response.parameters[_FINAL].bool_param:
                    self.tally.answers += 1
                    break

    async def run_whole(self, channel: grpc.aio.Channel, payloads: Sequence[bytes]) -> None:
        call: Any = channel.unary_unary(METHOD, None, pb.ModelInferResponse.FromString)
        for payload in cycle(payloads):
            try:
                tokens = tokens_in(await call(payload))
            except grpc.aio.AioRpcError as error:
                self.tally.errors[error.details() or error.code().name] += 1
                return
            self.tally.tokens += tokens  # read and written at once: in one line with the wait, others' would be lost
            self.tally.answers += 1
            self.heard.set()


async def drive(
    target: str,
    payloads: Sequence[Sequence[bytes]],
    seconds: float,
    warmup_s: float,
    untimed: int = 0,
    *,
    whole: bool = False,
) -> dict[str, Any]:
    """A client for each of these sequences of requests, in which it goes round; what came back within `seconds`. Times
    are those of all but the last `untimed` clients; there are none of `whole` answers."""
    clients = _Clients()
    options = [("grpc.max_receive_message_length", -1)]
    async with grpc.aio.insecure_channel(target, options=options) as channel:
        running = [
            asyncio.create_task(
                clients.run_whole(channel, own)
                if whole
                else clients.run(channel, own, number < len(payloads) - untimed)
            )
            for number, own in enumerate(payloads)
        ]
        try:
            async with asyncio.timeout(_FIRST_ANSWER_S):
                await clients.heard.wait()
            await asyncio.sleep(warmup_s)
            before, began_s, cpu_s = clients.switch(), time.perf_counter(), time.process_time()
            await asyncio.sleep(seconds)
            counted, elapsed_s, cpu_s = clients.switch(), time.perf_counter() - began_s, time.process_time() - cpu_s
        finally:
            for task in running:
                task.cancel()
            ended = await asyncio.gather(*running, return_exceptions=True)
    errors = before.errors + counted.errors
    errors.update(repr(one) for one in ended if isinstance(one, Exception))
    found = {"first": sorted(counted.first_ns), "token": sorted(counted.gaps_ns)}
    return {
        "tokens_per_s": counted.tokens / elapsed_s,
        "answers_per_s": counted.answers / elapsed_s,
        **{
            f"{name}_p{percent}_ms": percentile(values, percent) / 1e6 if values else None
            for name, values in found.items()
            for percent in (50, 90, 99)
        },
        "tokens_in_all": before.tokens + counted.tokens,
        "cores": cpu_s / elapsed_s,
        "errors": dict(errors),
    }


def tokens_in(response: pb.ModelInferResponse) -> int:
    return sum(prod(one.shape) for one in response.outputs if one.name == "output_ids")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.generation_load", description=__doc__.partition("\n")[0])
    parser.add_argument("target", help="HOST:PORT of a server")
    parser.add_argument("requests", nargs="+", type=Path, help="files, each with all requests of one client, in turn")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long to measure (default: %(default)s)")
    parser.add_argument("--warmup", type=float, default=2.0, help="seconds before, not counted (default: %(default)s)")
    parser.add_argument("--untimed", type=int, default=0, help="so many clients, the last, aren't timed")
    parser.add_argument("--whole", action="store_true", help="ask for whole answers")
    got = parser.parse_args(arguments)
    payloads = [read_messages(path) for path in got.requests]
    drives = drive(got.target, payloads, got.seconds, got.warmup, got.untimed, whole=got.whole)
    print(json.dumps(uvloop.run(drives)), flush=True)


if __name__ == "__main__":
    main()
