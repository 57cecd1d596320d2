"""The files that traces go to, and the thread that writes them.

Lives here: JSON and files. Must not: know what is traced. The rule: a file is a complete JSON array after every write,
so that it can be read while the server runs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from queue import Full, Queue
from typing import IO

_log = logging.getLogger("paceline.server.tracing")

_MAX_WAITING = 10_000
_END = b"\n]\n"

Entries = Sequence[Mapping[str, object]]


class TraceWriter:
    """Writes to `path`, or to `path` with .0, .1, … appended. Existing files are overwritten. As in Triton, a file with
    all traces that were asked for gets a number, too."""

    def __init__(self, path: Path, patience_s: float) -> None:
        self._path = path
        self._patience_s = patience_s
        self._waiting: Queue[tuple[Entries, int, bool] | None] = Queue(_MAX_WAITING)
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._lost = self._begun = 0
        self._failure = ""

    def start(self) -> None:
        """Start writing. Raises OSError if `path` is a folder, or is in one that can't be written to."""
        folder = self._path.absolute().parent
        if self._path.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
            raise OSError(f"{self._path}: expected a file in a folder that can be written to")
        self._thread.start()

    def put(self, entries: Entries, per_file: int, last: bool = False) -> None:
        """Write one trace later, on the thread; it is lost if that can't keep up. `per_file` traces fill a numbered
        file, 0: all go into one. The `last` of those asked for ends its file."""
        try:
            self._waiting.put_nowait((entries, per_file, last))
        except Full:
            self._lost += 1

    def close(self) -> None:
        """Return when all is written, or after some seconds if the files hang."""
        if self._thread.is_alive():
            with contextlib.suppress(Full):
                self._waiting.put(None, timeout=self._patience_s)
            self._thread.join(self._patience_s)
        hanging = self._thread.is_alive()
        lost = self._lost + (self._begun if hanging else 0) + sum(one is not None for one in list(self._waiting.queue))
        if lost:
            why = "writing hangs" if hanging else self._failure or "writing is too slow"
            _log.warning("%d traces were not written to %s: %s", lost, self._path, why)

    def _run(self) -> None:
        with contextlib.closing(_Files(self._path)) as files:
            while (item := self._waiting.get()) is not None:
                self._begun = 1
                try:
                    if not self._failure:
                        files.write(*item)
                except Exception as error:  # noqa: BLE001 - must not end the thread that writes all traces
                    self._failure = getattr(error, "strerror", None) or str(error)
                    _log.error("no more traces are written to %s until a restart: %s", self._path, self._failure)
                self._lost += bool(self._failure)
                self._begun = 0


class _Files:
    """The file of all traces, and the numbered one being filled."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._whole: IO[bytes] | None = None
        self._numbered: IO[bytes] | None = None
        self._number = self._count = 0

    def write(self, entries: Entries, per_file: int, last: bool) -> None:
        if not per_file:
            self._whole = self._whole or _opened(self._path)
            _append(self._whole, entries)
            # What the path leads to, such as a device, isn't ours to rename.
            if last and self._path.is_file() and not self._path.is_symlink():
                self._whole.close()
                self._whole = None
                self._path.rename(self._next())
            return
        self._numbered = self._numbered or _opened(self._next())
        _append(self._numbered, entries)
        self._count += 1
        if last or self._count >= per_file:
            self._numbered.close()
            self._numbered, self._count = None, 0

    def _next(self) -> Path:
        self._number += 1
        return self._path.with_name(f"{self._path.name}.{self._number - 1}")

    def close(self) -> None:
        for file in (self._whole, self._numbered):
            if file is not None:
                # What couldn't be written is tried once more here; the failure was logged.
                with contextlib.suppress(OSError):
                    file.close()


def _opened(path: Path) -> IO[bytes]:
    """For writing; a new file is for the server's user alone, as traces have what clients sent: ids and models' names.
    One that is there keeps its mode."""
    return open(path, "wb", opener=lambda name, flags: os.open(name, flags, 0o600))


def _append(file: IO[bytes], entries: Entries) -> None:
    data = b",\n".join(json.dumps(entry).encode() for entry in entries)
    if file.tell():
        file.seek(-len(_END), os.SEEK_CUR)
    file.write((b",\n" if file.tell() else b"[\n") + data + _END)
    file.flush()
