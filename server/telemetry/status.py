"""The page at `/status` of the metrics port: what the server has done in the last minutes.

Lives here: taking the numbers that the page is made of, every few seconds, on a thread of its own, so that it goes on
while the event loop is busy; keeping few of them. Must not: count anything, know a metric or HTML (`clients.snapshots`,
`clients.status_page`), or serve HTTP.
"""

from __future__ import annotations

import logging
import time
from threading import Event, Thread

from paceline.clients.snapshots import READ, Interval, Snapshot, between, read
from paceline.clients.status_page import status_page
from paceline.server.telemetry.metrics import Metrics

_log = logging.getLogger("paceline.server.metrics")

_KEPT = 60


class StatusPage:
    """From `start` to `close`, numbers are taken every `interval_s`; the page has those of the last 60 intervals.
    `text` is for any thread."""

    def __init__(self, metrics: Metrics, title: str, interval_s: float = 5.0) -> None:
        self._metrics = metrics
        self._title = title
        self._interval_s = interval_s
        self._last: Snapshot | None = None
        self._intervals: tuple[Interval, ...] = ()  # replaced and never changed, for other threads
        self._at_s = time.time()
        self._end = Event()
        self._thread = Thread(target=self._run, name="status", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._end.set()
        self._thread.join()

    def look(self) -> None:
        """Take the numbers of now."""
        before, now = self._last, read(self._metrics.some(READ), time.monotonic())
        if before is not None:
            self._intervals = (*self._intervals[1 - _KEPT :], between(before, now))
        self._last, self._at_s = now, time.time()

    def text(self) -> str:
        """The page, which a browser renews as often as there is something new."""
        at = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(self._at_s))
        return status_page(self._intervals, self._title, at, max(1, round(self._interval_s)))

    def _run(self) -> None:
        while True:
            try:
                self.look()
            except Exception:  # noqa: BLE001 - what can't be read now may be soon; until then, the page tells its age
                _log.exception("taking the numbers of /status failed")
            if self._end.wait(self._interval_s):
                return
