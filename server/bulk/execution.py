"""From rows to their outputs, whatever goes wrong with some of them.

Lives here: which rows a call has after one has failed, how many calls there are at a time, and how often one is
repeated. Must not: arrays' contents, or what a model is.

After a call that fails, a first part of its rows is tried, of the part that has the fault again a first part, until it
is a row alone; what was put aside meanwhile is one call in the end, and is divided if that fails. No row is searched
for in a part that fails after one that has: it is divided at once. A part needn't be tried as a whole if all else of a
call that failed is good. Errors that aren't about the rows are waited out. Which rows are in a call depends on nothing
but the rows, so that results don't either.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import count
from time import monotonic

import grpc
import numpy as np

from paceline.backends.spec import Array
from paceline.clients.errors import InferenceError
from paceline.server.bulk.rows import Rows
from paceline.server.bulk.tally import Tally
from paceline.server.bulk.values import BulkError, Computed, Computes, Failed, Places, Results

__all__ = ["NOT_THE_ROWS", "Calls", "execute"]

_PARTS = 4
_FEW_ROWS = 32
"""Calls of fewer take about as long as those of half as many: halves are best, as they are the fewest calls. Of more
rows, a quarter is tried, as a part that fails has cost its time."""
_PATIENCE_S = 300.0
"""After so long without any answer, the job ends: it can be started again. A server may take that long to start."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.1, 10.0
_MOST_TRIES = 8
"""A call that a model has refused as too much so often, while it has answered others, is too much by itself."""

NOT_THE_ROWS = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.NOT_FOUND,
    }
)
"""What may be over soon: no instance or connection, a full queue, a server that ends, one that hasn't loaded all."""
_NOBODY = frozenset({grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED})


class Calls:
    """The calls of a job to `model` for `outputs`: at most `model.at_once` at a time over all units, of which the
    earliest go first. A call that fails with `NOT_THE_ROWS` is repeated, until the model hasn't answered for
    `patience_s`. Meanwhile it keeps its place, so that a model that is busy isn't asked more."""

    def __init__(
        self,
        model: Computes,
        outputs: Sequence[str],
        *,
        patience_s: float = _PATIENCE_S,
        first_wait_s: float = _FIRST_WAIT_S,
    ) -> None:
        self._model, self._outputs = model, outputs
        self._patience_s, self._first_wait_s = patience_s, first_wait_s
        self._free = model.at_once
        self._numbers = count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._answers, self._answered_at = 0, 0.0

    async def __call__(self, unit: int, inputs: Callable[[], Mapping[str, Array]]) -> Mapping[str, Array]:
        """The outputs for `inputs`, which are made when it is their turn. Raises InferenceError if they are at fault,
        and BulkError if the job can't go on."""
        async with self._turn(unit):
            given, tries, began, answers = inputs(), 0, monotonic(), self._answers
            while True:
                try:
                    outputs = await self._model.infer(given, self._outputs)
                except InferenceError as error:
                    tries += 1
                    if error.status in _NOBODY:
                        raise BulkError(str(error)) from error
                    too_much = error.status is grpc.StatusCode.RESOURCE_EXHAUSTED
                    if error.status not in NOT_THE_ROWS:
                        self._count_answer()  # the model is there
                        raise
                    if too_much and tries >= _MOST_TRIES and self._answers - answers >= _MOST_TRIES:
                        raise
                    silent_s = monotonic() - max(began, self._answered_at)
                    if silent_s >= self._patience_s:
                        name = self._model.description.name
                        text = f"model '{name}' has answered nothing for {silent_s:.0f} s; its last error: {error}"
                        raise BulkError(text) from error
                    longest_s = min(self._first_wait_s * 2 ** min(tries - 1, 20), _LONGEST_WAIT_S)
                    await asyncio.sleep(longest_s * random.uniform(0.5, 1.0))  # so that shards don't come together
                else:
                    self._count_answer()
                    return outputs

    def _count_answer(self) -> None:
        self._answers += 1
        self._answered_at = monotonic()

    @asynccontextmanager
    async def _turn(self, unit: int) -> AsyncIterator[None]:
        if self._free:  # then nobody waits
            self._free -= 1
        else:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (unit, next(self._numbers), turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._pass_on()
                raise
        try:
            yield
        finally:
            self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


async def execute(
    calls: Calls,
    unit: int,
    rows: Rows,
    batches: Sequence[Places],
    tally: Tally,
    on_failed: Callable[[Failed], None] = lambda failed: None,
) -> Results:
    """What the model makes of `batches` of a chunk's `rows`; each of them counts in `tally` at once. Raises BulkError,
    also if `on_failed` does, which is told of each row at fault as soon as it is found."""
    execution = _Execution(calls, unit, rows, tally, on_failed)
    tasks = [asyncio.ensure_future(execution.solve(places)) for places in batches]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return execution.results


class _Execution:
    """Of a chunk. An object, not functions in one that know each other: those would keep the chunk and its results in
    memory until the garbage collector comes."""

    def __init__(self, calls: Calls, unit: int, rows: Rows, tally: Tally, on_failed: Callable[[Failed], None]) -> None:
        self._calls, self._unit, self._rows, self._tally, self._on_failed = calls, unit, rows, tally, on_failed
        self.results = Results()

    async def solve(self, places: Places, *, searches: bool = True) -> bool:
        """Whether a row is at fault. Where such rows are dense, a search only adds calls to those of the parts."""
        if (error := await self._attempt(places)) is None:
            return False
        failing, aside, left = places, [places[:0]], places
        while searches and len(failing) > 1:
            # Among `failing` is a row at fault, whose `error` is known if it was a call; nothing is known of `aside`.
            part, others = np.split(failing, [len(failing) // (_PARTS if len(failing) > _FEW_ROWS else 2)])
            if (why := await self._attempt(part)) is not None:
                failing, error = part, why
                aside.append(others)
            else:
                failing, error = others, None
        if len(failing) == 1:
            if error is None:
                error = await self._attempt(failing)
            if error is not None:
                self._fail(failing, error)
            left = np.sort(np.concatenate(aside))
            if not len(left) or (error := await self._attempt(left)) is None:
                return True
            if len(left) == 1:
                self._fail(left, error)
                return True
        has_failed = not searches
        for part in np.array_split(left, min(_PARTS, len(left))):
            has_failed = await self.solve(part, searches=not has_failed)
        return True

    async def _attempt(self, places: Places) -> str | None:
        """Has them computed, or returns why that fails. The error itself would keep the frames that it has passed, and
        so the results, until the garbage collector comes."""
        rows, tally = self._rows, self._tally
        sizes, elements = rows.common_sizes(places), 0

        def inputs() -> Mapping[str, Array]:
            nonlocal elements
            taken = rows.take(places, sizes)
            elements = sum(array.size for array in taken.values())
            return taken

        try:
            outputs = await self._calls(self._unit, inputs)
        except InferenceError as error:
            return error.message
        self.results.computed.append(Computed(places, outputs, sizes))
        tally.executions += 1
        tally.rows_executed += len(places)
        tally.elements += elements
        tally.filled_elements += elements - rows.elements(places) if sizes else 0
        return None

    def _fail(self, places: Places, error: str) -> None:
        self.results.failed.append(Failed(int(places[0]), error))
        self._on_failed(self.results.failed[-1])
