"""A request's end: for whoever awaits it, and for the source of several requests, which is told of all that ended
together, failures included, and never twice."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import pytest

from paceline.scheduler.errors import BatcherClosed, ExecutionFailed
from paceline.scheduler.observer import Drop
from paceline.scheduler.policy import BatchPolicy
from paceline.scheduler.request import AnyRequest, Request
from tests.unit.scheduler.workbench import Bench, nothing_to_collect, one_turn, submit


class AnswersLog:
    """Collects the payloads of requests that have ended, in a list for each call."""

    def __init__(self) -> None:
        self.lists: list[list[str]] = []

    def follow(self, requests: list[Request[str, str]]) -> None:
        for request in requests:
            request.on_answers = self._on_answers

    def _on_answers(self, requests: list[AnyRequest]) -> None:
        assert all(request.done() for request in requests)
        self.lists.append([request.payload for request in requests])


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    bench = Bench(BatchPolicy(max_batch_rows=4, isolate_failures=False))
    yield bench
    bench.batcher.close()


async def test_results_of_a_batch_are_delivered_together_and_at_once(bench: Bench) -> None:
    told = AnswersLog()
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
    requests[0].on_answers = lambda requests: reported.append(len(bench.seen.reports))
    bench.runner.finish(str.upper)
    assert reported == [1]


async def test_failures_of_a_batch_are_delivered_together_too(bench: Bench) -> None:
    told = AnswersLog()
    requests = await bench.submit("a", "b")
    told.follow(requests)
    bench.runner.fail(ValueError("no"))
    assert told.lists == [["a", "b"]]
    assert all(isinstance(request.exception(), ExecutionFailed) for request in requests)
    await one_turn()
    assert told.lists == [["a", "b"]]


async def test_failures_of_requests_given_up_are_delivered_from_the_loop(bench: Bench) -> None:
    told = AnswersLog()
    told.follow(bench.put("a", "b"))
    bench.batcher.close()
    assert told.lists == []
    await one_turn()
    assert told.lists == [["a", "b"]]


async def test_present_results_are_delivered_though_others_are_missing(bench: Bench) -> None:
    told = AnswersLog()
    requests = await bench.submit("a", "b")
    told.follow(requests)
    with pytest.raises(ValueError, match="shorter"):
        bench.runner.finish_with(["A"])
    assert told.lists == [["a"]]


async def test_cancelled_request_is_delivered_once_and_not_with_its_batch(bench: Bench) -> None:
    told = AnswersLog()
    waits, runs = await bench.submit("waits", "runs")
    told.follow([waits, runs])
    waits.cancel()
    await one_turn()
    assert told.lists == [["waits"]]
    bench.runner.finish(str.upper)
    assert told.lists == [["waits"], ["runs"]]


async def test_raising_callback_does_not_affect_others(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    def fail(requests: list[AnyRequest]) -> None:
        raise ValueError(f"deaf: {requests[0].payload}")

    told = AnswersLog()
    first, deaf, last = await bench.submit("first", "deaf", "last")
    told.follow([first, last])
    deaf.on_answers = fail
    with caplog.at_level(logging.ERROR):
        bench.runner.finish(str.upper)
    assert told.lists == [["first"], ["last"]]
    assert "deaf" in caplog.text
    assert deaf.result() == "DEAF"


async def test_awaited_requests_and_requests_with_callbacks_share_a_batch(bench: Bench) -> None:
    told = AnswersLog()
    awaited, followed = await bench.submit("awaited", "followed")
    told.follow([followed])
    bench.runner.finish(str.upper)
    assert told.lists == [["followed"]]
    assert await awaited == "AWAITED"


async def test_ordered_answers_are_delivered_in_order_failures_included() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=1, preserve_ordering=True, isolate_failures=False), instances=4)
    told = AnswersLog()
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
    told = AnswersLog()
    gone, kept = await bench.submit("gone", "kept")
    told.follow([gone, kept])
    next(runner for runner in bench.runners if runner.batches == [["kept"]]).finish(str.upper)
    gone.cancel()
    assert told.lists == []
    await one_turn()
    assert told.lists == [["gone", "kept"]]
    bench.batcher.close()


async def test_callback_is_not_kept_after_delivery(bench: Bench) -> None:
    told = AnswersLog()
    good, bad = await bench.submit("good", "bad")
    told.follow([good, bad])
    bad.cancel()
    bench.runner.finish(str.upper)
    await asyncio.sleep(0)
    assert good.on_answers is bad.on_answers is None


async def test_sources_are_told_of_their_own_requests_only_in_the_order_of_answers(bench: Bench) -> None:
    one, other = AnswersLog(), AnswersLog()
    first, second, third, fourth = await bench.submit("a", "b", "c", "d")
    one.follow([first, second, fourth])
    other.follow([third])
    bench.runner.finish(str.upper)
    assert (one.lists, other.lists) == ([["a", "b"], ["d"]], [["c"]])


async def test_source_is_told_once_of_requests_cancelled_together_and_by_the_loop(bench: Bench) -> None:
    told = AnswersLog()
    await bench.submit("executes")
    waiting = await bench.submit("a", "b", "c")
    told.follow(waiting)
    assert [waiting[place].cancel() for place in (2, 0)] == [True, True]
    assert told.lists == []
    await one_turn()
    assert told.lists == [["c", "a"]]
    bench.runner.finish(str.upper)
    await one_turn()
    bench.runner.finish(str.upper)
    assert told.lists == [["c", "a"], ["b"]]


@pytest.mark.parametrize("ends_by", ["success", "failure", "cancelling", "closing"])
async def test_source_is_never_told_twice(bench: Bench, ends_by: str) -> None:
    told = AnswersLog()
    requests = await bench.submit("a")
    told.follow(requests)
    if ends_by == "success":
        bench.runner.finish(str.upper)
    elif ends_by == "failure":
        bench.runner.fail(ValueError("no"))
    elif ends_by == "cancelling":
        requests[0].cancel()
    bench.batcher.close()
    for _ in range(2):
        await one_turn()
        assert not requests[0].cancel()
    if ends_by in ("cancelling", "closing"):
        bench.runner.finish(str.upper)
    await one_turn()
    assert told.lists == [["a"]]


def test_request_without_an_end_has_neither_result_nor_error() -> None:
    request = Request[str, str]("a", 1, "k")
    assert (request.done(), request.answered, request.cancelled()) == (False, False, False)
    for read in (request.result, request.exception):
        with pytest.raises(asyncio.InvalidStateError):
            read()


async def test_answered_request_has_its_result_and_no_error(bench: Bench) -> None:
    (request,) = await bench.submit("a")
    bench.runner.finish(str.upper)
    assert (request.done(), request.answered, request.cancelled()) == (True, True, False)
    assert (request.result(), request.exception()) == ("A", None)


async def test_failed_request_raises_its_error(bench: Bench) -> None:
    (request,) = await bench.submit("a")
    bench.runner.fail(ValueError("no"))
    assert (request.done(), request.answered, request.cancelled()) == (True, False, False)
    for _ in range(2):
        with pytest.raises(ExecutionFailed, match="no") as raised:
            request.result()
        assert raised.value is request.exception()


async def test_cancelled_request_stays_cancelled_and_raises_that(bench: Bench) -> None:
    (request,) = await bench.submit("a")
    assert request.cancel()
    bench.runner.finish(str.upper)
    assert (request.done(), request.answered, request.cancelled()) == (True, False, True)
    for read in (request.result, request.exception):
        with pytest.raises(asyncio.CancelledError):
            read()


@pytest.mark.parametrize("awaited_first", [False, True])
async def test_awaited_request_returns_its_result_or_raises_its_error(bench: Bench, awaited_first: bool) -> None:
    for fails in (False, True):
        (request,) = await bench.submit("a")
        call = asyncio.ensure_future(_answer_of(request))
        if awaited_first:
            await one_turn()
        if fails:
            bench.runner.fail(ValueError("no"))
            with pytest.raises(ExecutionFailed, match="no"):
                await call
        else:
            bench.runner.finish(str.upper)
            assert await call == "A"


async def test_all_who_await_a_request_get_its_answer(bench: Bench) -> None:
    good, bad = await bench.submit("good", "bad")
    calls = [asyncio.ensure_future(_answer_of(one)) for one in (good, good, bad, bad)]
    await one_turn()
    refused = ValueError("not this one")
    bench.runner.finish_with(["GOOD", refused])  # type: ignore[list-item]
    assert await asyncio.gather(*calls, return_exceptions=True) == ["GOOD", "GOOD", refused, refused]


async def test_cancelling_who_awaits_a_request_withdraws_it(bench: Bench) -> None:
    await bench.submit("executes")
    (request,) = await bench.submit("a")
    told = AnswersLog()
    told.follow([request])
    calls = [asyncio.ensure_future(_answer_of(request)) for _ in range(2)]
    await one_turn()
    calls[0].cancel()
    await one_turn()
    assert request.cancelled()
    assert not request.waits
    assert (bench.batcher.waiting_requests, bench.seen.drops) == (0, [Drop.CANCELLED])
    assert [call.cancelled() for call in calls] == [True, True], "nobody waits for what won't come"
    assert told.lists == [["a"]]


async def test_cancelling_a_request_ends_the_wait_of_whoever_awaits_it(bench: Bench) -> None:
    (request,) = await bench.submit("a")
    call = asyncio.ensure_future(_answer_of(request))
    await one_turn()
    request.cancel()
    await one_turn()
    assert call.cancelled()


async def test_request_answered_before_who_awaits_it_is_cancelled_keeps_its_answer(bench: Bench) -> None:
    (request,) = await bench.submit("a")
    call = asyncio.ensure_future(_answer_of(request))
    await one_turn()
    bench.runner.finish(str.upper)
    call.cancel()
    await one_turn()
    assert call.cancelled()
    assert request.result() == "A"


@pytest.mark.parametrize("ends_by", ["success", "failure", "refusal", "cancelling", "cancelled task", "closing"])
@pytest.mark.parametrize("told", [False, True])
async def test_awaited_request_leaves_no_cycle_for_the_garbage_collector(
    bench: Bench, ends_by: str, told: bool
) -> None:
    with nothing_to_collect():
        (request,) = await bench.submit("a")
        if told:
            request.on_answers = [request].extend
        call = asyncio.ensure_future(_answer_of(request))
        await one_turn()
        if ends_by == "success":
            bench.runner.finish(str.upper)
        elif ends_by == "failure":
            bench.runner.fail(ValueError("no"))
        elif ends_by == "refusal":
            bench.runner.finish_with([ValueError("no")])  # type: ignore[list-item]
        elif ends_by == "cancelling":
            request.cancel()
        elif ends_by == "cancelled task":
            call.cancel()
        else:
            bench.batcher.close()
        await one_turn()
        assert request.done()
        assert call.done()
        assert call.cancelled() or call.exception() is None or isinstance(call.exception(), Exception)
        bench.seen.reports.clear()
        del request, call


async def test_read_error_leaves_no_cycle_for_the_garbage_collector(bench: Bench) -> None:
    with nothing_to_collect():
        requests = await bench.submit("a")
        bench.batcher.close()
        try:
            requests.pop().result()
        except BatcherClosed:
            pass
        else:
            raise AssertionError("it has failed")
        await one_turn()


async def _answer_of(request: Request[str, str]) -> str:
    """Lets go of the request, so that only the request's own references are left."""
    requests = [request]
    del request
    return await requests.pop()


async def test_request_awaited_where_it_is_submitted_is_answered(bench: Bench) -> None:
    async def call() -> str:
        return await submit(bench.batcher, "a", 1, "k")

    answer = asyncio.ensure_future(call())
    await one_turn()
    bench.runner.finish(str.upper)
    assert await answer == "A"
