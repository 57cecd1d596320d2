"""The file of a Unix socket: what may be replaced by it, who may connect, and its end.

Lives here: files, and whether anybody listens. Must not: know gRPC, which binds the socket. gRPC would replace whatever
socket it finds, in use or not, and leave its permissions to the process's umask. So it is given a place in a folder
that no other user may enter, and the socket is linked to its path once it has its permissions and listens.
"""

from __future__ import annotations

import errno
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from tempfile import TemporaryDirectory
from urllib.parse import quote

from paceline.server.errors import StartError

__all__ = ["SOCKET_FOLDER_BYTES", "SOCKET_PATH_BYTES", "SocketFile"]

SOCKET_PATH_BYTES = 107
"""The most that the kernel takes."""
SOCKET_FOLDER_BYTES = SOCKET_PATH_BYTES - len("/.abcdefgh/s")
"""The most that leaves room for where the socket is bound."""


class SocketFile:
    """The socket at `path`, with permissions `mode`."""

    def __init__(self, path: str, mode: int) -> None:
        self._path = path
        self._mode = mode
        self._own: tuple[int, int] | None = None

    def check(self) -> None:
        """Raise StartError if no socket could appear at the path now."""
        with self._explained(), self._new_folder():
            _is_stale(self._path)

    @contextmanager
    def appearing(self) -> Iterator[str]:
        """Yields where to listen, as gRPC writes it; after that, the socket is at its path. Raises StartError."""
        with self._explained(), self._new_folder() as folder:
            # Relative if the path is: where that matters, an absolute one may be too long.
            bound = os.path.join(os.path.dirname(self._path), os.path.basename(folder), "s")
            yield f"unix:{quote(bound)}"
            os.chmod(bound, self._mode)
            self._take_stale_away(os.path.join(folder, "stale"))
            os.link(bound, self._path)
            self._own = _identity(bound)

    def remove(self) -> None:
        """Remove the socket, unless another server has replaced it. Has to be called while it is open: after that, the
        kernel may give its identity to another file."""
        own, self._own = self._own, None
        if own is not None:
            with suppress(FileNotFoundError):
                if _identity(self._path) == own:
                    os.unlink(self._path)

    def _new_folder(self) -> TemporaryDirectory[str]:
        return TemporaryDirectory(prefix=".", dir=os.path.dirname(self._path) or ".")

    def _take_stale_away(self, aside: str) -> None:
        """Two servers that start at the same time may both find the same stale socket; the second one to take it away
        would get the socket of the first. So what was taken away is looked at again."""
        if not _is_stale(self._path):
            return
        os.rename(self._path, aside)
        try:
            _is_stale(aside)
        except OSError:
            os.rename(aside, self._path)
            raise

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StartError(f"gRPC can't listen on unix:{self._path}: {error.strerror}") from None


def _is_stale(path: str) -> bool:
    """Whether there is a socket at `path` on which nobody listens; False if nothing is there. Raises OSError for
    everything else that is there."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return False
    if not stat.S_ISSOCK(status.st_mode):
        raise FileExistsError(errno.EEXIST, "a file is there that is no socket")
    with socket.socket(socket.AF_UNIX) as caller:
        caller.setblocking(False)
        try:
            caller.connect(path)
        except ConnectionRefusedError:
            return True
        except BlockingIOError:
            pass  # so many wait to be accepted that there is no room for another one
    raise OSError(errno.EADDRINUSE, "another process listens there")


def _identity(path: str) -> tuple[int, int]:
    status = os.lstat(path)
    return status.st_dev, status.st_ino
