"""A bulk job from its beginning to its end: which units are done at once, and what ends it early.

Lives here: the order of things. Must not: read, compute or write.

The planner goes through the input files ahead of the workers, so that it is known early how much there is to do. Each
worker does one unit at a time, of those that aren't finished.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING

from paceline.backends.base import Backend
from paceline.server.bulk.computing import Blocking, Computing, UnitWork
from paceline.server.bulk.fingerprint import Plain, fingerprint
from paceline.server.bulk.folder import JobFolder, Start, Totals
from paceline.server.bulk.report import DryRun
from paceline.server.bulk.settings import BulkSettings
from paceline.server.bulk.sources import find_source
from paceline.server.bulk.tally import Judge, Tally
from paceline.server.bulk.values import ALONE, BulkError, Fixed, Shard, Source, Unit, units_of

if TYPE_CHECKING:
    from paceline.server.bulk.on_ray import OnRay, RayUnits

__all__ = ["Job"]

_SEEN_S = 90.0
"""What others have written is seen after so long: NFS looks into a folder again after a minute at the latest."""


class Job:
    """A job, or one shard of it."""

    def __init__(
        self, settings: BulkSettings, tally: Tally, backend_of: Callable[[str], Backend] | None = None
    ) -> None:
        self._settings, self._tally, self._backend_of = settings, tally, backend_of
        self._blocking = Blocking(4)
        self.computing_since: float | None = None
        """When the model was there, by `monotonic`."""

    async def run(self) -> Totals | None:
        """Returns what the whole job has once all of it is finished; None while other shards have something to do.
        Raises BulkError; what is finished is kept then, as it is if this is cancelled."""
        settings, tally, blocking = self._settings, self._tally, self._blocking
        tally.doing = "listing files"
        source = await blocking(find_source, settings.inputs, settings.format or None, str(settings.out))
        facts = await blocking(fingerprint, settings)
        folder = JobFolder(str(settings.out), settings.output_format, Shard(*settings.shard))
        computing = self._computing(facts)
        try:
            fixed = await self._opened(folder, source, facts, computing)
            if folder.finished is not None:
                tally.units = tally.units_before = folder.finished.units
                tally.rows = tally.rows_before = folder.finished.rows + folder.finished.bad
                tally.rows_bad_before, tally.planned_share = folder.finished.bad, 1.0
                return folder.finished
            if not (await blocking(lambda: source.schema)).names:  # files of text without any row have none
                return await blocking(folder.finish, 0)
            tally.doing = "loading the model"
            judge = Judge(settings, tally, source)
            async with computing.units(source, folder, fixed, judge) as work:
                tally.doing, self.computing_since = "computing", monotonic()
                return await self._all_units(source, folder, fixed, work, judge)
        finally:
            await computing.close()
            folder.close()

    async def dry_run(self) -> DryRun:
        """What `run` would do. Changes nothing. Raises BulkError."""
        settings, blocking = self._settings, self._blocking
        self._tally.doing = "listing files"
        source = await blocking(find_source, settings.inputs, settings.format or None, str(settings.out))
        begun = None
        if settings.resumes:
            folder = JobFolder(str(settings.out), settings.output_format)
            begun = await blocking(folder.look, await blocking(fingerprint, settings), source.files)
        self._tally.doing = "trying batch sizes"
        return await Computing(settings, self._backend_of, say=self._waits).dry_run(source, begun)

    def _waits(self, why: str) -> None:
        self._tally.waiting = why

    def _computing(self, facts: Mapping[str, Plain]) -> Computing | OnRay:
        if not self._settings.ray:
            return Computing(self._settings, self._backend_of, say=self._waits)
        from paceline.server.bulk.on_ray import OnRay  # an extra

        return OnRay(self._settings, facts, self._tally)

    async def _opened(
        self, folder: JobFolder, source: Source, facts: Mapping[str, Plain], computing: Computing | OnRay
    ) -> Fixed:
        """What was fixed for the job, at its first start by what a probe of its first rows shows."""
        settings = self._settings
        start = Start.RETRY_BAD if settings.retries_bad else Start.RESUME
        start = start if settings.resumes else Start.ANEW
        open_with = partial(folder.open, facts, source.files, start=start)
        try:
            return await self._blocking(open_with, _not_begun)
        except _NotBegun:
            self._tally.doing = "trying batch sizes"
            fixed = await computing.choose(source)
            return await self._blocking(open_with, lambda: fixed)

    async def _all_units(
        self, source: Source, folder: JobFolder, fixed: Fixed, work: UnitWork | RayUnits, judge: Judge
    ) -> Totals | None:
        plan = _Plan(source, folder, fixed, self._tally, self._blocking)

        async def worker() -> None:
            while (unit := await plan.next()) is not None:
                mark = await work.do(unit, self._tally)
                self._tally.units_done += 1
                self._tally.rows_written += mark.rows

        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(plan.make())
                for _ in range(work.at_once):
                    group.create_task(worker())
        except* BulkError as errors:
            raise BulkError(str(errors.exceptions[0])) from errors.exceptions[0]
        until_s, finish = monotonic() + _SEEN_S, partial(folder.finish, plan.units, judge.of_all)
        while (totals := await self._blocking(finish)) is None and folder.shard == ALONE:
            if monotonic() >= until_s:
                raise BulkError(f"parts that were finished aren't in {folder.path} any more: start it again to do them")
            await asyncio.sleep(1.0)
        return totals


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


class _NotBegun(Exception):
    """Nothing is fixed yet."""


def _not_begun() -> Fixed:
    raise _NotBegun
