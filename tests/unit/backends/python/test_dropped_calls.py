"""Iterators over answers that a model drops before the last one, on whatever thread, holding whatever lock."""

from __future__ import annotations

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


def of_triton(calls: Calls) -> Iterator[Any]:
    InferenceRequest.calls = calls
    return InferenceRequest(model_name="m").exec(decoupled=True)  # type: ignore[return-value]


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
    answers: Any = InferenceRequest(model_name="m").exec(decoupled=True)
    answers.cancel()
    _, last = answers
    assert last.error().code() == TritonError.CANCELLED
    link.unsaid.get_nowait()()
    assert link.sent[-1] == (CALL_OVER, 1)
