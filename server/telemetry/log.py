"""Log lines: where they go and how they look.

Lives here: handlers, formats, and settings that may change while serving. Must not: loggers, which belong to the
modules, under `paceline.`. A line may have `extra={"fields": {...}}`, values by name, which JSON lines show beside the
message.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TextIO

from paceline.server.files import in_utf8
from paceline.server.telemetry.repeat_filter import RepeatFilter

__all__ = ["LogSettings", "apply", "configure", "current", "debugging"]


class _Switch:
    """`on` while debug lines are written."""

    __slots__ = ("on",)

    def __init__(self) -> None:
        self.on = False


debugging = _Switch()
"""For checks that every request makes: asking a logger takes 110 ns, this 15."""


_SURROGATES = range(0xD800, 0xE000)
_CONTROLS = {
    code: repr(chr(code))[1:-1]
    for code in (*range(32), *range(127, 160), 0x2028, 0x2029, *_SURROGATES)
    if code != ord("\t")
}
"""Text that a client sent must not end the line or move a terminal's cursor, and names of files needn't be UTF-8."""


_LOOPS = "asyncio"
"""The logger of asyncio, which runs our code and reports when that fails in an unforeseen way. Not gRPC's logger:
nothing writes its lines, and they contain the values of headers."""


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
    # By default, asyncio's lines bypass format, level and bounds.
    loops = logging.getLogger(_LOOPS)
    loops.handlers = [ours]
    loops.propagate = False
    loops.setLevel(max(settings.threshold, logging.WARNING))


def current() -> LogSettings:
    """How lines are written now; the defaults if the program that this is part of writes them in its own way."""
    handlers = logging.getLogger("paceline").handlers
    return next((one.settings for one in handlers if isinstance(one, _Handler)), LogSettings())
