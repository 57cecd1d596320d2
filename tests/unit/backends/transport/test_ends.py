"""What is opened for two processes to be connected, where descriptors or memory don't suffice for all of it."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from backends.transport.line import Line
from backends.transport.link import Link
from tests.rlimits import limited

SIZE = 1 << 16


def descriptors() -> set[str]:
    return {path.name for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}


@contextmanager
def spare_descriptors(count: int) -> Iterator[None]:
    """So many more may be opened."""
    highest = max(map(int, descriptors()))
    held = [os.open(os.devnull, os.O_RDONLY)]
    try:
        while held[-1] < highest:  # the limit is one of their numbers, so the gaps are filled
            held.append(os.open(os.devnull, os.O_RDONLY))
        with limited(resource.RLIMIT_NOFILE, held[-1] + 1 + count):
            yield
    finally:
        for descriptor in held:
            os.close(descriptor)


@pytest.mark.parametrize("pair", [Line.pair, Link.pair], ids=["line", "link"])
@pytest.mark.parametrize("count", range(7))
def test_too_few_descriptors_leave_none_open(pair: Callable[[int], Any], count: int) -> None:
    before = descriptors()
    with spare_descriptors(count), pytest.raises(OSError, match="Too many open files"):
        pair(SIZE)
    assert descriptors() == before


@pytest.mark.parametrize("pair", [Line.pair, Link.pair], ids=["line", "link"])
def test_memory_that_may_not_be_so_large_leaves_no_descriptor_open(pair: Callable[[int], Any]) -> None:
    before = descriptors()
    with limited(resource.RLIMIT_FSIZE, SIZE - 1), pytest.raises(OSError, match="File too large"):
        pair(SIZE)
    assert descriptors() == before
