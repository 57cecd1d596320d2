"""What this process asks of the C library and of Python, to be faster.

Lives here: settings of the process as a whole, made once before it serves. Must not: settings of a library or a model.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["KEPT_BYTES", "SETTINGS", "keep_freed_memory", "made_to_stay", "take_descriptors"]

_log = logging.getLogger("paceline.server")

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
KEPT_BYTES = 256 * 1024 * 1024
SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")
"""Of the environment, by which whoever starts this program has a say."""


def keep_freed_memory() -> None:
    """Let malloc keep what is freed, blocks of up to 256 MiB, instead of giving it back to the kernel at once; unless
    the environment has something to say of that.

    What is given back is paid for with a page fault for every 4 KiB when it is needed again, for the next batch: 64
    rows of 600 KB are stacked in 1.1 times what copying them takes, and in 2.3 times otherwise. Source: mallopt(3).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None or any(name in os.environ for name in SETTINGS):
        return
    # Setting one of them switches glibc's own adjustment of both off.
    if not (mallopt(_M_MMAP_THRESHOLD, KEPT_BYTES) and mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)):
        _log.warning("the C library doesn't keep freed memory: mallopt refused the settings")


def take_descriptors() -> None:
    """Raise the bound of open files to the most that this process may have: a connection is one, and each version of a
    model has some. The usual 1024 are for programs that wait with select(2), which knows no higher ones."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    except (OSError, ValueError) as error:
        _log.warning("the bound of open files can't be raised to %d: %s", most, error)


@contextmanager
def made_to_stay() -> Iterator[None]:
    """What is made meanwhile, and what was before, is never looked through for garbage.

    Imports leave 50,000 objects. A look at all of them holds everything up for 45 to 60 ms, while requests are served
    as well as during the imports themselves, of which looks took a tenth. (Two virtual cores, Python 3.11.)
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
