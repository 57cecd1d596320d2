"""A load generator that doesn't wait for answers: requests are sent at random at a given rate, each with its own
deadline.

Lives here: sending, counting, timing; the outcome is one line of JSON. Must not: know models or build messages. It
shows overload, which a closed loop hides: the rate doesn't fall when the server falls behind.

Latencies and deadlines count from when a request was meant to be sent, not from when this process actually sent it: if
the server or the generator stalls, the requests that were due meanwhile have waited, too. How late sending was is
reported as `lag`: if it isn't small compared with the latencies, they are the generator's. An answer counts only if it
comes before its deadline, which gRPC sends to the server and enforces on this side.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import grpc
import uvloop

from bench.load import METHOD, Tally, open_channel, summary
from bench.stats import percentile
from paceline.scheduler.clock import MonotonicClock

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
    """When to send, in seconds from the start, ascending. At least one is after the warm-up, however few there are."""
    random, times = Random(plan.seed), [0.0]
    while times[-1] < plan.warmup_s + plan.seconds:
        times.append(times[-1] + random.expovariate(plan.per_s))
    counted = [at_s for at_s in times[1:-1] if at_s >= plan.warmup_s]
    return times[1:-1] if counted else times[1:]


async def drive(plan: Plan) -> dict[str, Any]:
    """Send every request at its time; sum up those after the warm-up. Ends one deadline after the last, at the
    latest."""
    channel = open_channel(plan.target)
    try:
        await asyncio.wait_for(channel.channel_ready(), 30)
        sender = _Sender(channel, plan)
        began_ns, cpu_s = time.monotonic_ns(), time.process_time()
        await sender.send_all()
        cores = 1e9 * (time.process_time() - cpu_s) / (time.monotonic_ns() - began_ns)
    finally:
        await channel.close(None)
    return {
        **summary(sender.tally, plan.seconds),
        "latencies_ms": [taken_ns / 1e6 for taken_ns in sender.tally.latencies_ns],
        "offered": len(sender.lags_ns),
        "lag_p99_ms": percentile(sorted(sender.lags_ns), 99) / 1e6 if sender.lags_ns else 0.0,
        "refused_p50_ms": _percentile_ms(sender.tally.refused_ns, 50),
        "refused_p99_ms": _percentile_ms(sender.tally.refused_ns, 99),
        "until_last_s": max(plan.seconds, (sender.last_ns - began_ns) / 1e9 - plan.warmup_s),
        "cores": cores,
        "answers_in_all": sender.answers_in_all,
    }


def _percentile_ms(times_ns: Sequence[int], percent: float) -> float | None:
    return percentile(sorted(times_ns), percent) / 1e6 if times_ns else None


class _Sender:
    """Sends to its schedule. An alarm of the clock wakes it, because the event loop's timers round to milliseconds."""

    def __init__(self, channel: grpc.aio.Channel, plan: Plan) -> None:
        self._call: Any = channel.unary_unary(METHOD, None, None)
        self._plan = plan
        self._deadline_ns = round(plan.deadline_s * 1e9)
        self._tasks: set[asyncio.Task[None]] = set()
        self.tally = Tally()
        self.lags_ns: list[int] = []
        self.answers_in_all = self.last_ns = 0

    async def send_all(self) -> None:
        """Returns when all are answered or past their deadlines."""
        rang = asyncio.Event()
        alarm = MonotonicClock().alarm(rang.set)
        began_ns = time.monotonic_ns()
        try:
            for number, at_s in enumerate(schedule_s(self._plan)):
                meant_ns = began_ns + round(at_s * 1e9)
                if time.monotonic_ns() < meant_ns:
                    rang.clear()
                    alarm.set(meant_ns)
                    await rang.wait()
                self._send(number, meant_ns, at_s >= self._plan.warmup_s)
        finally:
            alarm.close()
        while self._tasks:
            await asyncio.wait(self._tasks)

    def _send(self, number: int, meant_ns: int, counts: bool) -> None:
        if counts:
            self.lags_ns.append(time.monotonic_ns() - meant_ns)
        payload = self._plan.payloads[number % len(self._plan.payloads)]
        task = asyncio.create_task(self._ask(payload, meant_ns, self.tally if counts else Tally()))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _ask(self, payload: bytes, meant_ns: int, tally: Tally) -> None:
        left_s = (meant_ns + self._deadline_ns - time.monotonic_ns()) / 1e9
        try:
            answer = await self._call(payload, timeout=max(0.0, left_s))
        except grpc.aio.AioRpcError as error:
            tally.errors[error.code().name] += 1
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                tally.refused_ns.append(time.monotonic_ns() - meant_ns)
            return
        self.last_ns = time.monotonic_ns()
        taken_ns = self.last_ns - meant_ns
        self.answers_in_all += 1
        if not answer:
            tally.errors["EMPTY"] += 1
        elif taken_ns > self._deadline_ns:
            tally.errors["LATE"] += 1
        else:
            tally.latencies_ns.append(taken_ns)


def _asked(arguments: Sequence[str] | None) -> tuple[Plan, bool, bool]:
    """What to do, whether to wait for a line on stdin first, and whether to print each latency."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.open_loop", description="Poisson load; prints one JSON line."
    )
    parser.add_argument("target", help="HOST:PORT of a server")
    parser.add_argument("payloads", nargs="+", type=Path, help="files, each with a serialized ModelInferRequest")
    parser.add_argument("--rate", type=float, required=True, help="requests per second")
    parser.add_argument("--deadline", type=float, required=True, help="seconds within which each must be answered")
    parser.add_argument("--seconds", type=float, default=3.0, help="how long to measure (default: %(default)s)")
    parser.add_argument("--warmup", type=float, default=0.5, help="seconds before, not counted (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="for the send times (default: %(default)s)")
    parser.add_argument("--wait", action="store_true", help="print {} when ready, start at the first line of stdin")
    parser.add_argument("--each", action="store_true", help="print each latency, too")
    got = parser.parse_args(arguments)
    payloads = tuple(path.read_bytes() for path in got.payloads)
    plan = Plan(got.target, payloads, got.rate, got.deadline, got.seconds, got.warmup, got.seed)
    return plan, got.wait, got.each


def main(arguments: Sequence[str] | None = None) -> None:
    plan, waits, each = _asked(arguments)
    if waits:
        print("{}", flush=True)
        if not sys.stdin.readline():
            return  # whoever was to tell it to begin has given up
    found = uvloop.run(drive(plan))
    if not each:
        del found["latencies_ms"]
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
