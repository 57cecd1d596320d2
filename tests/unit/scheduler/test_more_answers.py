"""Requests with more than one answer, and requests that come back into the queue."""

from __future__ import annotations

from typing import Any

from paceline.scheduler.policy import BatchPolicy
from paceline.scheduler.request import Request
from paceline.scheduler.runner import ANSWERED_ELSEWHERE, NO_ANSWER
from tests.unit.scheduler.workbench import Bench, one_turn

Told = list[tuple[str, object, bool]]


def asked(bench: Bench, payload: str, told: Told) -> Request[str, str]:
    """A request that was submitted. `told` gets what its source is told: payload, answer, and whether it has ended."""
    request: Request[str, str] = Request(payload, 1, "k")

    def on_answers(requests: list[Any]) -> None:
        told.extend((one.payload, getattr(one, "value", None), one.ended) for one in requests)

    request.on_answers = on_answers
    assert not any(bench.batcher.submit([request]))
    return request


async def test_source_is_told_of_each_answer() -> None:
    bench, told = Bench(BatchPolicy(max_batch_rows=8)), Told()
    requests = [asked(bench, payload, told) for payload in "ab"]
    await one_turn()
    (runner,) = bench.runners
    runner.answer_with(["a1", NO_ANSWER])
    runner.answer_with(["a2", "b1"])
    assert told == [("a", "a1", False), ("a", "a2", False), ("b", "b1", False)]
    runner.finish_with(["a3", "b2"])
    assert told[3:] == [("a", "a3", True), ("b", "b2", True)]
    assert [request.result() for request in requests] == ["a3", "b2"]
    (report,) = bench.seen.reports
    assert (len(report.waits_ns), report.failed, report.cancelled) == (2, 0, 0)
    bench.batcher.close()


async def test_cancelled_request_gets_no_further_answer() -> None:
    bench, told = Bench(BatchPolicy(max_batch_rows=8)), Told()
    first, _ = [asked(bench, payload, told) for payload in "ab"]
    await one_turn()
    (runner,) = bench.runners
    runner.answer_with(["a1", "b1"])
    assert first.cancel()
    await one_turn()
    runner.answer_with(["a2", "b2"])
    runner.finish_with(["a3", "b3"])
    assert [one for one in told if one[0] == "a"] == [("a", "a1", False), ("a", "a1", True)]
    assert [one for one in told if one[0] == "b"] == [("b", f"b{n}", n == 3) for n in (1, 2, 3)]
    (report,) = bench.seen.reports
    assert (len(report.waits_ns), report.cancelled) == (1, 1)
    bench.batcher.close()


async def test_unfinished_request_comes_back() -> None:
    bench, told = Bench(BatchPolicy(max_batch_rows=8)), Told()
    request = asked(bench, "first step", told)
    await one_turn()
    (runner,) = bench.runners
    runner.answer_with(["one"])
    runner.finish_with([NO_ANSWER])
    assert not request.ended
    assert bench.batcher.waiting_requests == 0
    request.payload = "second step"
    assert not any(bench.batcher.submit([request]))
    await one_turn()
    runner.finish_with(["two"])
    assert told == [("first step", "one", False), ("first step", NO_ANSWER, False), ("second step", "two", True)]
    assert runner.batches == [["first step"], ["second step"]]
    assert [len(report.waits_ns) for report in bench.seen.reports] == [0, 1]
    assert bench.batcher.waiting_requests == 0
    bench.batcher.close()


async def test_unfinished_request_can_be_cancelled_while_it_waits_again() -> None:
    bench, told = Bench(BatchPolicy(max_batch_rows=1)), Told()
    request = asked(bench, "a", told)
    await one_turn()
    (runner,) = bench.runners
    runner.finish_with([NO_ANSWER])
    other = asked(bench, "b", told)
    await one_turn()
    assert not any(bench.batcher.submit([request]))
    assert request.cancel()
    runner.finish_with(["done"])
    await one_turn()
    assert other.result() == "done"
    assert len(runner.batches) == 2
    assert bench.batcher.waiting_requests == 0
    bench.batcher.close()


async def test_order_does_not_wait_for_answers_elsewhere() -> None:
    bench, told = Bench(BatchPolicy(max_batch_rows=8, preserve_ordering=True)), Told()
    for payload in "ab":
        asked(bench, payload, told)
    await one_turn()
    (runner,) = bench.runners
    runner.finish_with([ANSWERED_ELSEWHERE, "b1"])
    assert told == [("b", "b1", True)]
    bench.batcher.close()
