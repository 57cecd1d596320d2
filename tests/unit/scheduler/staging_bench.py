"""A batcher that hands batches over shortly before executions end, as their lengths are known.

Lives here: what the tests of handing over start from. Must not: assertions about behaviour.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from paceline.scheduler.failures import Blame
from paceline.scheduler.policy import BatchPolicy, QueuePolicy
from paceline.scheduler.waiting import SharedQueueLimits
from tests.unit.scheduler.workbench import Bench, NeverWaits, one_turn

__all__ = ["DUE_NS", "LONG_NS", "MS", "Counted", "StagingBench"]

MS = 1_000_000
LONG_NS = 20 * MS
DUE_NS = 18 * MS
"""An execution of 20 ms counts as about to end in its last 2 ms."""


class Highest(SharedQueueLimits):
    """Knows the most requests that it ever had, if only for a moment: other threads may read it at any time."""

    highest = 0

    def __setattr__(self, name: str, value: int) -> None:
        super().__setattr__(name, value)
        if name == "requests":
            super().__setattr__("highest", max(value, self.highest))


class StagingBench(Bench):
    """Batches of one or two rows are known to take 20 ms, once it has learned."""

    def __init__(
        self, instances: int = 1, blame: Blame = Blame.REQUESTS, limit_ns: int = 0, levels: int = 0, **more: Any
    ) -> None:
        self.events: list[tuple[str, Any]] = []
        self.shared_limits = Highest(max_requests=4, max_bytes=0)
        policy = BatchPolicy(
            max_batch_rows=2,
            priority_levels=levels,
            default_priority_level=levels,
            execution_limit_ns=limit_ns,
            queue=QueuePolicy(allow_timeout_override=True),
        )
        super().__init__(
            policy,
            instances,
            stages=True,
            blames=lambda error: blame,
            replacer=self,
            shared_limits=self.shared_limits,
            **more,
        )

    def on_hang(self, runner: Any, others: Sequence[Any]) -> None:
        self.events.append(("hang", runner))

    def on_loss(self, runner: Any, error: BaseException) -> None:
        self.events.append(("loss", runner))

    def on_return(self, runner: Any) -> None:
        self.events.append(("return", runner))

    async def learn(self) -> None:
        for payloads in (["a"], ["a", "b"]) * 3:
            futures = await self.submit(*payloads)
            self.clock.advance(LONG_NS)
            self.runner.finish(str.upper)
            await asyncio.gather(*futures)
        await one_turn()
        self.runner.batches.clear()


class Counted(NeverWaits):
    """Counts the requests that execute, and how often it is asked how long to wait for more."""

    executing = asked = 0

    def __init__(self) -> None:
        super().__init__()
        self.alone = False

    def forget(self, now_ns: int) -> None:
        pass

    def patience_ns(self, waiting: int, waited_ns: int) -> int:
        self.asked += 1
        return super().patience_ns(waiting, waited_ns)

    def on_start(self, requests: int, waiting: int, now_ns: int, busy_ns: int) -> None:
        self.executing += requests

    def on_end(self, requests: int, now_ns: int) -> None:
        self.executing -= requests
