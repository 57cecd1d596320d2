"""Who works in a job's folder: one process for each shard, and all with the same number of shards.

Lives here: locks on files (flock), which end with the process that has them, however it ends. Must not: know what they
protect. The rule: who takes or looks at a lock has `beginning`, so nobody sees half of what others do.
"""

from __future__ import annotations

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

from paceline.server.bulk.plan import Shard
from paceline.server.bulk.values import BulkError

__all__ = ["Locks"]

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
