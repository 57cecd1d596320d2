"""Iterators over answers: awaited, cancelled, or dropped before their end, on whatever thread, with whatever lock."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import pytest

from paceline.backends.python.calls_worker import CalledModel, Calls
from paceline.backends.python.messages import CALL, CALL_OVER, CALLED
from paceline.backends.python.triton.errors import TritonError
from paceline.backends.python.triton.requests import InferenceRequest


class Link:
    """Sends, and gets an answer to each call at once, which isn't its last."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int]] = []
        self.unsaid: SimpleQueue[Any] = SimpleQueue()
        self.calls = Calls(self, self.unsaid.put)  # type: ignore[arg-type]  # what it needs of one

    def pack(self, arrays: object) -> tuple[int, int, int]:
        return 0, 0, 0

    def send(self, kind: int, number: int, *content: object, parcel: object = None) -> bool:
        self.sent.append((kind, number))
        if kind == CALL:
            self.calls.hear((CALLED, number, False, (), None, {}))
        return True


def of_our_class(calls: Calls) -> Iterator[Any]:
    return CalledModel(calls, "m").stream_infer({})


def to_m() -> InferenceRequest:
    return InferenceRequest(model_name="m", inputs=[], requested_output_names=[])


def of_triton(calls: Calls) -> Iterator[Any]:
    InferenceRequest.calls = calls
    return to_m().exec(decoupled=True)  # type: ignore[return-value]


@pytest.mark.parametrize("stream", [of_our_class, of_triton])
def test_dropped_iterator_leaves_its_withdrawal_to_another_thread(stream: Any) -> None:
    link = Link()
    answers = stream(link.calls)
    next(answers)
    sent = len(link.sent)
    del answers
    assert len(link.sent) == sent
    link.unsaid.get_nowait()()
    assert link.sent[sent:] == [(CALL_OVER, 1)]


def test_cancelled_iterator_withdraws_its_call_and_ends() -> None:
    link = Link()
    InferenceRequest.calls = link.calls
    answers: Any = to_m().exec(decoupled=True)
    answers.cancel()
    _, last = answers
    assert last.error().code() == TritonError.CANCELLED
    link.unsaid.get_nowait()()
    assert link.sent[-1] == (CALL_OVER, 1)


class LinkOfTwo(Link):
    """Answers both calls when the second one is made."""

    def send(self, kind: int, number: int, *content: object, parcel: object = None) -> bool:
        if number == 2:
            self.calls.hear((CALLED, 1, True, (), None, {}))
        return number == 1 or super().send(kind, number, *content, parcel=parcel)


async def test_awaited_iterator_comes_with_its_first_response() -> None:
    InferenceRequest.calls = LinkOfTwo().calls
    first, second = (asyncio.ensure_future(to_m().async_exec(decoupled=True)) for _ in range(2))
    await asyncio.sleep(0)  # both have been called, and the loop hasn't heard of their answers
    assert not first.done()
    responses: Any = await second
    next(responses)
    responses = await first
    assert [one.output_tensors() for one in responses] == [[]]
