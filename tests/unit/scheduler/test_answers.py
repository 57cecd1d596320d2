"""Answers in the order of arrival: what is held back, when it leaves, and that cancelled requests leave nothing."""

from __future__ import annotations

import gc
import weakref

import pytest

from paceline.scheduler.answering import OrderedAnswers
from paceline.scheduler.errors import ExecutionFailed
from paceline.scheduler.policy import BatchPolicy
from paceline.scheduler.request import AnyRequest, Request
from tests.unit.scheduler.workbench import Bench, one_turn


class Answer(Exception):
    """A result or an error; a weak reference to it shows whether it is kept."""


class CancelTarget:
    """In place of the batcher: requests notify it when they are cancelled."""

    def __init__(self, answers: OrderedAnswers) -> None:
        self.answers = answers

    def on_cancel(self, request: AnyRequest) -> None:
        self.answers.cancelled(request)


def end(answers: OrderedAnswers, outcome: str, request: AnyRequest, answer: Answer) -> None:
    if outcome == "succeed":
        answers.succeed([request], [answer])
    else:
        answers.fail(request, answer)


async def expected(answers: OrderedAnswers, count: int) -> list[AnyRequest]:
    requests: list[AnyRequest] = [Request(None, 1, "k") for _ in range(count)]
    for request in requests:
        request.batcher = CancelTarget(answers)
        answers.expect(request)
    return requests


async def test_ordered_answer_waits_for_all_earlier_requests() -> None:
    answers = OrderedAnswers()
    first, second, third = await expected(answers, 3)
    answers.succeed([third], ["c"])
    answers.fail(second, ValueError("b"))
    assert not any(future.done() for future in (first, second, third))
    answers.succeed([first], ["a"])
    assert (first.result(), third.result()) == ("a", "c")
    with pytest.raises(ValueError, match="b"):
        second.result()


async def test_ordered_answers_of_a_batch_leave_as_far_as_no_earlier_request_is_missing() -> None:
    answers = OrderedAnswers()
    first, second, third, fourth = await expected(answers, 4)
    answers.succeed([second, fourth], ["b", "d"])
    assert not any(request.done() for request in (first, second, third, fourth))
    answers.succeed([first], ["a"])
    assert [request.done() for request in (first, second, third, fourth)] == [True, True, False, False]
    third.cancel()
    assert [request.result() for request in (first, second, fourth)] == ["a", "b", "d"]


@pytest.mark.parametrize("outcome", ["succeed", "fail"])
async def test_first_ordered_answer_leaves_at_once_with_those_that_waited_for_it(outcome: str) -> None:
    answers = OrderedAnswers()
    first, second, third = await expected(answers, 3)
    answers.succeed([second], ["b"])
    end(answers, outcome, first, Answer())
    assert [future.done() for future in (first, second, third)] == [True, True, False]
    assert (first.exception() is not None) == (outcome == "fail")


@pytest.mark.parametrize("outcome", ["succeed", "fail"])
async def test_ordered_answer_after_its_request_was_cancelled_is_not_kept(outcome: str) -> None:
    answers = OrderedAnswers()
    gone, _ = await expected(answers, 2)
    gone.cancel()
    answer = Answer()
    kept = weakref.ref(answer)
    end(answers, outcome, gone, answer)
    del answer
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("outcome", ["succeed", "fail"])
async def test_ordered_answer_of_a_request_cancelled_while_it_is_held_back_is_not_kept(outcome: str) -> None:
    answers = OrderedAnswers()
    first, gone = await expected(answers, 2)
    answer = Answer()
    kept = weakref.ref(answer)
    end(answers, outcome, gone, answer)
    gone.cancel()
    answers.succeed([first], ["first"])
    del answer
    gc.collect()
    assert kept() is None


async def test_preserve_ordering_with_two_instances_answers_in_order_of_arrival() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=1, preserve_ordering=True), instances=2)
    order: list[str] = []
    futures = await bench.submit("a", "b", "c")
    for future in futures:
        future.on_answers = lambda requests: order.extend(one.payload for one in requests)
    first, second = bench.runners
    bench.clock.advance(7)
    second.finish(str.upper)
    await one_turn()
    assert not any(future.done() for future in futures[:2])
    assert [report.waits_ns for report in bench.seen.reports] == [[0]], "it was executed, whenever it is answered"
    first.finish(str.upper)
    await one_turn()
    assert order == ["a", "b"]
    (busy,) = (runner for runner in bench.runners if runner.busy)
    busy.finish(str.upper)
    await one_turn()
    assert order == ["a", "b", "c"]
    bench.batcher.close()


async def test_preserve_ordering_is_not_held_up_by_a_cancelled_or_failed_predecessor() -> None:
    bench = Bench(BatchPolicy(max_batch_rows=1, preserve_ordering=True), instances=3)
    gone, failed, good = await bench.submit("gone", "failed", "good")
    bench.runners[2].finish(str.upper)
    bench.runners[1].fail(ValueError("x"))
    await one_turn()
    assert not good.done()
    gone.cancel()
    await one_turn()
    assert isinstance(failed.exception(), ExecutionFailed)
    assert good.result() == "GOOD"
    bench.batcher.close()


async def test_preserve_ordering_keeps_nothing_of_a_cancelled_request_while_the_first_executes() -> None:
    class Payload(str):
        pass

    bench = Bench(BatchPolicy(max_batch_rows=1, preserve_ordering=True))
    (first,) = await bench.submit("first")
    payload = Payload("tensors")
    kept = weakref.ref(payload)
    (gone,) = await bench.submit(payload)
    gone.cancel()
    await one_turn()
    del payload, gone
    gc.collect()
    assert kept() is None
    bench.runner.finish(str.upper)
    assert await first == "FIRST"
    bench.batcher.close()
