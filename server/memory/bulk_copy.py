"""Many copies out of mapped memory in one call, which returns a short count where the memory is gone.

Lives here: the system call. Must not: know whose memory it is. Code that reads a mapping whose file was truncated dies
of SIGBUS; if the kernel reads it instead, as it reads the memory of any process, it reports how far it got.

Why a single call: each time a thread releases the interpreter lock, as it does for each read from a file, getting it
back may take as long as the event loop holds it: half a millisecond, for a copy of 40 us.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from paceline.server.memory.copying import copy_parts, parts_of

__all__ = ["Allowed", "Piece", "copy_all"]

_log = logging.getLogger("paceline.server")

Piece = tuple[int, int, int]
"""Target address, source address, number of bytes."""

_MAX_PIECES = 1024
"""IOV_MAX of Linux."""
_MAX_BYTES = 0x7FFF0000
"""A little less than what Linux moves in a call."""

# ctypes gives it no type, and it may not be there.
_process_vm_readv: Any = getattr(ctypes.CDLL(None, use_errno=True), "process_vm_readv", None)
if _process_vm_readv is not None:
    _process_vm_readv.restype = ctypes.c_ssize_t
    _process_vm_readv.argtypes = [ctypes.c_int, *2 * (ctypes.c_void_p, ctypes.c_ulong), ctypes.c_ulong]


class Allowed:
    """Whether the system allows the call; some sandboxes never do."""

    now = _process_vm_readv is not None


def copy_all(pieces: Sequence[Piece]) -> bool:
    """Copy `pieces`, if that can be done in one call, or, for large amounts, in one call on each of a few threads.
    False if not: copy them another way; some of them may have been copied.

    All targets must exist; sources need not. Blocks, with the interpreter lock released.
    """
    size = sum(piece[2] for piece in pieces)
    if not Allowed.now or len(pieces) > _MAX_PIECES or size > _MAX_BYTES:
        return False
    parts = parts_of(size)
    return _copy(pieces) if parts == 1 else copy_parts(_copy, _shared_out(pieces, -(-size // parts)))


def _shared_out(pieces: Sequence[Piece], most_bytes: int) -> Iterator[list[Piece]]:
    """`pieces` in parts of `most_bytes` each, except for the last."""
    part: list[Piece] = []
    left_bytes = most_bytes
    for target, source, count in pieces:
        begin = 0
        while count - begin > left_bytes:
            yield [*part, (target + begin, source + begin, left_bytes)]
            begin, part, left_bytes = begin + left_bytes, [], most_bytes
        part.append((target + begin, source + begin, count - begin))
        left_bytes -= count - begin
    yield part


def _copy(pieces: Sequence[Piece]) -> bool:
    # struct iovec: address and length
    to = array("Q", [one for target, _, count in pieces for one in (target, count)])
    come = array("Q", [one for _, source, count in pieces for one in (source, count)])
    places = to.buffer_info()[0], len(pieces), come.buffer_info()[0], len(pieces)
    done = _process_vm_readv(os.getpid(), *places, 0)
    if done < 0 and (code := ctypes.get_errno()) in (errno.EPERM, errno.ENOSYS):
        Allowed.now = False
        _log.info("shared memory is read tensor by tensor, which is slower: process_vm_readv: %s", os.strerror(code))
    return bool(done == sum(piece[2] for piece in pieces))
