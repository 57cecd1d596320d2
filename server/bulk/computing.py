"""What of a job needs its model: choosing how to compute, and doing units, chunk by chunk.

Lives here: opening the model, and trying it on the first rows; the way of a chunk, and who blocks where. Must not: know
which units there are, what is done, or when a job ends.

Reading, converting and writing block, and so run on threads; executions are awaited on the event loop. A unit holds one
chunk at a time: what bounds a job's memory is how many units are done at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import monotonic_ns
from typing import NamedTuple, TypeVar, TypeVarTuple

from paceline.backends.base import Backend
from paceline.server.bulk.batches import batches
from paceline.server.bulk.columns import Columns
from paceline.server.bulk.execution import Calls, execute
from paceline.server.bulk.folder import JobFolder, Mark, Part
from paceline.server.bulk.memory import Probed, fixed_sizes, units_at_once
from paceline.server.bulk.models import MOST_ROWS, EngineModel, engine_model, server_model
from paceline.server.bulk.probe import PLAIN_ROWS, Choice, Sample, choose, measure
from paceline.server.bulk.report import DryRun, counted
from paceline.server.bulk.settings import BulkSettings
from paceline.server.bulk.tally import Tally
from paceline.server.bulk.values import (
    BadRow,
    BulkError,
    Chunk,
    Computes,
    Failed,
    Fixed,
    FlagError,
    Places,
    Source,
    Table,
    Unit,
    units_of,
)
from paceline.server.bulk.writers import check_schema
from paceline.server.models.defaults import Offline

__all__ = ["Blocking", "Computing", "UnitWork"]

_log = logging.getLogger(__name__)

_SAMPLE_ROWS = 4_096
_LONGEST_S = 10.0
"""How long a dry run looks for rows that make the model fail."""
_UNPROBED = Probed(
    batch_rows=PLAIN_ROWS, rows_per_s=1_000.0, instances=0, intra_op_threads=0, input_row_bytes=0, output_row_bytes=0
)


class _Tried(NamedTuple):
    """What the job's first rows, a `chunk` of about `job_rows`, have shown."""

    choice: Choice
    chunk: Chunk
    job_rows: float


