"""A request that nobody has sent, by which a model that generates is warmed up.

Lives here: the request. Must not: execute anything.
"""

from __future__ import annotations

from threading import Event
from typing import Any

import numpy as np

from paceline.backends.open_request import Answer, OpenRequest
from paceline.backends.spec import MISSING, Tensors

__all__ = ["MadeUpRequest"]


class MadeUpRequest(OpenRequest):
    """A request of nobody, for one token."""

    __slots__ = ("answer", "answered")

    def __init__(self, inputs: Tensors) -> None:
        prompt = np.zeros(1, np.int64) if all(one is MISSING for one in inputs) else inputs[0]
        super().__init__((prompt, *inputs[1:]), (0,), parameters={"max_tokens": 1})
        self.takes_one = True
        self.answer: Any = None
        self.answered = Event()

    def on_answer(self, answer: Answer, *, last: bool) -> None:
        self.answer = answer
        self.answered.set()
