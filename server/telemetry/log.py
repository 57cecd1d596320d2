"""Log lines: how they look, which are written, and what becomes of repeated ones.

Lives here: handlers, formats, and settings that may change while serving. Must not: loggers, which belong to the
modules, under `paceline.`, or where lines go (`log_output`). A line may have `extra={"fields": {...}}`, values by name,
which JSON lines show beside the message.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import SimpleNamespace, TracebackType
from typing import TextIO

from paceline.server.files import in_utf8

debugging = SimpleNamespace(on=False)
"""`on` while debug lines are written. For checks that every request makes: asking a logger takes 110 ns, this 15."""


_SURROGATES = range(0xD800, 0xE000)
_CONTROLS = {
    code: repr(chr(code))[1:-1]
    for code in (*range(32), *range(127, 160), 0x2028, 0x2029, *_SURROGATES)
    if code != ord("\t")
}
"""Text that a client sent must not end the line or move a terminal's cursor, and names of files needn't be UTF-8."""

_Raised = tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]


class _Text(logging.Formatter):
    converter = time.gmtime  # type: ignore[assignment]
    default_msec_format = "%s.%03dZ"
    default_time_format = "%Y-%m-%dT%H:%M:%S"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:
        return super().formatMessage(record).translate(_CONTROLS)

    def formatException(self, ei: _Raised) -> str:
        """Indented, as an exception's text may have lines that look like ours."""
        return "\n".join(f"    {line}".translate(_CONTROLS) for line in super().formatException(ei).split("\n"))


class _Json(_Text):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = logging.Formatter.formatException(self, record.exc_info)
        # Parsers refuse a lone surrogate, even if it is escaped.
        return json.dumps({name: in_utf8(one) if isinstance(one, str) else one for name, one in line.items()})


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Which lines are written, by level (`verbose_level` above 0: debug lines too), and how: as lines of text for
    `default` and `ISO8601`, which look the same, or as one `json` object each. Names and types are those of Triton's
    "logging" extension."""

    info: bool = True
    warning: bool = True
    error: bool = True
    verbose_level: int = 0
    format: str = "default"

    @property
    def threshold(self) -> int:
        """The least important level of which anything is written."""
        levels = (logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR)
        return next(filter(self.writes, levels), logging.CRITICAL + 1)

    def writes(self, level: int) -> bool:
        """Whether lines of `level` are written."""
        if level >= logging.ERROR:
            return self.error
        if level >= logging.WARNING:
            return self.warning
        return self.info if level >= logging.INFO else self.verbose_level > 0


_BY_LEVEL = {
    "debug": LogSettings(verbose_level=1),
    "info": LogSettings(),
    "warning": LogSettings(info=False),
    "error": LogSettings(info=False, warning=False),
}


_WINDOW_S = 10.0
_SIMILAR = 100
"""Different texts of one kind, such as one for each model, that may be written within a window."""

_Key = tuple[str, int, str, str]
_Kind = tuple[str, int, str]


@dataclass(slots=True)
class _Storm:
    """A line that was written, and how many like it haven't been since, until the window ends."""

    kind: _Kind
    text: str
    until_s: float
    count: int = 0


