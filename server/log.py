"""Log lines: where they go and how they look. Loggers themselves belong to the modules, under `paceline.`."""

from __future__ import annotations

import json
import logging
import sys
import time
from dataclasses import dataclass, replace
from typing import TextIO

__all__ = ["LogSettings", "apply", "configure", "current"]


class _Text(logging.Formatter):
    converter = time.gmtime  # type: ignore[assignment]
    default_msec_format = "%s.%03dZ"
    default_time_format = "%Y-%m-%dT%H:%M:%S"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")


class _Json(_Text):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Which lines are written, by level (`verbose_level` above 0: those for debugging), and how: lines of text for
    `default` and `ISO8601`, which look the same, or one `json` object each. Names and types are those of Triton's
    "logging" extension."""

    info: bool = True
    warning: bool = True
    error: bool = True
    verbose_level: int = 0
    format: str = "default"

    @property
    def threshold(self) -> int:
        """The least important level of which anything is written."""
        switches = (
            (self.verbose_level > 0, logging.DEBUG),
            (self.info, logging.INFO),
            (self.warning, logging.WARNING),
            (self.error, logging.ERROR),
        )
        return next((level for is_on, level in switches if is_on), logging.CRITICAL + 1)

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
        self.addFilter(lambda record: settings.writes(record.levelno))


def configure(level: str, form: str) -> None:
    """Log to stderr from `level` on, as `text` or one `json` object a line."""
    apply(replace(_BY_LEVEL[level], format="json" if form == "json" else "default"))


def apply(settings: LogSettings) -> None:
    """Log to stderr as `settings` say, from now on."""
    logger = logging.getLogger("paceline")
    logger.handlers = [_Handler(settings)]
    logger.setLevel(settings.threshold)
    logger.propagate = False


def current() -> LogSettings:
    """How lines are written now; the defaults where the program that this is part of writes them in its own way."""
    handlers = logging.getLogger("paceline").handlers
    return next((one.settings for one in handlers if isinstance(one, _Handler)), LogSettings())
