"""Folders for the files that clients send with a load.

Lives here: removing such a folder, once nothing needs it or with the process. Must not: know what is in it.
"""

from __future__ import annotations

import errno
import logging
import os
import tempfile
import threading
from pathlib import Path, PurePosixPath

__all__ = ["Scratch", "remove_all", "scratch_parent"]

_log = logging.getLogger("paceline.server.scratch")

_there: set[Scratch] | None = set()
"""None once the process is about to end."""
_lock = threading.Lock()
_PATIENCE_S = 1.0


def scratch_parent() -> str:
    """The folder that scratch folders are made in: `TMPDIR`, or `/tmp` if that isn't set. `tempfile` by itself would
    take another one without a word if this one is missing or full."""
    return os.environ.get("TMPDIR") or "/tmp"


class Scratch:
    """A new folder in `scratch_parent()`. It is needed by whoever made it, and by whoever keeps it
    (`backends.base.Files`), until they let go; then it is removed."""

    def __init__(self) -> None:
        """Raises OSError."""
        with _lock:
            if _there is None:
                raise _ending()
            self._folder = tempfile.TemporaryDirectory(
                prefix="paceline-", dir=scratch_parent(), ignore_cleanup_errors=True
            )
            _there.add(self)
        self._needed = 1
        self._writing = threading.Lock()
        self._is_gone = False

    @property
    def path(self) -> Path:
        return Path(self._folder.name)

    def write(self, path: PurePosixPath, content: bytes) -> None:
        """Create a file, and the folders that it is in. Raises OSError."""
        with self._writing:
            if self._is_gone:
                raise _ending()
            (self.path / path).parent.mkdir(parents=True, exist_ok=True)
            # Exclusive: nothing in a new folder is overwritten, whatever names the file system considers equal.
            with (self.path / path).open("xb") as file:
                file.write(content)

    def keep(self) -> None:
        with _lock:
            self._needed += 1

    def release(self) -> None:
        with _lock:
            self._needed -= 1
            if self._needed:
                return
            if _there is not None:
                _there.discard(self)
        self.remove()

    def remove(self) -> None:
        """Remove it, whoever needs it. Waits for a file that is being written, but not for ever."""
        self._is_gone = True
        waited = self._writing.acquire(timeout=_PATIENCE_S)
        try:
            self._folder.cleanup()
        finally:
            if waited:
                self._writing.release()


def remove_all() -> None:
    """Remove all folders, at the end of the process, which may end without closing its models."""
    global _there
    with _lock:
        left, _there = _there or (), None
    for scratch in left:
        try:
            scratch.remove()
        except Exception:  # noqa: BLE001 - the other folders must be removed, and the process end
            _log.exception("temporary folder %s can't be removed", scratch.path)


def _ending() -> OSError:
    return OSError(errno.ECANCELED, "the server is ending")
