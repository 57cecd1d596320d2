"""What of a job needs its model: choosing how to compute, and doing units.

Lives here: opening the model, and trying it on the first rows. Must not: know which units there are, or what is done.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from time import monotonic_ns
from typing import NamedTuple

import pyarrow as pa

from paceline.backends.base import Backend
from paceline.clients.description import ModelDescription
from paceline.server.bulk.batches import batches
from paceline.server.bulk.columns import Columns
from paceline.server.bulk.dry_run import DryRun, counted
from paceline.server.bulk.folder import JobFolder
from paceline.server.bulk.memory import Probed, fixed_sizes, units_at_once
from paceline.server.bulk.models import EngineModel, engine_model
from paceline.server.bulk.probe import MOST_ROWS, Choice, Sample, choose, measure
from paceline.server.bulk.server_model import server_model
from paceline.server.bulk.settings import BulkSettings
from paceline.server.bulk.unit_work import Blocking, UnitWork
from paceline.server.bulk.values import (
    BadRow,
    BulkError,
    Chunk,
    Computes,
    Fixed,
    FlagError,
    Places,
    Source,
    Unit,
    units_of,
)
from paceline.server.bulk.writers import check_schema
from paceline.server.models.defaults import Offline

__all__ = ["Computing"]

_SAMPLE_ROWS = 4_096
_UNPROBED = Probed(
    batch_rows=32, rows_per_s=1_000.0, instances=0, intra_op_threads=0, input_row_bytes=0, output_row_bytes=0
)


class _Tried(NamedTuple):
    """What the job's first rows have shown. `bad` are those of them that the model can't be given."""

    choice: Choice
    description: ModelDescription
    output_schema: pa.Schema
    sample_rows: int
    bad: Sequence[BadRow]
    row_bytes: float
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
        return DryRun(
            settings,
            source,
            tried.description,
            tried.output_schema,
            fixed,
            rows,
            tried.sample_rows,
            tried.bad,
            tried.choice.measured.rows_per_s,
            units_before,
        )

    async def _try(self, source: Source, batch_rows: int, instances: int, *, rates: bool) -> _Tried:
        """Raises BulkError, and _NoRows."""
        settings = self._settings
        shown = list[tuple[ModelDescription, pa.Schema, Chunk, Sequence[BadRow], float]]()

        def sample_of(model: Computes) -> Sample:
            columns = self._columns(source, model)
            limits = fixed_sizes(_UNPROBED, settings.memory_bytes, _SAMPLE_ROWS)
            unit, chunk, job_rows = _first_chunk(source, columns.names, limits)
            rows = columns.rows(chunk)
            shown.append((model.description, columns.output_schema, chunk, [*chunk.bad, *rows.bad], job_rows))

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
        description, output_schema, chunk, bad, job_rows = shown[0]
        row_bytes = chunk.table.nbytes / max(1, chunk.table.num_rows)
        return _Tried(choice, description, output_schema, chunk.read_rows, bad, row_bytes, job_rows)

    def _fixed(self, tried: _Tried) -> Fixed:
        measured, offline = tried.choice.measured, tried.choice.offline
        probed = Probed(
            measured.batch_rows,
            measured.rows_per_s,
            offline.instances,
            offline.intra_op_threads,
            tried.row_bytes,
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
