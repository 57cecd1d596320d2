"""How much memory a process may still take.

Lives here: what Linux says of that. Must not: decide what follows from it.
"""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path

__all__ = ["memory_left", "resident_bytes"]

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
