"""Files that are there whole or not at all, also after a crash, and what to say if they can't be written.

Lives here: write, fsync, rename, fsync of the folder; reasons in words. Must not: know what a job is.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.server.bulk.values import BulkError

__all__ = ["explained", "publish", "put", "remove", "sync_folder"]

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
            raise BulkError(f"{at}: expected a folder to write to, found a file") from error
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
