"""What an actor of a bulk job does on its node: with an engine of its own, the units that the driver gives it.

Lives here: the check that this node sees the same model, input and output folder as the driver does. Must not: import
Ray, or know of other actors.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from logging.handlers import QueueHandler
from queue import SimpleQueue
from typing import NamedTuple

from paceline.server.bulk.computing import Blocking, Computing, UnitWork
from paceline.server.bulk.fingerprint import Plain, differences, files_differ, fingerprint
from paceline.server.bulk.folder import JobFolder, Mark
from paceline.server.bulk.memory import give_back_when_freed
from paceline.server.bulk.settings import BulkSettings, MaxBad
from paceline.server.bulk.sources import find_source
from paceline.server.bulk.tally import Judge, Tally
from paceline.server.bulk.values import BadRow, BulkError, Fixed, InputFile, Shard, Source, Unit

__all__ = ["Actor", "Chosen", "Done", "Errand"]


@dataclass(frozen=True, slots=True)
class Errand:
    """What all actors of a job are told: the driver's settings, the folder in which it was started, and what the job is
    recognised by. `cpus` are an actor's."""

    settings: BulkSettings
    home: str
    facts: Mapping[str, Plain]
    files: Sequence[InputFile]
    cpus: int


class Chosen(NamedTuple):
    """What is fixed for the job, and the warnings that were logged meanwhile."""

    fixed: Fixed
    warnings: Sequence[logging.LogRecord]


class Done(NamedTuple):
    """A unit that is committed, what was counted meanwhile, the first of its rows at fault, and the warnings that were
    logged since the last answer."""

    mark: Mark
    tally: Tally
    bad: BadRow | None
    warnings: Sequence[logging.LogRecord] = ()


class Actor:
    """Everything is awaited on the event loop that calls it. Its process is killed in the end, so nothing is closed."""

    def __init__(self, errand: Errand) -> None:
        give_back_when_freed()
        # Which share of all rows is at fault, the driver knows.
        self._settings = replace(errand.settings, ray="", max_bad=MaxBad(share=1.0))
        self._errand = errand
        self._blocking = Blocking(2)
        self._open = AsyncExitStack()
        self._work: asyncio.Task[UnitWork] | None = None
        self._first_bad: dict[int, BadRow] = {}
        # Nobody reads an actor's stderr: the driver logs them, as a job without Ray does.
        self._warnings = SimpleQueue[logging.LogRecord]()
        handler = QueueHandler(self._warnings)
        handler.setLevel(logging.WARNING)
        logging.getLogger("paceline").addHandler(handler)
        logging.getLogger("paceline.server.inference").setLevel(logging.CRITICAL)  # rows at fault are recorded

    async def ready(self) -> None:
        """Returns once there is an actor."""

    async def choose(self) -> Chosen:
        """As `Computing` does."""
        source = await self._blocking(self._listed)
        fixed = await Computing(self._errand.settings, cpus=self._errand.cpus).choose(source)
        return Chosen(fixed, self._logged())

    async def do(self, fixed: Fixed, sign: str, unit: Unit) -> Done:
        """Raises BulkError, also if `sign`, a file of the driver's, isn't seen."""
        if not await self._blocking(os.path.exists, sign):
            raise BulkError(
                f"{_here()} doesn't see {sign}, which the driver has written: expected an output folder that all nodes "
                "have under the same path"
            )
        if self._work is None:
            self._work = asyncio.create_task(self._begin(fixed))
        work, tally = await asyncio.shield(self._work), Tally()
        mark = await work.do(unit, tally)
        return Done(mark, tally, self._first_bad.pop(unit.number, None), self._logged())

    def _logged(self) -> Sequence[logging.LogRecord]:
        return [self._warnings.get_nowait() for _ in range(self._warnings.qsize())]

    async def _begin(self, fixed: Fixed) -> UnitWork:
        source, settings = await self._blocking(self._listed), self._settings
        folder = JobFolder(str(settings.out), settings.output_format, Shard(*settings.shard))
        judge = Judge(settings, Tally(), source)

        def judged(unit: Unit, bad: Sequence[BadRow]) -> None:
            if bad:
                self._first_bad.setdefault(unit.number, bad[0])
            judge(unit, bad)

        return await self._open.enter_async_context(Computing(settings).units(source, folder, fixed, judged))

    def _listed(self) -> Source:
        """The input. Raises BulkError if anything here isn't as the driver has it."""
        errand, settings = self._errand, self._settings
        try:
            os.chdir(errand.home)
        except OSError as error:
            raise BulkError(
                f"{_here()} can't go to {errand.home}, where the job was started: {error.strerror}; expected a folder "
                "that all nodes have"
            ) from error
        try:
            source = find_source(settings.inputs, settings.format or None, str(settings.out))
            facts = fingerprint(settings)
        except BulkError as error:
            raise BulkError(f"on {_here()}: {error}") from error
        theirs, ours = (_facts(files) for files in (errand.files, source.files))
        found = [*differences(errand.facts, facts), *files_differ(theirs, ours)]
        if found:
            raise BulkError(f"{_here()} has another model or input than the driver, whose job is {'; '.join(found)}")
        return source


def _facts(files: Sequence[InputFile]) -> Sequence[Sequence[str | int]]:
    return [(file.path, file.size_bytes, file.changed_ns) for file in files]


def _here() -> str:
    return f"node {socket.gethostname()}"
