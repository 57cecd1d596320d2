"""Doing one unit of a job: read, computed, written and committed, chunk by chunk.

Lives here: the way of a chunk, and who blocks where. Must not: know which units there are, or when a job ends.

Reading, converting and writing block, and so run on threads; executions are awaited on the event loop. A unit holds one
chunk at a time: what bounds a job's memory is how many units are done at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar, TypeVarTuple

from paceline.server.bulk.batches import batches
from paceline.server.bulk.columns import Columns
from paceline.server.bulk.execution import Calls, execute
from paceline.server.bulk.folder import JobFolder, Mark, Part
from paceline.server.bulk.tally import Tally
from paceline.server.bulk.values import BadRow, BulkError, Chunk, Computes, Fixed, Source, Table, Unit

__all__ = ["Blocking", "UnitWork"]

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class Blocking:
    """Calls that block, on threads. Cancelling one waits for its end, as whoever cancels closes what it uses."""

    def __init__(self, threads: int) -> None:
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="bulk")

    async def __call__(self, what: Callable[[*Ts], T], *arguments: *Ts) -> T:
        future = asyncio.get_running_loop().run_in_executor(self._threads, what, *arguments)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise


class UnitWork:
    """What it takes to do units, `at_once` of them at a time, while others wait: in the job's own process, or in one
    that works for it.
    `judge` is called with rows at fault as they are found, and ends the job by raising BulkError."""

    def __init__(
        self,
        source: Source,
        columns: Columns,
        model: Computes,
        folder: JobFolder,
        fixed: Fixed,
        *,
        by_length: bool,
        judge: Callable[[Unit, Sequence[BadRow]], None],
        at_once: int,
    ) -> None:
        self._source, self._columns, self._folder, self._fixed = source, columns, folder, fixed
        self._calls, self._max_elements = Calls(model, columns.outputs), model.max_elements
        self._by_length, self._judge, self.at_once, self._blocking = by_length, judge, at_once, Blocking(at_once)
        self._places = asyncio.Semaphore(at_once)

    async def do(self, unit: Unit, tally: Tally) -> Mark:
        """Read, compute, write and commit it, and count in `tally` what was read and computed. Raises BulkError. If it
        ends early, nothing of it is left but a record of the rows at fault that were found."""
        async with self._places:
            blocking, bad = self._blocking, list[BadRow]()
            chunks = self._source.chunks(unit, self._columns.names, self._fixed)
            parts = list[Part]()  # whatever is opened is dropped, also if this is cancelled meanwhile

            def opened() -> Part:
                parts.append(self._folder.part(unit, self._columns.output_schema, self._fixed))
                return parts[0]

            try:
                part = await blocking(opened)
                while (chunk := await blocking(next, chunks, None)) is not None:
                    table = await self._computed(unit, chunk, tally, bad)
                    await blocking(part.write, table.batch)
                return await blocking(self._folder.commit, unit, part, bad, self._source.place)
            except BaseException:
                if bad:
                    with suppress(BulkError):  # what has ended it says more
                        await blocking(self._folder.record, unit, bad, self._source.place)
                raise
            finally:
                await blocking(_end, chunks, parts)  # of no effect on what was committed

    async def _computed(self, unit: Unit, chunk: Chunk, tally: Tally, found: list[BadRow]) -> Table:
        """What is to be written of `chunk`. Adds to `found` its rows at fault, at once."""
        rows, told = await self._blocking(self._columns.rows, chunk), set[int]()
        tally.rows_read += chunk.read_rows

        def tell(bad: Sequence[BadRow]) -> None:
            new = [row for row in bad if row.number not in told]
            told.update(row.number for row in new)
            found.extend(new)
            tally.add_bad(new)
            self._judge(unit, new)

        tell([*chunk.bad, *rows.bad])
        # Of lengths, to choose takes some microseconds a row.
        choose = partial(batches, rows, self._fixed, by_length=self._by_length, max_elements=self._max_elements)
        results = await execute(
            self._calls,
            unit.number,
            rows,
            await self._blocking(choose),
            tally,
            lambda failed: tell([BadRow(int(chunk.numbers[failed.place]), failed.reason)]),
        )
        table = await self._blocking(self._columns.table, chunk, rows, results)
        tell(table.bad)
        return table


def _end(chunks: Iterator[Chunk], parts: Sequence[Part]) -> None:
    for part in parts:
        part.drop()
    chunks.close()  # type: ignore[attr-defined]  # a generator's, as all sources return them
