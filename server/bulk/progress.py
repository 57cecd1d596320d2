"""While a job runs: how far it is, on stderr, as a bar, as lines of text or of JSON, or not at all.

Lives here: when and how this is shown. Must not: what the numbers mean (tally.py).
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, fields
from enum import StrEnum
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, TextIO

from paceline.server.bulk.amounts import amount, duration
from paceline.server.bulk.tally import Figures, Pace, Tally

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["Progress", "ProgressKind"]


_LOOK_S = 1.0


class ProgressKind(StrEnum):
    """As `--progress` names them. `AUTO`: a bar on a terminal, lines elsewhere."""

    AUTO = "auto"
    BAR = "bar"
    LINES = "lines"
    JSON = "json"
    NONE = "none"


class _Display(Protocol):
    interval_s: float

    def show(self, tally: Tally, figures: Figures) -> None: ...

    def close(self) -> None: ...


class Progress:
    """An asynchronous context in which `tally` is shown on `out`, if there is one: when it begins, every now and then,
    and when it ends. It draws on the event loop, so `out` mustn't block (`take_stderr`). While there is a bar, what
    Python writes to `sys.stderr` appears above it, so a log is to be configured within."""

    def __init__(self, tally: Tally, kind: ProgressKind, out: TextIO | None, now_ns: Callable[[], int]) -> None:
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


def _display(kind: ProgressKind, out: TextIO | None) -> _Display | None:
    if out is None or kind is ProgressKind.NONE:
        return None
    if kind is ProgressKind.JSON:
        return _JsonLines(out)
    on_terminal = out.isatty() and os.environ.get("TERM") != "dumb"
    if kind is ProgressKind.BAR or (kind is ProgressKind.AUTO and on_terminal):
        return _Bar(out)
    return _Lines(out)


class _JsonLines:
    interval_s = 1.0

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def show(self, tally: Tally, figures: Figures) -> None:
        counts = {one.name: getattr(tally, one.name) for one in fields(tally) if one.name != "reasons"}
        numbers = asdict(figures) | counts
        rounded = {name: round(one, 4) if isinstance(one, float) else one for name, one in numbers.items()}
        self._out.write(json.dumps(rounded) + "\n")
        self._out.flush()

    def close(self) -> None:
        pass


class _Lines:
    interval_s = 10.0

    def __init__(self, out: TextIO) -> None:
        self._out = out

    def show(self, tally: Tally, figures: Figures) -> None:
        parts = filter(None, [*_parts(tally, figures), tally.waiting])
        self._out.write(": ".join(filter(None, [tally.doing, ", ".join(parts)])) + "\n")
        self._out.flush()

    def close(self) -> None:
        pass


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
    if (
        figures.rows_per_batch is not None and figures.rows_per_batch > 1
    ):  # calls of a row, such as generations, aren't batches
        parts.append(f"{amount(figures.rows_per_batch)} rows/batch")
    if tally.filled_elements and figures.padding is not None:
        parts.append(f"{100 * figures.padding:.1f} % padding")
    if bad := tally.rows_bad + tally.rows_bad_before:
        parts.append(f"{bad:,} bad")
    return parts
