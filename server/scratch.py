"""Folders for the files that clients bring with a load.

Lives here: when such a folder goes: once nobody needs it, or with the process. Must not: know what is in it.
"""

from __future__ import annotations

import tempfile
import threading
from pathlib import Path

__all__ = ["Scratch", "remove_all"]

_there: set[Scratch] = set()
_lock = threading.Lock()


class Scratch:
    """A new folder below `TMPDIR`, which whoever made it needs until it lets go, and whoever it is kept for as well
    (`backends.base.Files`)."""

    def __init__(self) -> None:
        """Raises OSError."""
        self._folder = tempfile.TemporaryDirectory(prefix="paceline-", ignore_cleanup_errors=True)
        self._needed = 1
        with _lock:
            _there.add(self)

    @property
    def path(self) -> Path:
        return Path(self._folder.name)

    def keep(self) -> None:
        with _lock:
            self._needed += 1

    def let_go(self) -> None:
        with _lock:
            self._needed -= 1
            if self._needed:
                return
            _there.discard(self)
        self.remove()

    def remove(self) -> None:
        """Whoever needs it."""
        self._folder.cleanup()


def remove_all() -> None:
    """At the end of the process, which may leave models as they are."""
    with _lock:
        left = list(_there)
    for scratch in left:
        scratch.remove()
