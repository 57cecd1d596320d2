"""Where log lines go: to stderr, by a thread of its own, so that no writer waits for the reader.

Lives here: `LogOutput`, which takes the place of `sys.stderr` in our processes, and so gets all that Python writes
there; and what takes the place of `sys.stdout`, where commands print. Must not: formats or levels. A pipe that nobody
reads would otherwise block every writer for ever, the event loop above all. The rule: lines are written in order, or
lost and counted. What native code writes, as in a crash, bypasses this and goes straight to the descriptor: it must not
depend on a thread that may be gone.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import logging
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NoReturn

_log = logging.getLogger("paceline.log")

_MAX_WAITING_BYTES = 4 * 2**20
_WHOLE_BYTES = select.PIPE_BUF
"""A pipe takes up to this many bytes whole or not at all, so the lines of several processes don't get into each
other."""
_PAUSE_S = 0.01
"""The thread's pause once everything is written. Woken for each line, it would take the interpreter from the event loop
each time, which costs more than if the loop wrote the line itself. A process that is killed loses the lines of that
time."""
_PATIENCE_S = 1.0
"""How long to wait at the end for what is still to be written."""


class LogOutput(io.TextIOBase):
    """Text for `descriptor`, written by a daemon thread once that is started. `on_gap` is called there with the number
    of lost lines, as soon as others can be written again. Any thread may write; none waits."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, descriptor: int, on_gap: Callable[[int], None], most_bytes: int = _MAX_WAITING_BYTES) -> None:
        self._descriptor = descriptor
        self._on_gap = on_gap
        self._most_bytes = most_bytes
        # Its lock is reentrant: objects that are garbage-collected while a thread holds it may write, too.
        self._changed = threading.Condition()
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._is_full = self._fails = False
        self._unreported = 0
        self.lost_lines = 0

    def start(self) -> None:
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        """Have `text` written, or lost if too much waits already: then everything is lost until all that waits is
        written, so that there is one gap. Never waits for the descriptor."""
        # hot path at level debug: no system call while the thread writes or pauses
        data = text.encode(self.encoding, self.errors)
        if not data:
            return 0
        with self._changed:
            if self._is_full or self._waiting_bytes + len(data) > self._most_bytes:
                self._is_full = self._waiting_bytes > 0
                self._lose(data)
            else:
                self._waiting.append(data)
                self._waiting_bytes += len(data)
            self._changed.notify_all()
        return len(text)

    def drain(self, patience_s: float) -> bool:
        """Wait until everything is written or lost, and losses are reported, `patience_s` at most; whether it is so."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting_bytes and not self._gap_is_due(), patience_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._gap_is_due())
                # As many of the waiting texts as a pipe takes whole, but at least one.
                taken: list[bytes] = []
                size = 0
                while self._waiting and (not taken or size + len(self._waiting[0]) <= _WHOLE_BYTES):
                    taken.append(self._waiting.popleft())
                    size += len(taken[-1])
                data = b"".join(taken)
                gap = 0 if data else self._unreported
            if data:
                self._write(data)
            else:
                self._on_gap(gap)
            with self._changed:
                self._waiting_bytes -= len(data)
                self._unreported -= gap
                self._is_full &= bool(self._waiting)
                idle = not self._waiting
                self._changed.notify_all()
            if idle:
                time.sleep(_PAUSE_S)

    def _gap_is_due(self) -> bool:
        """Whether to report what was lost: not while the report would be lost too."""
        return self._unreported > 0 and not (self._waiting or self._is_full or self._fails)

    def _write(self, data: bytes) -> None:
        """Write all of it; on an error, the rest is lost: a disk may be full, or the reader gone."""
        left = memoryview(data)
        try:
            while left:
                try:
                    left = left[os.write(self._descriptor, left) :]
                except BlockingIOError:  # another process that shares it has made it non-blocking
                    select.select((), (self._descriptor,), ())
            self._fails = False
        except OSError:
            with self._changed:
                self._fails = True
                self._lose(bytes(left))

    def _lose(self, data: bytes) -> None:
        lines = data.count(b"\n")
        self.lost_lines += lines
        self._unreported += lines


def take_stderr() -> None:
    """From now on, have a thread write what this process writes to `sys.stderr`, if it has one. At an orderly end, what
    is left is written, for a second at most."""
    try:
        descriptor = sys.stderr.fileno()
    except (AttributeError, OSError):  # closed, or somebody else's object that has none
        return
    text = "%d log lines were lost, because stderr didn't accept them"
    output = LogOutput(descriptor, lambda lines: _log.error(text, lines, extra={"fields": {"lost": lines}}))
    output.start()
    sys.stderr = output
    atexit.register(_finish)


class StdoutError(Exception):
    """Stdout doesn't take what a command prints, as on a full disk. Not an OSError, so that nobody takes it for one of
    what the command is about. A reader that has gone is still a BrokenPipeError."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"stdout can't be written: {error.strerror}")
        self.strerror = error.strerror


class _Stdout(io.FileIO):
    """Raises for a reader that has gone once; what follows is for nobody. Python flushes what is left again when it
    ends, and from 3.13 on would report that it can't."""

    _reader_is_gone = False

    def write(self, data: object, /) -> int:
        try:
            return super().write(data) if not self._reader_is_gone else len(data)  # type: ignore[arg-type]
        except BrokenPipeError:
            self._reader_is_gone = True
            raise
        except OSError as error:
            raise StdoutError(error) from None


def take_stdout() -> None:
    """From now on, printing to `sys.stdout`, if this process has one, raises StdoutError if it isn't taken."""
    if (before := sys.stdout) is not None:
        raw = io.BufferedWriter(_Stdout(before.fileno(), "wb", closefd=False))
        sys.stdout = io.TextIOWrapper(raw, before.encoding, before.errors, line_buffering=before.isatty())


def lost_lines() -> int:
    """How many lines stderr hasn't taken."""
    return sys.stderr.lost_lines if isinstance(sys.stderr, LogOutput) else 0


def exit_now(status: int) -> NoReturn:
    """End the process without waiting for its threads, except up to a second for what is still to be written."""
    _finish()
    os._exit(status)


def _finish() -> None:
    with contextlib.suppress(Exception):
        logging.shutdown()  # handlers may have more to write at their end
    drain_stderr()


def drain_stderr() -> None:
    """Wait until what is written to stderr is there, for a second at most, so that what follows on stdout is below."""
    if isinstance(sys.stderr, LogOutput):
        sys.stderr.drain(_PATIENCE_S)
