"""Paths of files that users name, checked before anything is opened, and as others may read them.

Lives here: what every reader of such a file has to check first, and what everybody does who tells its name. Must not:
open or read files.
"""

from __future__ import annotations

import errno
import stat
from pathlib import Path

__all__ = ["check_file", "in_utf8"]


def in_utf8(text: str) -> str:
    """`text` with what UTF-8 can't encode escaped: names of folders and files may be any bytes, while messages, JSON
    and pages are UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def check_file(path: Path) -> None:
    """Raise OSError unless `path` is a regular file. Opening a pipe waits for its other end, and a device may have no
    end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "expected a file, got something else", str(path))
