"""Log lines: where they go and how they look. Loggers themselves belong to the modules, under `paceline.`."""

from __future__ import annotations

import json
import logging
import sys
import time

__all__ = ["configure"]


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


def configure(level: str, form: str) -> None:
    """Log to stderr from `level` on, as `text` or one `json` object a line."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if form == "json" else _Text())
    logger = logging.getLogger("paceline")
    logger.handlers = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
