"""Paths of files that users name, checked before anything is opened, and as others may read them.

Lives here: what every reader of such a file has to check first, and what everybody does who tells its name. Must not:
open or read files.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

__all__ = ["check_file", "in_utf8", "inside"]


def in_utf8(text: str) -> str:
    """`text` with what UTF-8 can't encode escaped: names of folders and files may be any bytes, while messages, JSON
    and pages are UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def inside(folder: Path, name: str) -> Path | None:
    """The path that `name` in a configuration refers to, with links resolved; None if it isn't in `folder`."""
    home = Path(os.path.realpath(folder))
    try:
        path = Path(os.path.realpath(home / name))
    except ValueError:  # a NUL
        return None
    return path if path.is_relative_to(home) else None


def check_file(path: Path) -> None:
    """Raise OSError unless `path` is a regular file. Opening a pipe waits for its other end, and a device may have no
    end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "expected a file, got something else", str(path))
