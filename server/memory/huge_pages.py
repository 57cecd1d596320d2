"""Memory in pages of 2 MiB, where the system gives them to those who ask.

Lives here: making the C library ask, which it does only if it is told to when a program starts. Must not: know what the
memory is for. Weights that don't fit the processor's caches are read from memory for every batch, and with pages of 4
KiB a tenth to a fifth of the time is spent on address translation.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from paceline.server.tuning import KEPT_BYTES, SETTINGS

TUNABLES = "GLIBC_TUNABLES"
_MODE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MADVISE_MODE = "[madvise]"
_MIN_GLIBC = (2, 35)
_MALLOC_SETTINGS = {
    "hugetlb": 1,
    # As `tuning.keep_freed_memory` sets them, which does nothing if the environment has one of `tuning.SETTINGS`.
    "mmap_threshold": KEPT_BYTES,
    "trim_threshold": KEPT_BYTES,
}
_TUNABLES_VALUE = ":".join(f"glibc.malloc.{name}={value}" for name, value in _MALLOC_SETTINGS.items())


def ask() -> None:
    """Restart this program with a C library that asks, if that makes a difference; else return.

    The process and its arguments stay the same. An environment that has one of `tuning.SETTINGS`, even empty, is left
    alone. To be called before anything has begun. Source: glibc's manual, "Memory Allocation Tunables".
    """
    try:
        mode, libc = _MODE.read_text(), os.confstr("CS_GNU_LIBC_VERSION") or ""
        if wanted(os.environ, mode, libc):
            os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, TUNABLES: _TUNABLES_VALUE})
    except (OSError, ValueError):
        return  # not Linux, hidden from us, or another C library; and huge pages only make it faster


def wanted(environment: Mapping[str, str], mode: str, libc: str) -> bool:
    """Whether to ask, given the system's `mode`, and a C library such as `glibc 2.36`."""
    name, _, version = libc.partition(" ")
    numbers = tuple(int(part) for part in version.split(".") if part.isdecimal())
    knows = name == "glibc" and numbers >= _MIN_GLIBC
    return knows and _MADVISE_MODE in mode and not any(one in environment for one in SETTINGS)