class RepeatFilter:
    """Decides which records are written. Warnings and errors of the same logger, level, text and exception class are
    the same: one per `window_s` is written, and at the end of that time, if there were more, one line with their
    number, through `write`. So a storm is one line a window, however long it lasts. Records below warnings always pass.
    """

    def __init__(
        self,
        write: Callable[[logging.LogRecord], None],
        window_s: float = _WINDOW_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._write = write
        self._window_s = window_s
        self._clock = clock
        self._lock = threading.Lock()
        self._storms: dict[_Key, _Storm] = {}
        self._timer: threading.Timer | None = None

    def lets_pass(self, record: logging.LogRecord) -> bool:
        """Whether to write `record` now; if not, it is counted."""
        if record.levelno < logging.WARNING:
            return True
        # Callers that put a text together themselves, as asyncio does with tasks' names, are identified by their place.
        template = str(record.msg) if record.args else f"{record.pathname}:{record.lineno}"
        kind = (record.name, record.levelno, template)
        text, error = record.getMessage(), record.exc_info and record.exc_info[0]
        name = error.__name__ if error else ""
        with self._lock:
            key = (kind[0], kind[1], text, name)
            if key not in self._storms and sum(one.kind == kind for one in self._storms.values()) >= _SIMILAR:
                key = (*kind, "")
            storm = self._storms.get(key)
            if storm is None or (not storm.count and storm.until_s <= self._clock()):
                self._forget_ended()
                self._storms[key] = _Storm(kind, text, self._clock() + self._window_s)
                return True
            storm.count += 1
            self._start_timer()
        return False

    def close(self) -> None:
        """Write all counts there are, now."""
        self.tell(float("inf"))

    def tell(self, now_s: float | None = None) -> None:
        """Write the counts of windows that have ended by `now_s`."""
        now_s = self._clock() if now_s is None else now_s
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            ended = [storm for storm in self._storms.values() if storm.count and storm.until_s <= now_s]
            summaries = []
            for storm in ended:
                # A new record: the one that was written may keep an exception alive, with all that led to it.
                text = f"%s (and %d more like this within {self._window_s:g} s)"
                summary = logging.LogRecord(*storm.kind[:2], "", 0, text, (storm.text, storm.count), None)
                summary.fields = {"repeated": storm.count}
                summaries.append(summary)
                storm.count, storm.until_s = 0, self._clock() + self._window_s
            if any(storm.count for storm in self._storms.values()):
                self._start_timer()
        for summary in summaries:
            self._write(summary)

    def _forget_ended(self) -> None:
        """Called before one is added, so that there are never more than those of one window."""
        now_s = self._clock()
        for key, storm in list(self._storms.items()):
            if not storm.count and storm.until_s <= now_s:
                del self._storms[key]

    def _start_timer(self) -> None:
        """Have a thread while there are counts to write; none while nothing goes wrong."""
        if self._timer is None:
            self._timer = threading.Timer(self._window_s, self.tell)
            self._timer.daemon = True
            self._timer.start()


class _Handler(logging.StreamHandler[TextIO]):
    def __init__(self, settings: LogSettings) -> None:
        super().__init__(sys.stderr)
        self.settings = settings
        self.setFormatter(_Json() if settings.format == "json" else _Text())
        self._storms = RepeatFilter(self._write)
        self.addFilter(lambda record: settings.writes(record.levelno) and self._storms.lets_pass(record))

    def _write(self, record: logging.LogRecord) -> None:
        """Write `record` past the filters."""
        with self.lock or nullcontext():
            self.emit(record)

    def close(self) -> None:
        self._storms.close()
        super().close()


def configure(level: str, form: str) -> None:
    """Log to stderr from `level` on, as `text` or one `json` object a line."""
    apply(replace(_BY_LEVEL[level], format="json" if form == "json" else "default"))


def apply(settings: LogSettings) -> None:
    """Log to stderr as `settings` say, from now on."""
    logger, ours = logging.getLogger("paceline"), _Handler(settings)
    before, logger.handlers = logger.handlers, [ours]
    for handler in before:
        if isinstance(handler, _Handler):
            handler.close()
    logger.setLevel(settings.threshold)
    debugging.on = settings.verbose_level > 0
    logger.propagate = False
    # asyncio and OpenTelemetry run for us and report what fails; by default, their lines bypass format, level and
    # bounds. Not gRPC's logger: nothing writes its lines, and they contain the values of headers.
    for others in map(logging.getLogger, ("asyncio", "opentelemetry")):
        others.handlers = [ours]
        others.propagate = False
        others.setLevel(max(settings.threshold, logging.WARNING))


def current() -> LogSettings:
    """How lines are written now; the defaults if the program that this is part of writes them in its own way."""
    handlers = logging.getLogger("paceline").handlers
    return next((one.settings for one in handlers if isinstance(one, _Handler)), LogSettings())
