"""A bulk job that somebody waits for: shown while it runs, ended by signals, told of at the end.

Lives here: what its process is for. Must not: do any of the work.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from time import monotonic, monotonic_ns

import click

from paceline.backends.base import Backend
from paceline.server.bulk.job import Job
from paceline.server.bulk.progress import Progress, ProgressKind
from paceline.server.bulk.settings import BulkSettings
from paceline.server.bulk.summary import Outcome, Summary, peak_memory_bytes
from paceline.server.bulk.tally import Tally
from paceline.server.bulk.values import BulkError
from paceline.server.telemetry import log
from paceline.server.telemetry.log_output import exit_now, take_stderr
from paceline.server.tuning import SWITCH_INTERVAL_S, new_loop

__all__ = ["run_in_foreground"]

_END_S = 5.0
"""How long the units in progress may take to be dropped, once a signal asks for the end."""


def run_in_foreground(
    settings: BulkSettings,
    progress: str,
    summary: Path | None,
    backend_of: Callable[[str], Backend] | None,
) -> int:
    """Do the job, and return the exit status, with which the process has to end at once: an execution that was given
    up may go on. `summary`: where to write it as JSON, too."""
    take_stderr()  # so that a terminal that stops doesn't stop the job
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    told, status = asyncio.Runner(loop_factory=new_loop).run(_told(settings, ProgressKind(progress), backend_of))
    click.echo(told.text(), err=status != 0)
    if summary is not None:
        summary.write_text(told.as_json(), encoding="utf-8")
    return status


async def _told(
    settings: BulkSettings, kind: ProgressKind, backend_of: Callable[[str], Backend] | None
) -> tuple[Summary, int]:
    """What has become of the job, and the exit status that says so."""
    stopped: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    def on_signal(number: int) -> None:
        if stopped.done():
            exit_now(128 + number)
        stopped.set_result(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, on_signal, number)
    tally, began = Tally(), monotonic()
    async with Progress(tally, kind, sys.stderr, monotonic_ns):
        log.configure("warning", "text")  # above the bar, if there is one
        logging.getLogger("paceline.server.inference").setLevel(logging.CRITICAL)  # rows at fault are recorded
        job = asyncio.create_task(Job(settings, tally, backend_of).run())
        await asyncio.wait((job, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not job.done():
            job.cancel()
            await asyncio.wait((job,), timeout=_END_S)
    outcome, why, status = Outcome.STOPPED, "", 0
    if not job.done() or job.cancelled():
        why, status = f"by {signal.Signals(stopped.result()).name}", 128 + stopped.result()
    elif isinstance(error := job.exception(), BulkError):
        outcome, why, status = Outcome.FAILED, str(error), 1
    else:
        outcome = Outcome.FINISHED if job.result() is not None else Outcome.SHARD_FINISHED
    elapsed_s = monotonic() - began
    summary = Summary(
        outcome, why, settings.model, settings.out, settings.shard, elapsed_s, elapsed_s, peak_memory_bytes(), tally
    )
    return summary, status
