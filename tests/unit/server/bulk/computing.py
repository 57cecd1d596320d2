"""What stands in for a model, and rows for it, where a test looks at the calls alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

import grpc
import numpy as np

from paceline.backends.spec import Array
from paceline.clients.description import ModelDescription
from paceline.clients.errors import inference_error
from paceline.server.bulk.rows import Rows
from paceline.server.bulk.values import Places

__all__ = ["Doubling", "failing_on", "numbers", "places"]

DESCRIPTION = ModelDescription("m", ("1",), "memory", (), ())


def places(*numbers: int) -> Places:
    return np.array(numbers, np.int64)


def numbers(begin: int, end: int) -> Rows:
    """Rows that are these numbers, as input `x`."""
    values = np.arange(begin, end)
    return Rows({"x": values}, np.arange(len(values)), (), batched=True)


class Doubling:
    """`Computes` that doubles numbers, unless `before`, which gets a call's numbers, raises. `calls` are all calls'."""

    description = DESCRIPTION
    lengths = None

    def __init__(
        self, before: Callable[[Sequence[int]], Awaitable[object] | None] = lambda _: None, *, at_once: int = 1
    ) -> None:
        self._before = before
        self.max_rows, self.at_once = 64, at_once
        self.calls: list[list[int]] = []
        self.running = self.most_running = 0

    async def infer(self, inputs: Mapping[str, Array], outputs: Sequence[str]) -> Mapping[str, Array]:
        numbers = inputs["x"].tolist()
        self.calls.append(numbers)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await asyncio.sleep(0)  # others may come meanwhile
            if (waiting := self._before(numbers)) is not None:
                await waiting
        finally:
            self.running -= 1
        return {"y": inputs["x"] * 2}


def failing_on(*bad: int, status: grpc.StatusCode = grpc.StatusCode.INTERNAL) -> Callable[[Sequence[int]], None]:
    """For `Doubling`: calls that have one of these numbers fail, with a text that names it."""

    def before(numbers: Sequence[int]) -> None:
        for number in numbers:
            if number in bad:
                raise inference_error(status, f"can't double {number}")

    return before
