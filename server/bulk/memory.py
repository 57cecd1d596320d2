"""How much memory this process has, and may still take, and that it gives back what it doesn't use.

Lives here: what Linux says of that, and what allocators are told. Must not: decide when, or how much a job may have.
"""

from __future__ import annotations

import ctypes
import math
from contextlib import suppress
from pathlib import Path

__all__ = ["give_back_when_freed", "memory_left", "peak_bytes", "resident_bytes"]

_LIMITS = (
    ("sys/fs/cgroup/memory.max", "sys/fs/cgroup/memory.current"),
    ("sys/fs/cgroup/memory/memory.limit_in_bytes", "sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
"""Of a container's cgroup, as it sees it: versions 2 and 1."""
_MMAP_THRESHOLD, _LARGE_BYTES = -3, 2**19
"""glibc's M_MMAP_THRESHOLD. With half of it, small rows cost a tenth of their speed; with four times as much, they take
40 MiB more."""


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
    """Of this process; 0 where nobody says."""
    return _status_bytes("VmRSS", root)


def peak_bytes(root: Path = Path("/")) -> int:
    """The most that this process has had; 0 where nobody says. Not `ru_maxrss`, which is never less than what the
    parent had."""
    return _status_bytes("VmHWM", root)


def _status_bytes(field: str, root: Path) -> int:
    """Source: proc_pid_status(5)."""
    with suppress(OSError):
        for line in (root / "proc/self/status").read_text(encoding="ascii", errors="replace").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    return 0


def give_back_when_freed() -> None:
    """For the whole process: arrays of half a MiB and more go back to the kernel as soon as they are freed. By itself,
    glibc takes whatever has the size of the largest that was freed, up to 32 MiB, from the heaps that it keeps for
    threads: a job with large rows then has twice what it uses."""
    if setting := getattr(ctypes.CDLL(None), "mallopt", None):  # glibc's
        setting(_MMAP_THRESHOLD, _LARGE_BYTES)