class Computing:
    """A job's model in this process, which may use so many `cpus`; 0: all. `say` is told why a server is waited for,
    and "" when it answers."""

    def __init__(
        self,
        settings: BulkSettings,
        backend_of: Callable[[str], Backend] | None = None,
        *,
        cpus: int = 0,
        say: Callable[[str], None] = lambda why: None,
    ) -> None:
        self._settings, self._backend_of, self._cpus, self._say = settings, backend_of, cpus, say

    async def choose(self, source: Source) -> Fixed:
        """Raises BulkError for what would be wrong with any row, too: nothing is begun then."""
        settings = self._settings
        rates = not (settings.batch_rows and settings.instances and settings.unit_rows)
        try:
            if source.schema.names:  # files of text without any row have none
                return self._fixed(await self._try(source, settings.batch_rows, settings.instances, rates=rates))
        except _NoRows:
            pass
        unprobed = replace(_UNPROBED, batch_rows=settings.batch_rows or _UNPROBED.batch_rows)
        return fixed_sizes(unprobed, settings.memory_bytes, settings.unit_rows)

    async def dry_run(self, source: Source, begun: tuple[Fixed, int] | None) -> DryRun:
        """`begun`: what is fixed, and how many units are finished. Raises BulkError as `choose` does, and if there is
        nothing to try."""
        settings = self._settings
        before, units_before = begun or (None, 0)
        batch_rows = settings.batch_rows if before is None else before.batch_rows
        instances = settings.instances if before is None else before.instances
        try:
            tried = await self._try(source, batch_rows, instances, rates=True)
        except _NoRows:
            raise BulkError("the input has no rows that can be read, so nothing can be tried") from None
        fixed = before or self._fixed(tried)
        rows = await Blocking(1)(counted, source, fixed.unit_rows, monotonic_ns)
        async with self._model(Offline(fixed.instances, fixed.intra_op_threads), fixed.batch_rows) as model:
            columns, chunk, tally = self._columns(source, model), tried.chunk, Tally()
            given = columns.rows(chunk)
            bad = [*chunk.bad, *given.bad]
            calls = batches(given, fixed, by_length=settings.sort_by_length, max_elements=model.max_elements)

            def tell(failed: Failed) -> None:
                bad.append(BadRow(int(chunk.numbers[failed.place]), failed.reason))

            with suppress(TimeoutError):  # what was found until then is told
                async with asyncio.timeout(_LONGEST_S):
                    results = await execute(Calls(model, columns.outputs), 0, given, calls, tally, tell)
                    bad = columns.table(chunk, given, results).bad  # also those whose outputs can't be written
            return DryRun(
                settings,
                source,
                model.description,
                columns.output_schema,
                fixed,
                rows,
                chunk.read_rows,
                min(chunk.read_rows, tally.rows_executed + len(bad)),
                bad,
                tried.choice.measured.rows_per_s,
                units_before,
            )

    async def _try(self, source: Source, batch_rows: int, instances: int, *, rates: bool) -> _Tried:
        """Raises BulkError, and _NoRows."""
        settings = self._settings
        shown = list[tuple[Chunk, float]]()

        def sample_of(model: Computes) -> Sample:
            columns = self._columns(source, model)
            limits = fixed_sizes(_UNPROBED, settings.memory_bytes, _SAMPLE_ROWS)
            unit, chunk, job_rows = _first_chunk(source, columns.names, limits)
            rows = columns.rows(chunk)
            shown.append((chunk, job_rows))

            def of_most(batch_rows: int) -> Sequence[Places]:
                most = replace(limits, batch_rows=batch_rows)
                return batches(rows, most, by_length=settings.sort_by_length, max_elements=model.max_elements)

            def read() -> None:
                for again in source.chunks(unit, columns.names, limits):
                    columns.rows(again)

            return Sample(rows, columns.outputs, of_most, job_rows, read, limits.chunk_bytes)

        if settings.server:  # which has the instances that it has, and is asked for full batches
            async with self._model(Offline()) as model:
                most = batch_rows or max(1, model.max_rows)
                sample = sample_of(model)
                measured = await measure(model, sample, [most], rates=rates)
                choice = Choice(Offline(), measured.with_faults(sample.faults))
        else:
            choice = await choose(
                self._engine, sample_of, batch_rows=batch_rows, instances=instances, cpus=self._cpus, rates=rates
            )
        chunk, job_rows = shown[0]
        measured = choice.measured
        if not measured.rows_per_s:
            rows = chunk.read_rows - measured.untried_rows
            which = f"{rows:,} rows tried" if measured.untried_rows else f"first {rows:,} rows"
            why = f"none of the {which} could be computed: {measured.reason}"
            if job_rows <= rows and settings.max_bad.is_exceeded(rows, rows, are_all=True):
                raise BulkError(why)
            _log.warning("%s; --max-bad says when that ends the job", why)
        return _Tried(choice, chunk, job_rows)

    def _fixed(self, tried: _Tried) -> Fixed:
        measured, offline, table = tried.choice.measured, tried.choice.offline, tried.chunk.table
        probed = Probed(
            measured.batch_rows,
            measured.rows_per_s or _UNPROBED.rows_per_s,
            offline.instances,
            offline.intra_op_threads,
            table.nbytes / max(1, table.num_rows),
            measured.output_row_bytes,
            tried.job_rows,
        )
        settings = self._settings
        return fixed_sizes(probed, settings.memory_bytes, settings.unit_rows, by_length=settings.sort_by_length)

    async def close(self) -> None:
        """Nothing is open between calls."""

    @asynccontextmanager
    async def units(
        self, source: Source, folder: JobFolder, fixed: Fixed, judge: Callable[[Unit, Sequence[BadRow]], None]
    ) -> AsyncIterator[UnitWork]:
        """Does units of the job, as long as this is open. Raises BulkError."""
        settings = self._settings
        async with self._model(Offline(fixed.instances, fixed.intra_op_threads), fixed.batch_rows) as model:
            columns = self._columns(source, model)
            held_bytes = await Blocking(1)(source.held_bytes, columns.names)
            yield UnitWork(
                source,
                columns,
                model,
                folder,
                fixed,
                by_length=settings.sort_by_length,
                judge=judge,
                at_once=units_at_once(fixed, settings.memory_bytes, held_bytes),
            )

    def _model(self, offline: Offline, batch_rows: int = 0) -> AbstractAsyncContextManager[Computes]:
        """`batch_rows`: once they are known."""
        settings = self._settings
        if not settings.server:
            return self._engine(offline, batch_rows)
        return server_model(
            settings.server,
            settings.model,
            access=settings.access,
            parameters=settings.parameters,
            batch_rows=batch_rows or settings.batch_rows,
            say=self._say,
        )

    def _engine(self, offline: Offline, batch_rows: int = 0) -> AbstractAsyncContextManager[EngineModel]:
        settings = self._settings
        return engine_model(
            Path(settings.model),
            max_rows=batch_rows or settings.batch_rows or MOST_ROWS,
            offline=offline,
            parameters=settings.parameters,
            execution_timeout_s=settings.execution_timeout_s,
            allow_python_models=settings.allow_python_models,
            backend_of=self._backend_of,
        )

    def _columns(self, source: Source, model: Computes) -> Columns:
        settings = self._settings
        if settings.batch_rows > max(1, model.max_rows):
            expected = f"expected at most {max(1, model.max_rows)}, the model's max_batch_size"
            raise FlagError(f"--batch: {expected}, got {settings.batch_rows}")
        columns = Columns(
            model.description,
            source.schema,
            map=settings.columns,
            keep=settings.keep,
            outputs=settings.outputs,
            binary=settings.binary,
            lengths=model.lengths,
        )
        check_schema(settings.output_format, columns.output_schema)
        return columns


def _first_chunk(source: Source, columns: Sequence[str], limits: Fixed) -> tuple[Unit, Chunk, float]:
    """The first rows of the input that could be read, with their unit, and about how many there are in all, going by
    their file, or the first that is as large as most are: of a small one, much isn't rows. Raises _NoRows."""
    all_bytes = sum(file.size_bytes for file in source.files)
    for file in source.files:
        index = source.index(file, limits.unit_rows)
        for unit in units_of(file, index, limits.unit_rows, 0):
            for chunk in source.chunks(unit, columns, limits):
                if rows := chunk.table.num_rows:
                    usual = next(
                        one for one in (file, *source.files) if one.size_bytes * len(source.files) >= all_bytes
                    )
                    if usual is not file:
                        index = source.index(usual, limits.unit_rows)
                    return unit, chunk, max(rows, index.rows * all_bytes / max(1, usual.size_bytes))
    raise _NoRows


class _NoRows(Exception):
    """The input has none that could be read."""


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
