"""The cost of handing requests to the engine rather than directly to the batcher.

Both ends are in one process, without gRPC.

Lives here: bursts of ready-made bytes through `server.requests.inference` and through `server.fronts`. Must not: gRPC
or processes (`bench.frontends`). It measures the processor time of the whole process, and so of both ends, from the
bytes of the request to the bytes of the response.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bench.stats import spread
from paceline.backends import registry
from paceline.backends.transport.link import Link
from paceline.clients.messages import infer_request
from paceline.scheduler.answering import notify
from paceline.scheduler.policy import NEVER
from paceline.server.call_facts import NO_PASSED_HEADERS
from paceline.server.codec.wire_request import AnyMessage, RequestReader
from paceline.server.fronts.inference import FrontInference, Replies
from paceline.server.fronts.session import FrontSession
from paceline.server.models.layout import Layout
from paceline.server.models.load_queue import LoadQueue
from paceline.server.models.repository import Repository
from paceline.server.requests.in_flight import InferenceSteps, InFlight
from paceline.server.requests.inference import Inference
from paceline.server.rpc.handlers import serialized
from paceline.server.telemetry.metrics import Metrics
from paceline.server.tuning import new_loop
from tests.harness import write_identity

__all__ = ["main"]

_FLOATS = (16, 150_000)
_BURSTS = (1, 8, 32)


class _Request(InFlight):
    """One request of a burst, which is over when all of its requests are done."""

    def __init__(self, over: asyncio.Future[None], left: list[int], request: AnyMessage) -> None:
        super().__init__(request, NEVER, None, NO_PASSED_HEADERS)
        self._over = over
        self._left = left

    def on_failure(self, error: BaseException) -> None:
        self._over.set_exception(error)

    def on_done(self) -> None:
        self._left[0] -= 1
        if not self._left[0] and not self._over.done():
            self._over.set_result(None)


async def _burst(through: InferenceSteps, read: RequestReader, data: bytes, size: int) -> None:
    over, left = asyncio.get_running_loop().create_future(), [size]
    flights = []
    for _ in range(size):
        request = read(data)
        assert isinstance(request, AnyMessage)
        flights.append(_Request(over, left, request))
        through.announce(flights[-1])
    await over
    for flight in flights:
        if flight.answer is None:
            through.finish(flight)
        assert flight.answer is not None
        serialized(flight.answer)


async def _cpu_us(through: InferenceSteps, data: bytes, size: int, seconds: float) -> float:
    """Microseconds of processor time per request, in the median burst."""
    read = RequestReader()
    read(data)
    for _ in range(20):
        await _burst(through, read, data, size)
    samples: list[float] = []
    until_s = time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        began_s = time.process_time()
        await _burst(through, read, data, size)
        samples.append((time.process_time() - began_s) * 1e6 / size)
    return spread(samples).median


async def _measure(folder: Path, seconds: float) -> list[tuple[int, int, float, float]]:
    """Floats per tensor, requests per burst, CPU us per request without and with handing over."""
    layout = Layout((folder,), "")
    layout.open(may_be_empty=False)
    repository = Repository(Metrics(), LoadQueue(registry.backend))
    await repository.load_all(layout.models())
    inference = Inference(repository)
    inference.serving = True
    here, remote = Link.pair(2**28)
    there = Link.join(remote)
    replies = Replies(there)
    FrontSession(here, inference, repository, {}, lambda port, why: None, lambda: None, RequestReader()).start()
    there.start(lambda messages: notify([one for one in map(replies.on_message, messages) if one]), lambda: None)
    front = FrontInference(replies)
    rows = []
    for floats in _FLOATS:
        data = infer_request(f"m{floats}", {"INPUT0": np.ones((1, floats), np.float32)}).SerializeToString()
        for size in _BURSTS:
            without, with_it = [await _cpu_us(one, data, size, seconds) for one in (inference, front)]
            rows.append((floats, size, without, with_it))
    here.close()
    there.close()
    await repository.stop()
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.handover", description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=1.0, help="per measurement (default: %(default)s)")
    got = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="paceline-bench-") as folder:
        for floats in _FLOATS:
            write_identity(Path(folder), f"m{floats}", dims=f"[ {floats} ]", rows=64)
        with asyncio.Runner(loop_factory=new_loop) as runner:
            rows = runner.run(_measure(Path(folder), got.seconds))
    print("| tensor, bytes | requests at a time | CPU us/request | handed over | more |\n|---|---|---|---|---|")
    for floats, size, without, with_it in rows:
        print(f"| {4 * floats} | {size} | {without:.0f} | {with_it:.0f} | {with_it - without:.0f} |")


if __name__ == "__main__":
    main()
