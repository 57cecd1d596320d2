"""Callbacks of requests that are done: those of a batch together, failures included, and never twice."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest

from paceline.scheduler.errors import ExecutionFailed
from paceline.scheduler.pending import Pending
from paceline.scheduler.policy import BatchPolicy
from tests.unit.scheduler.workbench import Bench, one_turn


class CallbackLog:
    """Collects the payloads of requests that are done, in a list for each call."""

    def __init__(self) -> None:
        self.lists: list[list[str]] = []

    def follow(self, requests: list[Pending[str, str]]) -> None:
        for request in requests:
            request.on_done, request.subject = self._on_done, request.payload

    def _on_done(self, about: list[str]) -> None:
        self.lists.append(about)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench(BatchPolicy(max_batch_rows=4, isolate_failures=False))
    yield bench
    bench.batcher.close()


async def test_results_of_a_batch_are_delivered_together_and_at_once(bench: Bench) -> None:
    told = CallbackLog()
    requests = await bench.submit("a", "b", "c")
    told.follow(requests)
    bench.runner.finish(str.upper)
    assert told.lists == [["a", "b", "c"]]
    assert [request.result() for request in requests] == ["A", "B", "C"]
    await one_turn()
    assert len(told.lists) == 1


async def test_batch_is_reported_before_its_results_are_delivered(bench: Bench) -> None:
    reported: list[int] = []
    requests = await bench.submit("a")
    requests[0].on_done = lambda about: reported.append(len(bench.seen.reports))
    bench.runner.finish(str.upper)
    assert reported == [1]


async def test_failures_of_a_batch_are_delivered_together_too(bench: Bench) -> None:
    told = CallbackLog()
    requests = await bench.submit("a", "b")
    told.follow(requests)
    bench.runner.fail(ValueError("no"))
    assert told.lists == [["a", "b"]]
    assert all(isinstance(request.exception(), ExecutionFailed) for request in requests)
    await one_turn()
    assert told.lists == [["a", "b"]]


async def test_failures_of_requests_given_up_are_delivered_from_the_loop(bench: Bench) -> None:
    told = CallbackLog()
    told.follow(bench.put("a", "b"))
    bench.batcher.close()
    assert told.lists == []
    await one_turn()
    assert told.lists == [["a", "b"]]


async def test_present_results_are_delivered_though_others_are_missing(bench: Bench) -> None:
    told = CallbackLog()
    requests = await bench.submit("a", "b")
    told.follow(requests)
    with pytest.raises(ValueError, match="shorter"):
        bench.runner.finish_with(["A"])
    assert told.lists == [["a"]]


async def test_cancelled_request_is_delivered_once_and_not_with_its_batch(bench: Bench) -> None:
    told = CallbackLog()
    waits, runs = await bench.submit("waits", "runs")
    told.follow([waits, runs])
    waits.cancel()
    await one_turn()
    assert told.lists == [["waits"]]
    bench.runner.finish(str.upper)
    assert told.lists == [["waits"], ["runs"]]


async def test_raising_callback_does_not_affect_others(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    def fail(about: list[str]) -> None:
        raise ValueError(f"deaf: {about}")

    told = CallbackLog()
    first, deaf, last = await bench.submit("first", "deaf", "last")
    told.follow([first, last])
    deaf.on_done = fail
    with caplog.at_level(logging.ERROR):
        bench.runner.finish(str.upper)
    assert told.lists == [["first"], ["last"]]
    assert "deaf" in caplog.text
    assert deaf.result() == "DEAF"


async def test_awaited_requests_and_requests_with_callbacks_share_a_batch(bench: Bench) -> None:
    told = CallbackLog()
    awaited, followed = await bench.submit("awaited", "followed")
    told.follow([followed])
    bench.runner.finish(str.upper)
    assert told.lists == [["followed"]]
    assert await awaited == "AWAITED"


async def test_ordered_answers_are_delivered_in_order_failures_included() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=1, preserve_ordering=True, isolate_failures=False), instances=4)
    told = CallbackLog()
    told.follow(await bench.submit("first", "fails", "third", "last"))
    free = {runner.batches[0][0]: runner for runner in bench.runners}
    free["last"].finish(str.upper)
    free["third"].finish(str.upper)
    free["fails"].fail(ValueError("no"))
    await one_turn()
    assert told.lists == []
    free["first"].finish(str.upper)
    await one_turn()
    assert told.lists == [["first", "fails", "third", "last"]]
    bench.batcher.close()


async def test_ordered_answers_held_back_by_a_cancelled_request_are_delivered_from_the_loop() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=1, preserve_ordering=True), instances=2)
    told = CallbackLog()
    gone, kept = await bench.submit("gone", "kept")
    told.follow([gone, kept])
    next(runner for runner in bench.runners if runner.batches == [["kept"]]).finish(str.upper)
    gone.cancel()
    assert told.lists == []
    await one_turn()
    assert sorted(told.lists) == [["gone"], ["kept"]]
    bench.batcher.close()


async def test_callback_and_subject_are_not_kept_after_delivery(bench: Bench) -> None:
    told = CallbackLog()
    good, bad = await bench.submit("good", "bad")
    told.follow([good, bad])
    bad.cancel()
    bench.runner.finish(str.upper)
    await asyncio.sleep(0)
    assert good.on_done is good.subject is bad.on_done is bad.subject is None
