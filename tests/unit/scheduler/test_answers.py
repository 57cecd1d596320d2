"""Answers in the order of arrival: what is held back, what is let go, and that nothing is kept of who has gone."""

from __future__ import annotations

import asyncio
import gc
import weakref

import pytest

from scheduler.answers import OrderedAnswers


class Answer(Exception):
    """A result or an error that can be seen to be kept."""


async def expected(answers: OrderedAnswers, count: int) -> list[asyncio.Future[object]]:
    futures = [asyncio.get_running_loop().create_future() for _ in range(count)]
    for future in futures:
        answers.expect(future)
    return futures


async def test_ordered_answer_waits_for_all_that_arrived_before() -> None:
    answers = OrderedAnswers()
    first, second, third = await expected(answers, 3)
    answers.succeed(third, "c")
    answers.fail(second, ValueError("b"))
    assert not any(future.done() for future in (first, second, third))
    answers.succeed(first, "a")
    assert (first.result(), third.result()) == ("a", "c")
    with pytest.raises(ValueError, match="b"):
        second.result()


@pytest.mark.parametrize("outcome", ["succeed", "fail"])
async def test_ordered_answer_that_comes_after_its_request_was_cancelled_is_not_kept(outcome: str) -> None:
    answers = OrderedAnswers()
    gone, _ = await expected(answers, 2)
    gone.cancel()
    answers.release()
    answer = Answer()
    kept = weakref.ref(answer)
    getattr(answers, outcome)(gone, answer)
    del answer
    gc.collect()
    assert kept() is None


@pytest.mark.parametrize("outcome", ["succeed", "fail"])
async def test_ordered_answer_whose_request_is_cancelled_while_it_waits_its_turn_is_not_kept(outcome: str) -> None:
    answers = OrderedAnswers()
    first, gone = await expected(answers, 2)
    answer = Answer()
    kept = weakref.ref(answer)
    getattr(answers, outcome)(gone, answer)
    gone.cancel()
    answers.release()
    answers.succeed(first, "first")
    del answer
    gc.collect()
    assert kept() is None
