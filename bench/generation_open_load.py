"""Clients of a decoder that don't wait for each other: requests at random times at a given rate, each with a stream of
its own.

Lives here: sending, and timing tokens; the outcome is one line of JSON. Must not: build requests or look at tokens.
First tokens are timed from when a request was meant to be sent, as in `bench.open_loop`, whose times these are.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import uvloop

from bench.generation_load import tokens_in
from bench.load import STREAM_METHOD, open_channel, read_messages
from bench.open_loop import Plan, schedule_s
from bench.stats import percentile
from paceline.protos import inference_pb2 as pb

__all__ = ["drive", "main"]

_DEADLINE_S = 60.0
_FINAL = "triton_final_response"


class _Sender:
    """Sends to the times of `plan`."""

    def __init__(self, channel: grpc.aio.Channel, plan: Plan) -> None:
        self._open: Any = channel.stream_stream(STREAM_METHOD, None, pb.ModelStreamInferResponse.FromString)
        self._plan = plan
        self.lags_ns: list[int] = []
        self.first_ns: list[int] = []
        self.gaps_ns: list[float] = []
        self.errors = Counter[str]()
        self.tokens = self.answers = 0

    async def send_all(self) -> None:
        """Returns when all have their answers."""
        began_ns, tasks = time.monotonic_ns(), list[asyncio.Task[None]]()
        for number, at_s in enumerate(schedule_s(self._plan)):
            meant_ns = began_ns + round(at_s * 1e9)
            await asyncio.sleep(max(0, meant_ns - time.monotonic_ns()) / 1e9)
            payload = self._plan.payloads[number % len(self._plan.payloads)]
            tasks.append(asyncio.create_task(self._ask(payload, meant_ns, counts=at_s >= self._plan.warmup_s)))
        await asyncio.gather(*tasks)

    async def _ask(self, payload: bytes, meant_ns: int, *, counts: bool) -> None:
        lag_ns = time.monotonic_ns() - meant_ns
        times, tokens = list[tuple[int, int]](), 0
        talk = self._open(timeout=self._plan.deadline_s)
        try:
            await talk.write(payload)
            while isinstance(read := await talk.read(), pb.ModelStreamInferResponse):
                if read.error_message:
                    self.errors[read.error_message] += 1
                    break
                if new := tokens_in(read.infer_response):
                    times.append((time.monotonic_ns(), new))
                    tokens += new
                if read.infer_response.parameters[_FINAL].bool_param:
                    break
            await talk.done_writing()
        except grpc.aio.AioRpcError as error:
            self.errors[error.code().name] += 1
        if counts and times:
            self.lags_ns.append(lag_ns)
            self.first_ns.append(times[0][0] - meant_ns)
            self.tokens, self.answers = self.tokens + tokens, self.answers + 1
            for (before_ns, _), (now_ns, new) in pairwise(times):
                self.gaps_ns += [(now_ns - before_ns) / new] * new


async def drive(plan: Plan) -> dict[str, Any]:
    """Send every request at its time; what those after the warm-up have got."""
    async with open_channel(plan.target) as channel:
        await asyncio.wait_for(channel.channel_ready(), 30)
        sender, began_s = _Sender(channel, plan), time.process_time()
        await sender.send_all()
    found = {"first": sender.first_ns, "token": sender.gaps_ns, "lag": sender.lags_ns}
    return {
        "answers": sender.answers,
        "tokens": sender.tokens,
        **{
            f"{name}_p{percent}_ms": percentile(sorted(values), percent) / 1e6 if values else None
            for name, values in found.items()
            for percent in (50, 90, 99)
        },
        "cpu_s": time.process_time() - began_s,
        "errors": dict(sender.errors),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.generation_open_load", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("target", help="HOST:PORT of a server")
    parser.add_argument("requests", nargs="+", type=Path, help="files with requests, sent one after the other")
    parser.add_argument("--rate", type=float, required=True, help="requests per second")
    parser.add_argument("--seconds", type=float, default=10.0, help="how long to measure (default: %(default)s)")
    parser.add_argument("--warmup", type=float, default=2.0, help="seconds before, not counted (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="for the send times (default: %(default)s)")
    got = parser.parse_args(arguments)
    payloads = tuple(one for path in got.requests for one in read_messages(path))
    plan = Plan(got.target, payloads, got.rate, _DEADLINE_S, got.seconds, got.warmup, got.seed)
    print(json.dumps(uvloop.run(drive(plan))), flush=True)


if __name__ == "__main__":
    main()
