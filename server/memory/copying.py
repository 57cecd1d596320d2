"""Large copies: shared by several threads, or many out of mapped memory in one call of the system.

Lives here: which thread takes which part, and which waits for which; the system call. Must not: know what is copied, or
whose memory it is. All copies share the helper threads, as a single core copies at a fraction of a server's memory
bandwidth. Nobody waits for a helper that hasn't started: the calling thread does the parts that helpers don't get to.

Code that reads a mapping whose file was truncated dies of SIGBUS; if the kernel reads it instead, as it reads the
memory of any process, it returns a short count where the memory is gone. Why a single call: each time a thread releases
the interpreter lock, as it does for each read from a file, getting it back may take as long as the event loop holds it:
half a millisecond, for a copy of 40 us.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import cache, partial
from typing import Any, TypeVar

from paceline.server.cpus import usable_cpus

__all__ = ["Allowed", "Piece", "copy_all", "copy_parts", "parts_of"]

_log = logging.getLogger("paceline.server")

T = TypeVar("T")
Piece = tuple[int, int, int]
"""Target address, source address, number of bytes."""

_PART_BYTES = 2**21
"""The least size of a part. Waking a sleeping thread takes as long as copying some hundred KB."""
_MAX_THREADS = 4
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


def parts_of(size_bytes: int) -> int:
    """In how many parts `size_bytes` are to be copied."""
    return max(1, min(_threads(), size_bytes // _PART_BYTES))


def copy_parts(copy: Callable[[T], bool], parts: Iterable[T], helpers: Executor | None = None) -> bool:
    """Call `copy` with each of `parts`, on several threads. True if each call returned True. `copy` should release the
    interpreter lock. Blocks until nobody copies any more, even if `copy` raises, which it shouldn't. `helpers` are the
    process's own by default."""
    # The queue holds what leads to the memory: a helper that comes too late finds nothing to keep.
    left = deque(partial(copy, part) for part in parts)

    def take() -> bool:
        well = True
        while left:
            try:
                one = left.popleft()
            except IndexError:  # another thread was faster
                break
            well = one() and well
            del one
        return well

    asked = [*_ask(helpers or _helpers(), take, len(left) - 1)]
    try:
        well = take()
    finally:
        # Helpers that haven't started aren't needed any more. Until the others have ended, whatever else went wrong,
        # the memory that they write must exist.
        begun = [one for one in asked if not one.cancel()]
        wait(begun)
    return well and all(one.result() for one in begun)


def _ask(helpers: Executor, take: Callable[[], bool], times: int) -> Iterator[Future[bool]]:
    with suppress(RuntimeError):  # no more threads can be started, or the interpreter ends: then nobody helps
        for _ in range(times):
            yield helpers.submit(take)


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


@cache
def _helpers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_MAX_THREADS - 1, "paceline-copy")


@cache
def _threads() -> int:
    return min(_MAX_THREADS, usable_cpus().count)
