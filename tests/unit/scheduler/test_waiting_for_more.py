"""An idle instance that waits for more requests, and what ends its wait: deadlines, limits, a full batch."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from paceline.scheduler.errors import QueueFull
from paceline.scheduler.policy import BatchPolicy, QueueLimits, QueuePolicy
from paceline.scheduler.turns import ArrivalModel
from paceline.scheduler.waiting import SharedQueueLimits
from tests.unit.scheduler import workbench
from tests.unit.scheduler.workbench import Bench

US = 1_000
MS = 1_000 * US


def crowd(requests: int = 16) -> ArrivalModel:
    """Arrivals after many batches of so many requests: an idle instance waits 1.2 ms for more."""
    return workbench.crowd(requests, 150 * US, batches=101)


def bench(arrivals: ArrivalModel | None = None, **policy: Any) -> Bench:
    return Bench(BatchPolicy(**{"max_batch_rows": 32, **policy}), arrivals=arrivals or crowd())


async def iterations(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def started_after(one: Bench, step_us: int = 50) -> int:
    """How long it takes until the next batch starts, in us."""
    batches, waited_us = len(one.runner.batches), 0
    await iterations()
    while len(one.runner.batches) == batches:
        assert waited_us < 20_000
        one.clock.advance(step_us * US)
        await iterations()
        waited_us += step_us
    return waited_us


async def test_idle_instance_waits_for_more_requests_by_default() -> None:
    one = bench()
    one.put("a")
    assert await started_after(one) == 1_200


@pytest.mark.parametrize(
    ("policy", "how"),
    [
        ({"queue": QueuePolicy(default_timeout_ns=800 * US)}, {}),
        ({"queue": QueuePolicy(allow_timeout_override=True)}, {"timeout_ns": 800 * US}),
        (
            {
                "priority_levels": 2,
                "default_priority_level": 2,
                "priority_queue": {1: QueuePolicy(default_timeout_ns=800 * US)},
            },
            {"priority": 1},
        ),
        ({}, {"deadline_ns": 800 * US}),
    ],
)
async def test_request_with_little_time_waits_for_half_of_it(policy: dict[str, Any], how: dict[str, Any]) -> None:
    one = bench(**policy)
    (pending,) = one.put("a", **how)
    assert await started_after(one) in (400, 450)
    one.runner.finish(str.upper)
    assert await pending == "A"


@pytest.mark.parametrize("announced", [True, False])
async def test_request_with_little_time_that_comes_during_the_wait_is_answered_in_time(announced: bool) -> None:
    one = bench()
    submitted: list[Any] = []

    def submit(requests: list[Any]) -> None:
        submitted.extend(one.put(*requests, deadline_ns=one.clock.now_ns() + 900 * US))

    one.put("a")
    await iterations()
    one.clock.advance(100 * US)
    if announced:
        one.batcher.announce(submit, "b")
    else:
        submit(["b"])
    await started_after(one)
    assert one.runner.batches == [["a", "b"]]
    one.runner.finish(str.upper)
    assert await submitted[0] == "B"


async def test_requests_with_little_time_that_come_one_by_one_after_a_crowd_are_all_executed() -> None:
    one = bench(crowd(64), queue=QueuePolicy(default_timeout_ns=1 * MS))
    for _ in range(100):
        (pending,) = one.put("a")
        await started_after(one, step_us=25)
        one.runner.finish(str.upper)
        assert await pending == "A"
        one.clock.advance(10 * MS)


@pytest.mark.parametrize("rows", [1, 16, 32])
async def test_announced_full_batch_starts_at_once(rows: int) -> None:
    one = bench()

    def submit(requests: list[Any]) -> None:
        one.put(*requests, rows=rows)

    for _ in range(32 // rows):
        one.batcher.announce(submit, "a")
    assert await started_after(one) == 0
    assert one.runner.padded_rows == [32]


@pytest.mark.parametrize(
    "policy",
    [
        {"queue": QueuePolicy(max_queue_size=4)},
        {"priority_levels": 1, "default_priority_level": 1, "queue": QueuePolicy(max_queue_size=4)},
        {"max_batch_requests": 4},
        {"preferred_batch_rows": (4, 8)},
        {"preferred_batch_rows": (4, 8), "max_queue_delay_ns": 3 * MS},
    ],
)
async def test_requests_start_at_once_when_they_reach_a_limit_or_preferred_size(policy: dict[str, Any]) -> None:
    one = bench(**policy)
    one.put(*"abc")
    await iterations()
    assert one.runner.batches == []
    one.put("d")
    assert await started_after(one) == 0
    assert one.runner.batches == [["a", "b", "c", "d"]]


@pytest.mark.parametrize("bound", [{"max_rows": 4}, {"max_bytes": 400}])
async def test_requests_start_at_once_when_they_fill_the_queue(bound: dict[str, int]) -> None:
    one = bench(limits=QueueLimits(**bound))
    one.put(*"abcd", size_bytes=100)
    assert await started_after(one) == 0
    one.put(*"efgh", size_bytes=100)
    with pytest.raises(QueueFull):
        one.put("i", size_bytes=100)


async def test_requests_start_at_once_when_they_fill_the_shared_limit() -> None:
    one = Bench(BatchPolicy(max_batch_rows=32), arrivals=crowd(), shared_limits=SharedQueueLimits(4, 0))
    one.put(*"abcd")
    assert await started_after(one) == 0


@pytest.mark.parametrize(("delay_us", "waits_us"), [(0, 1_200), (300, 1_200), (3_000, 3_000)])
async def test_longer_of_delay_and_wait_for_a_crowd_counts(delay_us: int, waits_us: int) -> None:
    one = bench(max_queue_delay_ns=delay_us * US)
    one.put("a")
    assert await started_after(one) == waits_us


async def test_flush_ends_all_waiting_for_more_requests() -> None:
    one = bench()
    one.put("a")
    await iterations()
    one.batcher.flush()
    assert await started_after(one) == 0
    one.runner.finish(str.upper)
    one.put("b")
    assert await started_after(one) == 0


@pytest.mark.parametrize("preferred", [(), (4, 8)])
async def test_crowd_of_long_ago_is_not_waited_for(preferred: tuple[int, ...]) -> None:
    one = bench(preferred_batch_rows=preferred)
    one.clock.advance(1_000 * MS)
    one.put("a")
    assert await started_after(one) == 0
