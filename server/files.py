"""Files that users name, checked before anything is opened, watched for changes, and told as others may read them.

Lives here: what every reader of such a file has to do. Must not: know what is in one.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

from paceline.backends.paths import open_inside
from paceline.server.errors import ConfigError
from paceline.server.limits import LARGEST_MESSAGE_BYTES


def in_utf8(text: str) -> str:
    """`text` with what UTF-8 can't encode escaped: names of folders and files may be any bytes, while messages, JSON
    and pages are UTF-8."""
    return text.encode(errors="backslashreplace").decode()


def check_file(path: Path) -> None:
    """Raise OSError unless `path` is a regular file. Opening a pipe waits for its other end, and a device may have no
    end."""
    if not stat.S_ISREG(path.stat().st_mode):
        raise OSError(errno.EINVAL, "expected a file, got something else", str(path))


def read_inside(where: str, home: Path, name: str, folder: str = "") -> bytes:
    """The content of the file `name` in `folder` of a model's folder, `home`. Blocks. Raises ConfigError, with `where`
    first, for one that is outside, can't be read, or is larger than any message."""
    try:
        file = open_inside(home / folder, name)
        if file is None:
            inside = f"the model's folder '{folder}'" if folder else "the model's folder"
            raise ConfigError(f"{where}: expected a file inside {inside}, got '{name}'")
        with file:
            if os.fstat(file.fileno()).st_size > LARGEST_MESSAGE_BYTES:
                at_most = f"expected a file of at most {LARGEST_MESSAGE_BYTES} bytes"
                raise ConfigError(f"{where}: {at_most}, got more: '{name}'")
            return file.read()
    except OSError as error:
        raise ConfigError(f"{where}: {home / folder / name}: {error.strerror}") from None


def why(error: OSError | ValueError) -> str:
    """What is wrong with a file, by its name."""
    return f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)


class WatchedFiles:
    """Files that may be replaced while the server runs, as they were when `have_changed` was last called."""

    def __init__(self, *paths: Path) -> None:
        self._paths = paths
        self._seen: object = None

    def have_changed(self) -> bool:
        """Whether any of them has since the last call, or this is the first one. Raises OSError."""
        stats = [path.stat() for path in self._paths]
        seen, self._seen = self._seen, [(one.st_mtime_ns, one.st_ctime_ns, one.st_size, one.st_ino) for one in stats]
        return seen != self._seen

    def look_again(self, error: OSError | ValueError) -> None:
        """After `error`, which kept them from being used: if nothing was read, for instance for lack of descriptors,
        the next call says that they have changed. Bad files stay bad until they change."""
        if isinstance(error, OSError):
            self._seen = None
