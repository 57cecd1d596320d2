"""A bulk job that somebody waits for: shown while it runs, ended by signals, told of at the end.

Lives here: what its process is for. Must not: do any of the work.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from time import monotonic, monotonic_ns
from typing import TypeVar

import click

from paceline.backends.base import Backend
from paceline.server.bulk.job import Job
from paceline.server.bulk.memory import give_back_when_freed, peak_bytes
from paceline.server.bulk.progress import Progress, ProgressKind
from paceline.server.bulk.settings import BulkSettings
from paceline.server.bulk.summary import Outcome, Summary
from paceline.server.bulk.tally import Tally
from paceline.server.bulk.values import BulkError, FlagError
from paceline.server.telemetry import log
from paceline.server.telemetry.log_output import StdoutError, exit_now, take_stderr
from paceline.server.tuning import SWITCH_INTERVAL_S, new_loop

__all__ = ["dry_run_in_foreground", "run_in_foreground"]

T = TypeVar("T")

_END_S = 5.0
"""How long the units in progress may take to be dropped, once a signal asks for the end."""


def run_in_foreground(
    settings: BulkSettings,
    progress: str,
    summary: Path | None,
    backend_of: Callable[[str], Backend] | None,
) -> int:
    """Do the job, and return the exit status. `summary`: where to write it as JSON, too."""
    told, status = _shown(progress, lambda tally: _told(settings, tally, backend_of))
    lost = list[str]()
    if summary is not None:
        try:
            summary.write_text(told.as_json(), encoding="utf-8")
        except OSError as error:
            lost.append(f"--summary {summary} can't be written: {error.strerror}")
    try:
        click.echo(told.text(), err=status != 0)
    except (OSError, StdoutError) as error:
        lost.append(f"{told.text()}\nstdout can't be written: {error.strerror}")
    for text in lost:
        click.echo(text, err=True)
    return status or int(bool(lost))


def dry_run_in_foreground(settings: BulkSettings, progress: str, backend_of: Callable[[str], Backend] | None) -> int:
    """Say what the job would do, and return the exit status."""
    told, status = _shown(progress, lambda tally: _foretold(settings, tally, backend_of))
    click.echo(told, err=status != 0)
    return status


def _shown(progress: str, work: Callable[[Tally], Coroutine[object, object, T]]) -> T:
    """What `work` returns. What it counts is shown meanwhile. The process has to end at once then: an execution that
    was given up may go on."""
    give_back_when_freed()
    take_stderr()  # so that a terminal that stops doesn't stop the job
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    tally = Tally()

    async def run() -> T:
        async with Progress(tally, ProgressKind(progress), sys.stderr, monotonic_ns):
            log.configure("warning", "text")  # above the bar, if there is one
            logging.getLogger("paceline.server.inference").setLevel(logging.CRITICAL)  # rows at fault are recorded
            return await work(tally)

    return asyncio.Runner(loop_factory=new_loop).run(run())


async def _told(
    settings: BulkSettings, tally: Tally, backend_of: Callable[[str], Backend] | None
) -> tuple[Summary, int]:
    """What has become of the job, and the exit status that says so."""
    job, began = Job(settings, tally, backend_of), monotonic()
    outcome, why, status = Outcome.SHARD_FINISHED, "", 0
    try:
        done = await _until_signal(job.run())
    except BulkError as error:
        outcome, why, status = Outcome.FAILED, str(error), _status(error)
    else:
        if isinstance(done, signal.Signals):
            outcome, why, status = Outcome.STOPPED, f"by {done.name}", 128 + done
        elif done is not None:
            outcome = Outcome.FINISHED
    ended = monotonic()
    computing_s = ended - job.computing_since if job.computing_since else 0.0
    summary = Summary(
        outcome,
        why,
        settings.model,
        settings.out,
        settings.shard,
        ended - began,
        computing_s,
        peak_bytes(),
        tally,
    )
    return summary, status


async def _foretold(
    settings: BulkSettings, tally: Tally, backend_of: Callable[[str], Backend] | None
) -> tuple[str, int]:
    try:
        found = await _until_signal(Job(settings, tally, backend_of).dry_run())
    except BulkError as error:
        return f"failed: {error}", _status(error)
    return (f"stopped: by {found.name}", 128 + found) if isinstance(found, signal.Signals) else (found.text(), 0)


def _status(error: BulkError) -> int:
    return 2 if isinstance(error, FlagError) else 1


async def _until_signal(work: Coroutine[object, object, T]) -> T | signal.Signals:
    """What `work` returns, or the signal that has ended it before. A second signal ends the process."""
    stopped: asyncio.Future[signal.Signals] = asyncio.get_running_loop().create_future()

    def on_signal(number: int) -> None:
        if stopped.done():
            exit_now(128 + number)
        stopped.set_result(signal.Signals(number))

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    task = asyncio.create_task(work)
    await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
        task.cancel()
        await asyncio.wait((task,), timeout=_END_S)
    if not task.done() or task.cancelled():
        return stopped.result()
    return task.result()
