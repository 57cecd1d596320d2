"""A bulk job that somebody waits for: shown while it runs, ended by signals, told of at the end.

Lives here: what its process is for; when and how it is shown on stderr how far it is: as a bar, as lines of text or of
JSON, or not at all. Must not: do any of the work, or say what the numbers mean (tally.py).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from time import monotonic, monotonic_ns
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, TextIO, TypeVar

import click

from paceline.backends.base import Backend
from paceline.server.bulk.job import Job
from paceline.server.bulk.memory import give_back_when_freed, peak_bytes
from paceline.server.bulk.report import Outcome, Summary, amount, duration
from paceline.server.bulk.settings import BulkSettings
from paceline.server.bulk.tally import Figures, Pace, Tally
from paceline.server.bulk.values import BulkError, FlagError
from paceline.server.telemetry import log
from paceline.server.telemetry.log_output import StdoutError, drain_stderr, exit_now, take_stderr
from paceline.server.tuning import SWITCH_INTERVAL_S, new_loop

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["Progress", "dry_run_in_foreground", "run_in_foreground"]

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
        async with Progress(tally, progress, sys.stderr, monotonic_ns):
            log.configure("warning", "text")  # above the bar, if there is one
            logging.getLogger("paceline.server.inference").setLevel(logging.CRITICAL)  # rows at fault are recorded
            return await work(tally)

    told = asyncio.Runner(loop_factory=new_loop).run(run())
    drain_stderr()
    return told


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
    return Summary(outcome, why, settings, ended - began, computing_s, peak_bytes(), tally), status


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


_LOOK_S = 1.0


class _Display(Protocol):
    interval_s: float

    def show(self, tally: Tally, figures: Figures) -> None: ...

    def close(self) -> None: ...


class Progress:
    """An asynchronous context in which `tally` is shown on `out`, if there is one: when it begins, every now and then,
    and when it ends. `kind` is as `--progress` names them; "auto": a bar on a terminal, lines elsewhere. It draws on
    the event loop, so `out` mustn't block (`take_stderr`). While there is a bar, what Python writes to `sys.stderr`
    appears above it, so a log is to be configured within."""

    def __init__(self, tally: Tally, kind: str, out: TextIO | None, now_ns: Callable[[], int]) -> None:
        self._tally = tally
        self._now_ns = now_ns
        self._pace = Pace(now_ns())
        self._display = _display(kind, out)
        self._drawing: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        if self._display is not None:
            self.draw()
            self._drawing = asyncio.create_task(self._draw_on(self._display.interval_s))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._drawing is not None and self._display is not None:
            self._drawing.cancel()
            with suppress(asyncio.CancelledError):
                await self._drawing
            self.draw()
            self._display.close()

    def draw(self) -> None:
        """Show the numbers of now."""
        if self._display is not None:
            self._display.show(self._tally, self._pace.figures(self._tally, self._now_ns()))

    async def _draw_on(self, interval_s: float) -> None:
        slept_s, waited = 0.0, ""
        while True:
            await asyncio.sleep(min(interval_s, _LOOK_S))
            slept_s += _LOOK_S
            if slept_s >= interval_s or (self._tally.waiting and not waited):  # that it waits is told at once
                slept_s = 0.0
                self.draw()
            waited = self._tally.waiting


def _display(kind: str, out: TextIO | None) -> _Display | None:
    if out is None or kind == "none":
        return None
    if kind == "json":
        return _Lines(out, 1.0, _json)
    on_terminal = out.isatty() and os.environ.get("TERM") != "dumb"
    if kind == "bar" or (kind == "auto" and on_terminal):
        return _Bar(out)
    return _Lines(out, 10.0, _text)


class _Lines:
    def __init__(self, out: TextIO, interval_s: float, line: Callable[[Tally, Figures], str]) -> None:
        self._out, self.interval_s, self._line = out, interval_s, line

    def show(self, tally: Tally, figures: Figures) -> None:
        self._out.write(self._line(tally, figures) + "\n")
        self._out.flush()

    def close(self) -> None:
        pass


def _json(tally: Tally, figures: Figures) -> str:
    counts = {one.name: getattr(tally, one.name) for one in fields(tally) if one.name != "reasons"}
    numbers = asdict(figures) | counts
    return json.dumps({name: round(one, 4) if isinstance(one, float) else one for name, one in numbers.items()})


def _text(tally: Tally, figures: Figures) -> str:
    parts = filter(None, [*_parts(tally, figures), tally.waiting])
    return ": ".join(filter(None, [tally.doing, ", ".join(parts)]))


class _Bar:
    interval_s = 0.25

    def __init__(self, out: TextIO) -> None:
        from rich.console import Console
        from rich.live import Live

        self._live = Live(console=Console(file=out), auto_refresh=False, redirect_stdout=False)

    def show(self, tally: Tally, figures: Figures) -> None:
        if not self._live.is_started:
            self._live.start()
        self._live.update(self._picture(tally, figures), refresh=True)

    def close(self) -> None:
        self._live.stop()

    def _picture(self, tally: Tally, figures: Figures) -> RenderableType:
        from rich.console import Group
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        line = Table.grid(expand=True, padding=(0, 1))
        line.add_column(no_wrap=True)
        line.add_column(ratio=1)
        line.add_column(no_wrap=True)
        bar = ProgressBar(completed=100 * (figures.share or 0), pulse=figures.share is None)
        rows, *others = _parts(tally, figures) or [""]
        line.add_row(tally.doing, bar, rows)
        return Group(line, Text(", ".join(filter(None, [tally.waiting, *others])), overflow="ellipsis", no_wrap=True))


def _parts(tally: Tally, figures: Figures) -> list[str]:
    """What there is to say, the most important first: how many rows of how many, speed, time left, and so on."""
    about = "about " if figures.rows_are_estimated else ""
    parts = []
    if figures.share is not None:
        share = f"({100 * figures.share:.0f} %)"
        parts.append(f"{figures.rows_done:,} of {about}{figures.rows_total:,} rows {share}")
    if figures.rows_per_s is not None:
        parts.append(f"{amount(figures.rows_per_s)} rows/s")
    if figures.left_s is not None:
        parts.append(f"{about}{duration(figures.left_s)} left")
    # Calls of a row, such as generations, aren't batches.
    if figures.rows_per_batch is not None and figures.rows_per_batch > 1:
        parts.append(f"{amount(figures.rows_per_batch)} rows/batch")
    if tally.filled_elements and figures.padding is not None:
        parts.append(f"{100 * figures.padding:.1f} % padding")
    if bad := tally.rows_bad + tally.rows_bad_before:
        parts.append(f"{bad:,} bad")
    return parts
