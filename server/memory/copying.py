"""Copies so large that several threads share them.

Lives here: which thread takes which part, and which waits for which. Must not: know what is copied, or how.

A single core copies at a fraction of the memory bandwidth that servers have. Helpers are shared by all copies, and are
never waited for before they have begun: the thread that asked does the parts that they don't get to.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from functools import cache, partial
from typing import TypeVar

__all__ = ["copy_parts", "parts_of"]

T = TypeVar("T")

_PART_BYTES = 2**21
"""At least. A thread that sleeps is woken up in the time in which some hundred KB are copied."""
_MOST_THREADS = 4


def parts_of(size_bytes: int) -> int:
    """In how many parts so much is to be copied."""
    return max(1, min(_threads(), size_bytes // _PART_BYTES))


def copy_parts(copy: Callable[[T], bool], parts: Iterable[T], helpers: Executor | None = None) -> bool:
    """Whether `copy`, called with each of `parts`, says each time that it has done it. It should let go of the
    interpreter meanwhile. Blocks until nobody copies any more, also if it raises, which it shouldn't. `helpers` are
    those of the process by default."""
    # With what leads to the memory: a helper that comes too late finds nothing to keep.
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
        # Those that haven't begun aren't needed any more. Until the others have ended, whatever else went wrong, the
        # memory that they write must be there.
        begun = [one for one in asked if not one.cancel()]
        wait(begun)
    return well and all(one.result() for one in begun)


def _ask(helpers: Executor, take: Callable[[], bool], times: int) -> Iterator[Future[bool]]:
    for _ in range(times):
        try:
            yield helpers.submit(take)
        except RuntimeError:  # there can be no more threads, or the interpreter ends: then nobody helps
            return


@cache
def _helpers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_MOST_THREADS - 1, "paceline-copy")


@cache
def _threads() -> int:
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return min(_MOST_THREADS, cores)
