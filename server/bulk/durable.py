"""Files that are there whole or not at all, also after a crash, and who may write them: one process for each shard, and
all with the same number of shards.

Lives here: write, fsync, rename, fsync of the folder; why that fails, in words; locks on files (flock), which end with
the process that has them, however it ends. Must not: know what a job is. The rule: who takes or looks at a lock has
`beginning`, so nobody sees half of what others do.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.server.bulk.values import BulkError, FlagError, Shard

__all__ = ["Locks", "explained", "publish", "put", "remove", "sync_folder"]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def explained(folder: str) -> Iterator[None]:
    """Raises BulkError in place of OSError, with what the user can do about it."""
    try:
        yield
    except OSError as error:
        at = error.filename or folder
        why = error.strerror or str(error)
        if error.errno in _FULL:
            raise BulkError(f"{at}: {why}; make room and start the job again: finished units are kept") from error
        if isinstance(error, NotADirectoryError | FileExistsError):
            raise FlagError(f"{at}: expected a folder to write to, found a file") from error
        raise BulkError(f"{at} can't be written: {why}") from error


def sync_folder(path: str) -> None:
    """Makes sure that what was created, renamed or removed in the folder stays so."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # file systems over the network that can't, and needn't
            raise
    finally:
        os.close(handle)


def publish(temporary: str, final: str) -> None:
    """Gives a complete, synced file its name. Whoever sees the name, sees all of it."""
    os.replace(temporary, final)
    sync_folder(os.path.dirname(final))


def put(temporary: str, final: str, content: bytes) -> None:
    """Writes a small file. `temporary` is a name on the same file system that nobody else uses."""
    with open(temporary, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    publish(temporary, final)


def remove(paths: list[str]) -> None:
    """Removes files of one folder, for good. Those that aren't there needn't be."""
    there = [path for path in paths if os.path.lexists(path)]
    for path in there:
        os.unlink(path)
    if there:
        sync_folder(os.path.dirname(there[0]))


_BEGINNING = "beginning"


class Locks:
    """The locks in `folder`, which has to be there when they are used."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._own: int | None = None

    @contextmanager
    def beginning(self) -> Iterator[None]:
        """Within it, nobody else is in it. Others wait, so it has to be short."""
        handle = self._open(_BEGINNING)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def take(self, shard: Shard) -> None:
        """Takes the shard's lock. Raises BulkError, which says who has it, if that is somebody else; also if shards of
        another number are being done, as these consist of other units, of which some would be the same."""
        self._own = self._taken(shard.file_name)
        for name in os.listdir(self._folder):
            if name != _BEGINNING and not name.endswith(f"-of-{shard.count}"):
                os.close(self._taken(name))
        since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime())
        os.ftruncate(self._own, 0)
        os.pwrite(self._own, f"process {os.getpid()} on {socket.gethostname()} since {since}".encode(), 0)

    def give_up(self) -> None:
        if self._own is not None:
            os.close(self._own)
            self._own = None

    def _taken(self, name: str) -> int:
        handle = self._open(name)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(handle, 1000, 0).decode(errors="replace") or "another process"
            os.close(handle)
            raise BulkError(f"shard {name.replace('-', ' ')} is being done by {holder}") from None
        return handle

    def _open(self, name: str) -> int:
        return os.open(os.path.join(self._folder, name), os.O_RDWR | os.O_CREAT, 0o666)
