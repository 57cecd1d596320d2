"""A batcher whose instances finish and whose clock moves only when a test says so: what most tests here start from."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from paceline.scheduler.arrival_model import ArrivalModel
from paceline.scheduler.batcher import Batcher
from paceline.scheduler.isolation import Blame
from paceline.scheduler.pending import Pending
from paceline.scheduler.policy import BatchPolicy
from paceline.scheduler.testing import ManualClock, RecordingObserver, StepRunner

__all__ = ["Bench", "LossBench", "NeverWaits", "crowd", "one_turn"]

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

    def put(self, *payloads: str, rows: int = 1, key: str = "k", **how: Any) -> list[Pending[str, str]]:
        """Submit a request for each payload, without a turn yet."""
        return [self.batcher.submit(payload, rows, key, **how) for payload in payloads]

    async def submit(self, *payloads: str, **how: Any) -> list[Pending[str, str]]:
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
