"""Every request is counted once: answered, failed or dropped, whatever becomes of its batch."""

from __future__ import annotations

import asyncio

import pytest

from scheduler.batcher import Batcher, Pending
from scheduler.observer import Drop
from scheduler.policy import BatchPolicy
from scheduler.testing import ManualClock, RecordingObserver, StepRunner


class Bench:
    def __init__(self, policy: BatchPolicy) -> None:
        self.clock = ManualClock(now_ns=1)
        self.runner: StepRunner[str, str] = StepRunner(self.clock)
        self.seen = RecordingObserver()
        self.batcher: Batcher[str, str] = Batcher(policy, [self.runner], clock=self.clock, observer=self.seen)
        self.batcher.start()

    async def submit(self, *payloads: str) -> list[Pending[str, str]]:
        futures = [self.batcher.submit(payload, 1, "k") for payload in payloads]
        await several_turns()
        return futures

    @property
    def counted(self) -> int:
        reports = self.seen.reports
        answered = sum(len(report.waits_ns) for report in reports if report.error is None)
        return answered + sum(report.failed for report in reports) + len(self.seen.drops)


async def several_turns() -> None:
    for _ in range(70):
        await asyncio.sleep(0)


@pytest.mark.parametrize("gone", [0, 1, 2, 3])
async def test_counters_with_a_request_cancelled_in_a_failing_batch_still_add_up(gone: int) -> None:
    bench = Bench(BatchPolicy(max_batch_rows=4))
    futures = await bench.submit("a", "b", "c", "d")
    futures[gone].cancel()
    bench.runner.fail(ValueError("x"))
    while bench.runner.busy:
        bench.runner.finish(str.upper)
    assert sorted(future.result() for future in futures if not future.cancelled()) == sorted(
        name.upper() for number, name in enumerate("abcd") if number != gone
    )
    assert bench.counted == 4
    assert bench.seen.count(Drop.CANCELLED) == 1
    bench.batcher.close()
