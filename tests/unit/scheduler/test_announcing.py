"""Announced requests, which are submitted together at the beginning of a turn."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest

from paceline.scheduler.errors import BatcherClosed, NoInstance, QueueTimeout, SchedulerError
from paceline.scheduler.policy import BatchPolicy
from paceline.scheduler.request import Request
from tests.unit.scheduler.workbench import Bench, one_turn

MS = 1_000_000


class Announced:
    """Announces requests; has their futures or errors, and the order in which they were submitted."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.order: list[str] = []
        self.futures: dict[str, Request[str, str]] = {}
        self.refused: dict[str, SchedulerError] = {}

    def announce(self, *payloads: str, arrived_ns: int = 0) -> None:
        for payload in payloads:
            self._bench.batcher.announce(self._submit, (payload, arrived_ns))

    def _submit(self, requests: list[tuple[str, int]]) -> None:
        for payload, arrived_ns in requests:
            self.order.append(payload)
            try:
                (self.futures[payload],) = self._bench.put(payload, arrived_ns=arrived_ns)
            except SchedulerError as error:
                self.refused[payload] = error


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench(BatchPolicy(max_batch_rows=4))
    yield bench
    bench.batcher.close()


@pytest.fixture
def announced(bench: Bench) -> Announced:
    return Announced(bench)


async def test_announced_requests_are_submitted_once_and_share_a_batch(bench: Bench, announced: Announced) -> None:
    announced.announce("a", "b", "c")
    assert announced.order == []
    await one_turn()
    assert announced.order == ["a", "b", "c"]
    bench.runner.finish(str.upper)
    assert await asyncio.gather(*announced.futures.values()) == ["A", "B", "C"]
    assert bench.runner.batches == [["a", "b", "c"]]


async def test_announced_request_comes_before_one_submitted_later(bench: Bench, announced: Announced) -> None:
    announced.announce("a")
    bench.put("b")
    announced.announce("c")
    bench.put("d")
    await one_turn()
    assert bench.runner.batches == [["a", "b", "c", "d"]]


async def test_requests_announced_while_all_instances_are_busy_wait_like_others(
    bench: Bench, announced: Announced
) -> None:
    await bench.submit("x")
    announced.announce("a", "b")
    await one_turn()
    assert bench.batcher.waiting_requests == 2
    bench.runner.finish(str.upper)
    await one_turn()
    assert bench.runner.batches == [["x"], ["a", "b"]]


async def test_announced_request_has_waited_since_its_arrival() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=4))
    announced = Announced(bench)
    await bench.submit("x")
    arrived_ns = bench.clock.now_ns()
    bench.clock.advance(5 * MS)
    announced.announce("a", arrived_ns=arrived_ns)
    await one_turn()
    bench.runner.finish(str.upper)
    await one_turn()
    bench.runner.finish(str.upper)
    assert bench.seen.reports[-1].waits_ns == [5 * MS]
    bench.batcher.close()


@pytest.mark.parametrize("end", ["close", "suspend"])
async def test_announced_requests_are_refused_when_the_batcher_closes_or_is_suspended(
    bench: Bench, announced: Announced, end: str
) -> None:
    announced.announce("a", "b")
    getattr(bench.batcher, end)()
    assert announced.order == ["a", "b"]
    announced.announce("c")
    await one_turn()
    assert announced.order == ["a", "b", "c"]
    expected = BatcherClosed if end == "close" else NoInstance
    for payload in announced.order:
        error = announced.refused.get(payload) or announced.futures[payload].exception()
        assert isinstance(error, expected)


async def test_request_announced_to_a_closed_batcher_is_refused(bench: Bench, announced: Announced) -> None:
    bench.batcher.close()
    announced.announce("a")
    await one_turn()
    assert isinstance(announced.refused["a"], BatcherClosed)


async def test_request_announced_while_others_are_submitted_gets_its_turn(bench: Bench, announced: Announced) -> None:
    bench.batcher.announce(lambda requests: announced.announce(*requests), "a")
    await one_turn()
    assert bench.runner.batches == [["a"]]


async def test_drain_executes_requests_announced_before_and_refuses_later_ones(
    bench: Bench, announced: Announced
) -> None:
    announced.announce("a")
    drained = asyncio.create_task(bench.batcher.drain())
    await one_turn()
    announced.announce("b")
    await one_turn()
    bench.runner.finish(str.upper)
    await drained
    assert announced.futures["a"].result() == "A"
    assert isinstance(announced.refused["b"], BatcherClosed)


async def test_raising_submitter_does_not_affect_other_requests(
    bench: Bench, announced: Announced, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(requests: list[str]) -> None:
        raise ValueError(f"not these: {requests}")

    announced.announce("a")
    bench.batcher.announce(fail, "x")
    announced.announce("b")
    with caplog.at_level(logging.ERROR):
        await one_turn()
    assert bench.runner.batches == [["a", "b"]]
    assert "submitting requests that arrived together failed" in caplog.text


async def test_announced_request_already_past_its_deadline_expires() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=4))
    (late,) = await bench.submit("x")
    futures: list[Request[str, str]] = []
    deadline_ns = bench.clock.now_ns() + MS

    def submit(requests: list[str]) -> None:
        futures.extend(bench.put(*requests, deadline_ns=deadline_ns, arrived_ns=deadline_ns - MS))

    bench.batcher.announce(submit, "a")
    bench.clock.advance(2 * MS)
    await one_turn()
    with pytest.raises(QueueTimeout):
        await futures[0]
    bench.runner.finish(str.upper)
    assert await late == "X"
    bench.batcher.close()
