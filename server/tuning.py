"""What a process of ours asks of the C library, of Python and of the kernel.

Lives here: its event loop, settings of the process as a whole, made once before it serves, and how many files it may
open. Must not: settings of a library or a model.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import logging
import os
import resource
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_log = logging.getLogger("paceline.server")

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
KEPT_BYTES = 256 * 1024 * 1024
SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Environment variables by which whoever starts this program can choose otherwise."""

# A runner that returns from native code waits this long for the event loop to release the interpreter lock. Python's
# 5 ms are as long as many a batch: with 64 clients on the benchmark's perceptron, 0.5 ms answered 13 % more requests.
SWITCH_INTERVAL_S = 0.0005

_LARGEST = 2**31 - 1
_MOST_RESERVED = 128
_MOST_TRIED = 2**16


def keep_freed_memory() -> None:
    """Have malloc keep freed blocks of up to 256 MiB, instead of returning them to the kernel at once; unless the
    environment has settings of its own.

    Returned memory costs a page fault per 4 KiB when it is needed again, for the next batch: stacking 64 rows of 600 KB
    takes 1.1 times as long as copying them, and 2.3 times otherwise. Source: mallopt(3).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in SETTINGS):
        return
    # Setting one of them switches off glibc's own adjustment of both.
    if not (mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES) and mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)):
        _log.warning("the C library doesn't keep freed memory: mallopt refused the settings")


@contextmanager
def excluded_from_gc() -> Iterator[None]:
    """Exempt everything created in the block or before it from garbage collection.

    Imports leave 50,000 objects. A collection of all of them stops everything for 45 to 60 ms, while serving as well as
    during the imports themselves, a tenth of whose time went into collections. (Two virtual cores, Python 3.11.)
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:  # not available on every platform
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def take_descriptors() -> None:
    """Raise the limit on open files to the most that this process may have: each connection is one, and each version of
    a model has some. The usual 1024 is for programs that wait with select(2), which can't handle higher numbers."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except (OSError, ValueError) as error:
        _log.warning("the limit on open files can't be raised to %d: %s", most, error)


def allowed_descriptors() -> int:
    """How many files this process may have open; 2**31 - 1 if there is no bound."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _LARGEST if soft == resource.RLIM_INFINITY else soft


def open_descriptors() -> Sequence[int]:
    """Those that are open, and perhaps some that aren't."""
    try:
        return list(map(int, os.listdir("/proc/self/fd")))
    except OSError:  # none is left to list them with
        return range(min(allowed_descriptors(), _MOST_TRIED))


def free_descriptors() -> int:
    """How many more this process may open."""
    return max(0, allowed_descriptors() - len(open_descriptors()))


def reserved_descriptors() -> int:
    """How many connections leave free: for probes and scrapes, twice as many as the metrics port takes connections, and
    for models' files. Loads leave as many for connections."""
    return min(_MOST_RESERVED, allowed_descriptors() // 8)
