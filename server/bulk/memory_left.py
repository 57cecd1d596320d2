"""How much memory a process may still take, and giving back what it doesn't use.

Lives here: what Linux says of that, and what allocators are asked. Must not: decide when.
"""

from __future__ import annotations

import ctypes
import math
from contextlib import suppress
from pathlib import Path

import pyarrow as pa

__all__ = ["give_back", "memory_left", "resident_bytes"]

_LIMITS = (
    ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
    ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Of a container's cgroup, as it sees it: versions 2 and 1."""


def memory_left(root: Path = Path("/")) -> float:
    """Bytes, without swapping, in this machine and container; infinite where nobody says. Source: proc_meminfo(5)."""
    left = math.inf
    with suppress(OSError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                left = int(line.split()[1]) * 1024
    for limit, used in _LIMITS:
        with suppress(OSError, ValueError):  # the other version, or no limit ("max")
            left = min(left, max(0, int((root / limit).read_text()) - int((root / used).read_text())))
    return left


def resident_bytes(root: Path = Path("/")) -> int:
    """Of this process; 0 where nobody says. Source: proc_pid_status(5)."""
    with suppress(OSError):
        for line in (root / "proc/self/status").read_text().splitlines():
            if line.startswith("VmRSS:"):
                return int(line.split()[1]) * 1024
    return 0


def give_back() -> None:
    """Return to the kernel what malloc and Arrow's allocator have kept of freed memory: without it, a long job takes
    30 MiB more of small rows. Takes 1.5 ms after units of some MiB."""
    pa.default_memory_pool().release_unused()
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):  # glibc's
        trim(ctypes.c_size_t(0))
