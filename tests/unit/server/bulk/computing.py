"""What stands in for a model, and rows for it, where a test looks at the calls alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

import grpc
import numpy as np
import pyarrow as pa

from paceline.backends.spec import Array
from paceline.clients.description import Batching, ModelDescription
from paceline.clients.errors import inference_error
from paceline.clients.messages import TensorMetadata
from paceline.server.bulk.columns import Columns
from paceline.server.bulk.rows import Rows
from paceline.server.bulk.values import Chunk, Places

__all__ = ["DESCRIPTION", "Doubling", "failing_on", "numbers", "places"]

DESCRIPTION = ModelDescription(
    "m",
    ("1",),
    "memory",
    (TensorMetadata("x", "INT64", (-1,)),),
    (TensorMetadata("y", "INT64", (-1,)),),
    is_configured=True,
    batching=Batching(64, True, (), 0, 0, 0, ()),
)


def places(*numbers: int) -> Places:
    return np.array(numbers, np.int64)


def numbers(begin: int, end: int) -> Rows:
    """Rows that are these numbers, as input `x`."""
    table = pa.record_batch({"x": pa.array(range(begin, end), pa.int64())})
    return Columns(DESCRIPTION, table.schema).rows(Chunk(table, np.arange(end - begin)))


class Doubling:
    """`Computes` that doubles numbers, unless `before`, which gets a call's numbers, raises. `calls` are all calls'."""

    description = DESCRIPTION
    lengths = None
    batch_sizes: Sequence[int] = ()
    max_elements = 0

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
