"""A batcher whose instances finish and whose clock moves only when a test says so: what most tests here start from."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from paceline.scheduler.batch_queue import BatchQueue
from paceline.scheduler.batcher import Batcher
from paceline.scheduler.failures import Blame
from paceline.scheduler.policy import BatchPolicy
from paceline.scheduler.request import AnyRequest, Request
from paceline.scheduler.testing import ManualClock, RecordingObserver, StepRunner
from paceline.scheduler.turns import ArrivalModel

__all__ = ["Bench", "LossBench", "NeverWaits", "crowd", "nothing_to_collect", "one_turn", "push", "submit"]

P = TypeVar("P")
R = TypeVar("R")

_BLAMES = {
    MemoryError: Blame.SIZE,
    OSError: Blame.INSTANCE,
    EOFError: Blame.INSTANCE_BEFORE,
    ChildProcessError: Blame.FATAL,
    ValueError: Blame.REQUESTS,
}


class NeverWaits(ArrivalModel):
    """Never waits for more requests, as that takes time, which moves only when a test says so."""

    def patience_ns(self, waiting: int, waited_ns: int) -> int:
        return 0


def crowd(requests: int, cost_ns: int, batches: int = 100) -> ArrivalModel:
    """Arrivals after `batches` batches of `requests` requests, each of which cost the event loop `cost_ns`."""
    arrivals = ArrivalModel()
    for number in range(batches):
        arrivals.on_start(requests, 0, 0, number * requests * cost_ns)
        arrivals.on_end(requests, 0)
    return arrivals


def push(queue: BatchQueue[Any], payload: Any, rows: int, key: Hashable, now_ns: int, **how: Any) -> AnyRequest:
    """A request that waits in `queue`. Raises the error if it is refused."""
    request: AnyRequest = Request(payload, rows, key, now_ns, **how)
    _check(queue.push([request]))
    return request


def submit(batcher: Batcher[P, R], payload: P, rows: int, key: Hashable, **how: Any) -> Request[P, R]:
    """A request that a batcher has taken. Raises the error if it is refused."""
    request: Request[P, R] = Request(payload, rows, key, **how)
    _check(batcher.submit([request]))
    return request


def _check(refusals: Sequence[Exception | None]) -> None:
    for refusal in refusals:
        if refusal is not None:
            raise refusal


@contextmanager
def nothing_to_collect() -> Iterator[None]:
    """Fails if reference cycles are left behind inside: only the garbage collector, which stops everything, finds
    these."""
    gc.collect()
    gc.disable()
    try:
        yield
        assert gc.collect() == 0
    finally:
        gc.enable()


class Bench:
    """A batcher and its surroundings; `more` are further arguments for the batcher."""

    def __init__(self, policy: BatchPolicy, instances: int = 1, *, stages: bool = False, **more: Any) -> None:
        self.clock = ManualClock(now_ns=1)
        self.runners = [StepRunner[str, str](self.clock, stages=stages) for _ in range(instances)]
        self.seen = RecordingObserver()
        self.batcher: Batcher[str, str] = Batcher(
            policy, self.runners, clock=self.clock, **{"observer": self.seen, "arrivals": NeverWaits(), **more}
        )
        self.batcher.start()

    @property
    def runner(self) -> StepRunner[str, str]:
        return self.runners[0]

    def put(self, *payloads: str, rows: int = 1, key: str = "k", **how: Any) -> list[Request[str, str]]:
        """Submit a request for each payload, without a turn yet."""
        return [submit(self.batcher, payload, rows, key, **how) for payload in payloads]

    async def submit(self, *payloads: str, **how: Any) -> list[Request[str, str]]:
        futures = self.put(*payloads, **how)
        await one_turn()
        return futures

    async def measure(self, duration_ns: int) -> None:
        """Let the batcher learn how long one row takes."""
        for _ in range(3):
            await self.submit("x")
            self.clock.advance(duration_ns)
            self.runner.finish(str.upper)


class LossBench(Bench):
    """Errors mean what `_BLAMES` says; `lost` has the lost instances reported, with their errors."""

    def __init__(self, policy: BatchPolicy, instances: int = 1, **more: Any) -> None:
        self.lost: list[Any] = []
        super().__init__(policy, instances, blames=lambda error: _BLAMES[type(error)], replacer=self, **more)

    def on_hang(self, runner: Any, others: Sequence[Any]) -> None:
        raise AssertionError("nothing hangs here")

    def on_return(self, runner: Any) -> None:
        raise AssertionError("nothing hangs here")

    def on_loss(self, runner: Any, error: BaseException) -> None:
        self.lost.append((runner, error))

    async def add(self) -> StepRunner[str, str]:
        runner: StepRunner[str, str] = StepRunner(self.clock)
        self.runners.append(runner)
        self.batcher.add(runner)
        await one_turn()
        return runner


async def one_turn() -> None:
    """Let everything scheduled on the loop run, and what that schedules."""
    for _ in range(70):
        await asyncio.sleep(0)
