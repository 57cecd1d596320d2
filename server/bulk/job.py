"""A bulk job from its beginning to its end: which units are done at once, and what ends it early.

Lives here: the order of things. Must not: read, compute or write.

The planner goes through the input files ahead of the workers, so that it is known early how much there is to do. Each
worker does one unit at a time, of those that aren't finished.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

from paceline.backends.base import Backend
from paceline.server.bulk.batches import batches
from paceline.server.bulk.columns import Columns
from paceline.server.bulk.fingerprint import fingerprint
from paceline.server.bulk.folder import JobFolder, Start, Totals
from paceline.server.bulk.models import EngineModel, engine_model
from paceline.server.bulk.plan import Shard, units_of
from paceline.server.bulk.probe import MOST_ROWS, Sample, choose
from paceline.server.bulk.settings import BulkSettings
from paceline.server.bulk.sizing import Probed, fixed_sizes, units_at_once
from paceline.server.bulk.sources import find_source
from paceline.server.bulk.tally import Tally
from paceline.server.bulk.unit_work import Blocking, UnitWork
from paceline.server.bulk.values import BadRow, BulkError, Chunk, Computes, Fixed, Places, Source, Unit
from paceline.server.bulk.writers import check_schema
from paceline.server.models.defaults import Offline

__all__ = ["Job"]

_SAMPLE_ROWS = 4_096
_UNPROBED = Probed(
    batch_rows=32, rows_per_s=1_000.0, instances=0, intra_op_threads=0, input_row_bytes=0, output_row_bytes=0
)


class Job:
    """A job, or one shard of it."""

    def __init__(
        self, settings: BulkSettings, tally: Tally, backend_of: Callable[[str], Backend] | None = None
    ) -> None:
        self._settings, self._tally, self._backend_of = settings, tally, backend_of
        self._blocking = Blocking(4)

    async def run(self) -> Totals | None:
        """Returns what the whole job has once all of it is finished; None while other shards have something to do.
        Raises BulkError; what is finished is kept then, as it is if this is cancelled."""
        settings, tally, blocking = self._settings, self._tally, self._blocking
        tally.doing = "listing files"
        source = await blocking(find_source, settings.inputs, settings.format or None, str(settings.out))
        folder = JobFolder(str(settings.out), settings.output_format, Shard(*settings.shard))
        try:
            fixed = await self._opened(folder, source)
            if folder.finished is not None:
                tally.units = tally.units_before = folder.finished.units
                tally.rows = tally.rows_before = folder.finished.rows + folder.finished.bad
                tally.rows_bad_before, tally.planned_share = folder.finished.bad, 1.0
                return folder.finished
            tally.doing = "loading the model"
            async with self._model(Offline(fixed.instances, fixed.intra_op_threads)) as model:
                columns = self._columns(source, model)
                tally.doing = "computing"
                return await self._all_units(source, columns, model, folder, fixed)
        finally:
            folder.close()

    async def _opened(self, folder: JobFolder, source: Source) -> Fixed:
        """What was fixed for the job, at its first start by what a probe of its first rows shows."""
        settings = self._settings
        facts = await self._blocking(fingerprint, settings)
        start = Start.RETRY_BAD if settings.retries_bad else Start.RESUME
        start = start if settings.resumes else Start.ANEW
        open_with = partial(folder.open, facts, source.files, start=start)
        try:
            return await self._blocking(open_with, _not_begun)
        except _NotBegun:
            fixed = await self._chosen(source)
            return await self._blocking(open_with, lambda: fixed)

    async def _chosen(self, source: Source) -> Fixed:
        """Raises BulkError for what would be wrong with any row, too: nothing is begun then."""
        settings = self._settings
        self._tally.doing = "trying batch sizes"
        row_bytes = 0.0

        def sample_of(model: EngineModel) -> Sample:
            nonlocal row_bytes
            columns = self._columns(source, model)
            limits = fixed_sizes(_UNPROBED, settings.memory_bytes, _SAMPLE_ROWS)
            chunk = _first_chunk(source, columns.names, limits)
            row_bytes = chunk.table.nbytes / max(1, chunk.table.num_rows)
            rows = columns.rows(chunk)

            def of_most(batch_rows: int) -> Sequence[Places]:
                most = replace(limits, batch_rows=batch_rows)
                return batches(rows, most, by_length=settings.sort_by_length, max_elements=model.max_elements)

            return Sample(rows, columns.outputs, of_most)

        try:
            choice = await choose(
                self._model,
                sample_of,
                batch_rows=settings.batch_rows,
                instances=settings.instances,
                rates=not (settings.batch_rows and settings.instances and settings.unit_rows),
            )
        except _NoRows:
            return fixed_sizes(_UNPROBED, settings.memory_bytes, settings.unit_rows)
        measured, offline = choice.measured, choice.offline
        probed = Probed(
            measured.batch_rows,
            measured.rows_per_s,
            offline.instances,
            offline.intra_op_threads,
            row_bytes,
            measured.output_row_bytes,
        )
        return fixed_sizes(probed, settings.memory_bytes, settings.unit_rows)

    def _model(self, offline: Offline) -> AbstractAsyncContextManager[EngineModel]:
        settings = self._settings
        return engine_model(
            Path(settings.model),
            max_rows=settings.batch_rows or MOST_ROWS,
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
            raise BulkError(f"--batch: {expected}, got {settings.batch_rows}")
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

    async def _all_units(
        self, source: Source, columns: Columns, model: Computes, folder: JobFolder, fixed: Fixed
    ) -> Totals | None:
        plan = _Plan(source, folder, fixed, self._tally, self._blocking)
        at_once = units_at_once(fixed, self._settings.memory_bytes)
        work = UnitWork(
            source,
            columns,
            model,
            folder,
            fixed,
            by_length=self._settings.sort_by_length,
            tally=self._tally,
            judge=partial(self._judge, source),
            blocking=Blocking(at_once),
        )

        async def worker() -> None:
            while (unit := await plan.next()) is not None:
                mark = await work.do(unit)
                self._tally.units_done += 1
                self._tally.rows_written += mark.rows

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(plan.make())
                for _ in range(at_once):
                    group.create_task(worker())
        except* BulkError as errors:
            raise BulkError(str(errors.exceptions[0])) from errors.exceptions[0]
        return await self._blocking(folder.finish, plan.units)

    def _judge(self, source: Source, unit: Unit, bad: Sequence[BadRow]) -> None:
        """Raises BulkError if the job ends because of rows at fault, of which `bad` are new."""
        if not bad:
            return
        settings, tally = self._settings, self._tally
        file, row = source.place(unit.file, bad[0].number)
        if settings.fails_on_bad:
            raise BulkError(f"{file}, row {row}: {bad[0].reason}")
        count, read = tally.rows_bad_before + tally.rows_bad, tally.rows_before + tally.rows_read
        if settings.max_bad.is_exceeded(count, read):
            raise BulkError(
                f"{count:,} of {read:,} rows are at fault, more than {settings.max_bad} (--max-bad); the last of them, "
                f"{file}, row {row}: {bad[0].reason}"
            )


class _Plan:
    """The units of the job that this shard has still to do. `units` counts those of all shards."""

    def __init__(self, source: Source, folder: JobFolder, fixed: Fixed, tally: Tally, blocking: Blocking) -> None:
        self._source, self._folder, self._fixed = source, folder, fixed
        self._tally, self._blocking = tally, blocking
        self.units = 0
        self._left: deque[Unit] = deque()
        self._ended = False
        self._changed = asyncio.Condition()

    async def make(self) -> None:
        """Go through all files. Raises BulkError."""
        tally, done = self._tally, self._folder.done
        tally.units_before = len(done)
        tally.rows_before = sum(mark.rows + mark.bad for mark in done.values())
        tally.rows_bad_before = sum(mark.bad for mark in done.values())
        whole, planned = sum(file.size_bytes for file in self._source.files), 0
        for file in self._source.files:
            measure = partial(self._source.index, file, self._fixed.unit_rows)
            index = await self._blocking(self._folder.index, file, measure)
            found = units_of(file, index, self._fixed.unit_rows, self.units)
            mine = [unit for unit in found if self._folder.shard.has(unit.number)]
            self.units += len(found)
            planned += file.size_bytes
            tally.units += len(mine)
            tally.rows += sum(unit.end - unit.begin for unit in mine)
            tally.planned_share = planned / whole if whole else 1.0
            async with self._changed:
                self._left.extend(unit for unit in mine if unit.number not in done)
                self._changed.notify_all()
        async with self._changed:
            self._ended, tally.planned_share = True, 1.0
            self._changed.notify_all()

    async def next(self) -> Unit | None:
        async with self._changed:
            await self._changed.wait_for(lambda: self._left or self._ended)
            return self._left.popleft() if self._left else None


def _first_chunk(source: Source, columns: Sequence[str], limits: Fixed) -> Chunk:
    """The first rows of the input that could be read. Raises _NoRows."""
    for file in source.files:
        for unit in units_of(file, source.index(file, limits.unit_rows), limits.unit_rows, 0):
            for chunk in source.chunks(unit, columns, limits):
                if chunk.table.num_rows:
                    return chunk
    raise _NoRows


class _NoRows(Exception):
    """The input has none that could be read."""


class _NotBegun(Exception):
    """Nothing is fixed yet."""


def _not_begun() -> Fixed:
    raise _NotBegun
