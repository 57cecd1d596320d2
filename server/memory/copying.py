"""Copies so large that several threads share them.

Lives here: which thread takes which part, and which waits for which. Must not: know what is copied, or how.

A single core copies at a fraction of a server's memory bandwidth. All copies share the helper threads. Nobody waits for
a helper that hasn't started: the calling thread does the parts that helpers don't get to.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from functools import cache, partial
from typing import TypeVar

from paceline.server.cpus import usable_cpus

__all__ = ["copy_parts", "parts_of"]

T = TypeVar("T")

_PART_BYTES = 2**21
"""The least size of a part. Waking a sleeping thread takes as long as copying some hundred KB."""
_MAX_THREADS = 4


def parts_of(size_bytes: int) -> int:
    """In how many parts `size_bytes` are to be copied."""
    return max(1, min(_threads(), size_bytes // _PART_BYTES))


def copy_parts(copy: Callable[[T], bool], parts: Iterable[T], helpers: Executor | None = None) -> bool:
    """Call `copy` with each of `parts`, on several threads. True if each call returned True. `copy` should release the
    interpreter lock. Blocks until nobody copies any more, even if `copy` raises, which it shouldn't. `helpers` are the
    process's own by default."""
    # The queue holds what leads to the memory: a helper that comes too late finds nothing to keep.
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
        # Helpers that haven't started aren't needed any more. Until the others have ended, whatever else went wrong,
        # the memory that they write must exist.
        begun = [one for one in asked if not one.cancel()]
        wait(begun)
    return well and all(one.result() for one in begun)


def _ask(helpers: Executor, take: Callable[[], bool], times: int) -> Iterator[Future[bool]]:
    for _ in range(times):
        try:
            yield helpers.submit(take)
        except RuntimeError:  # no more threads can be started, or the interpreter ends: then nobody helps
            return


@cache
def _helpers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_MAX_THREADS - 1, "paceline-copy")


@cache
def _threads() -> int:
    return min(_MAX_THREADS, usable_cpus().count)
