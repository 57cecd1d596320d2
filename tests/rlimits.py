"""Limits of this process, for as long as a test wants them.

Lives here: setting them and putting them back. Must not: assertions about behaviour.
"""

from __future__ import annotations

import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["limited", "room_for", "without_threads"]


@contextmanager
def limited(which: int, value: int) -> Iterator[None]:
    """`which` is one of `resource`'s limits, such as RLIMIT_FSIZE: the size of files stands in for that of memory too,
    as filling memory would hurt the machine."""
    before = resource.getrlimit(which)
    resource.setrlimit(which, (value, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(which, before)


@contextmanager
def room_for(size_bytes: int) -> Iterator[None]:
    """The address space may grow by `size_bytes`. Nothing is filled."""
    now_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    with limited(resource.RLIMIT_AS, now_bytes + size_bytes):
        yield


@contextmanager
def without_threads() -> Iterator[None]:
    """No thread can be started: the stack of each would be larger than the address space."""
    before = threading.stack_size(1 << 62)
    try:
        yield
    finally:
        threading.stack_size(before)
