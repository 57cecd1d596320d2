"""A load generator that doesn't wait for answers: requests come at random at a given rate, each with its own deadline.

Lives here: sending, counting, timing; the outcome is one line of JSON. Must not: know models or build messages. What a
closed loop hides, an overload, this one shows: the rate doesn't fall when the server falls behind. An answer counts
only if it comes before its deadline, which gRPC carries to the server and holds on this side.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import grpc
import uvloop

from bench.load import METHOD, Tally, summary

__all__ = ["Plan", "drive", "schedule_s"]


@dataclass(frozen=True, slots=True)
class Plan:
    """`per_s` requests a second on average (Poisson, determined by `seed`), each with `deadline_s` to be answered."""

    target: str
    payloads: tuple[bytes, ...]
    per_s: float
    deadline_s: float
    seconds: float = 3.0
    warmup_s: float = 0.5
    seed: int = 0


def schedule_s(plan: Plan) -> list[float]:
    """When to send, in seconds from the start, ascending."""
    random, at_s = Random(plan.seed), 0.0
    times: list[float] = []
    while (at_s := at_s + random.expovariate(plan.per_s)) < plan.warmup_s + plan.seconds:
        times.append(at_s)
    return times


async def drive(plan: Plan) -> dict[str, Any]:
    """Send everything at its time; sum up what was sent after the warm-up. Ends one deadline after the last."""
    channel = grpc.aio.insecure_channel(plan.target)
    call = channel.unary_unary(METHOD, None, None)
    tally, offered = Tally(), 0
    tasks: set[asyncio.Task[None]] = set()
    try:
        await asyncio.wait_for(channel.channel_ready(), 30)
        began_s, cpu_s = time.perf_counter(), time.process_time()
        for number, at_s in enumerate(schedule_s(plan)):
            ahead_s = began_s + at_s - time.perf_counter()
            if ahead_s > 0:
                await asyncio.sleep(ahead_s)
            counts = at_s >= plan.warmup_s
            offered += counts
            payload = plan.payloads[number % len(plan.payloads)]
            task = asyncio.create_task(_send(call, payload, plan.deadline_s, tally if counts else Tally()))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        while tasks:
            await asyncio.wait(tasks)
        cores = (time.process_time() - cpu_s) / (time.perf_counter() - began_s)
    finally:
        await channel.close(None)
    return {**summary(tally, plan.seconds), "offered": offered, "cores": cores}


async def _send(call: Any, payload: bytes, deadline_s: float, tally: Tally) -> None:
    began_ns = time.perf_counter_ns()
    try:
        answer = await call(payload, timeout=deadline_s)
    except grpc.aio.AioRpcError as error:
        tally.errors[error.code().name] += 1
        return
    taken_ns = time.perf_counter_ns() - began_ns
    if not answer:
        tally.errors["EMPTY"] += 1
    elif taken_ns > deadline_s * 1e9:
        tally.errors["LATE"] += 1
    else:
        tally.latencies_ns.append(taken_ns)


def _plan(arguments: Sequence[str] | None) -> Plan:
    parser = argparse.ArgumentParser(
        prog="python -m bench.open_loop", description="Poisson load; prints one JSON line."
    )
    parser.add_argument("target", help="HOST:PORT of a server")
    parser.add_argument("payloads", nargs="+", type=Path, help="files, each a serialized ModelInferRequest")
    parser.add_argument("--rate", type=float, required=True, help="requests per second")
    parser.add_argument("--deadline", type=float, required=True, help="seconds that each has to be answered")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long to measure (default: %(default)s)")
    parser.add_argument("--warmup", type=float, default=0.5, help="seconds not counted before (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the times of sending (default: %(default)s)")
    got = parser.parse_args(arguments)
    payloads = tuple(path.read_bytes() for path in got.payloads)
    return Plan(got.target, payloads, got.rate, got.deadline, got.seconds, got.warmup, got.seed)


def main(arguments: Sequence[str] | None = None) -> None:
    print(json.dumps(uvloop.run(drive(_plan(arguments)))), flush=True)


if __name__ == "__main__":
    main()
