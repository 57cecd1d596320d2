"""What lies at a path, links followed.

Lives here: the questions that pathlib, from Python 3.14 on, answers with False where it can't tell. A model whose
folder may not be read, or whose file system fails for a moment, must not be taken for one that is gone. Must not: open
files.
"""

from __future__ import annotations

import errno
import stat
from pathlib import Path

__all__ = ["exists", "is_file", "is_folder"]

_NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)


def exists(path: Path) -> bool:
    """Whether anything is at `path`. Raises OSError if that can't be found out, as all of these do."""
    return _mode(path) is not None


def is_file(path: Path) -> bool:
    """Whether a regular file is at `path`."""
    mode = _mode(path)
    return mode is not None and stat.S_ISREG(mode)


def is_folder(path: Path) -> bool:
    """Whether a folder is at `path`."""
    mode = _mode(path)
    return mode is not None and stat.S_ISDIR(mode)


def _mode(path: Path) -> int | None:
    try:
        return path.stat().st_mode
    except ValueError:  # a NUL, which no name has
        return None
    except OSError as error:
        if error.errno in _NOTHING_THERE:
            return None
        raise
