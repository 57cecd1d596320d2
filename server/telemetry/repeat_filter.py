"""Repeated warnings and errors: the first is written, the others are counted.

Lives here: which lines are the same, and for how long. Must not: formats or streams. Called on any thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable

__all__ = ["RepeatFilter"]

_WINDOW_S = 10.0
_SIMILAR = 100
"""Different texts of one kind, such as one for each model, that may be written within a window."""

_Key = tuple[str, int, str, str]
_Kind = tuple[str, int, str]


class _Storm:
    """A line that was written, and how many like it haven't been since, until the window ends."""

    __slots__ = ("count", "kind", "text", "until_s")

    def __init__(self, kind: _Kind, text: str, until_s: float) -> None:
        self.kind = kind
        self.text = text
        self.until_s = until_s
        self.count = 0


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
        self._of_kind: Counter[_Kind] = Counter()
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
            if key not in self._storms and self._of_kind[kind] >= _SIMILAR:
                key = (*kind, "")
            storm = self._storms.get(key)
            if storm is None or (not storm.count and storm.until_s <= self._clock()):
                self._forget_ended()
                self._storms[key] = _Storm(kind, text, self._clock() + self._window_s)
                self._of_kind[kind] += 1
                return True
            storm.count += 1
            self._start_timer()
        return False

    def tell(self) -> None:
        """Write the counts of windows that have ended."""
        self._tell(self._clock())

    def close(self) -> None:
        """Write all counts there are, now."""
        self._tell(float("inf"))

    def _tell(self, now_s: float) -> None:
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
            ended = [storm for storm in self._storms.values() if storm.count and storm.until_s <= now_s]
            summaries = [_summary(storm, self._window_s) for storm in ended]
            for storm in ended:
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
                self._of_kind[storm.kind] -= 1
                if not self._of_kind[storm.kind]:
                    del self._of_kind[storm.kind]

    def _start_timer(self) -> None:
        """Have a thread while there are counts to write; none while nothing goes wrong."""
        if self._timer is None:
            self._timer = threading.Timer(self._window_s, self.tell)
            self._timer.daemon = True
            self._timer.start()


def _summary(storm: _Storm, window_s: float) -> logging.LogRecord:
    """A new record: the one that was written may keep an exception alive, with all that led to it."""
    name, level, _ = storm.kind
    record = logging.LogRecord(name, level, "", 0, "%s (and %d more like this", (storm.text, storm.count), None)
    record.msg += f" within {window_s:g} s)"
    record.fields = {"repeated": storm.count}
    return record
