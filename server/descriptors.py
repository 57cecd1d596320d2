"""File descriptors of this process: how many it may have, and how many are free.

Lives here: numbers. Must not: know what descriptors are for.
"""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence

__all__ = ["allowed", "free", "opened", "reserve"]

_LARGEST = 2**31 - 1
_MOST_RESERVED = 128
_MOST_TRIED = 2**16


def allowed() -> int:
    """How many this process may have; 2**31 - 1 if there is no bound."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _LARGEST if soft == resource.RLIM_INFINITY else soft


def opened() -> Sequence[int]:
    """Those that are open, and perhaps some that aren't."""
    try:
        return list(map(int, os.listdir("/proc/self/fd")))
    except OSError:  # none is left to list them with
        return range(min(allowed(), _MOST_TRIED))


def free() -> int:
    """How many more this process may open."""
    return max(0, allowed() - len(opened()))


def reserve() -> int:
    """How many connections leave free: for probes and scrapes, twice as many as the metrics port takes connections, and
    for models' files. Loads leave as many for connections."""
    return min(_MOST_RESERVED, allowed() // 8)
