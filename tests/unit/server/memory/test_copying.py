"""Parts of a copy on several threads: each is copied once, on whichever thread, and busy helpers aren't waited for."""

from __future__ import annotations

import threading
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

import pytest

from paceline.server.memory.copying import copy_parts, parts_of

MANY = range(200)


class NoThreads(Executor):
    """A pool on a machine that can't start any more threads."""

    def submit(self, *_: Any, **__: Any) -> Future[Any]:
        raise RuntimeError("can't start new thread")


def test_each_part_is_copied_once() -> None:
    copied: list[int] = []
    assert copy_parts(lambda part: copied.append(part) is None, MANY)
    assert sorted(copied) == [*MANY]


def test_helpers_copy_while_the_caller_does() -> None:
    both = threading.Barrier(2, timeout=30)
    threads = set()

    def copy(_: int) -> bool:
        threads.add(threading.get_ident())
        both.wait()  # passes only two threads together
        return True

    assert copy_parts(copy, range(2))
    assert len(threads) == 2


def test_failed_part_is_reported_and_the_others_are_copied() -> None:
    copied = []

    def copy(part: int) -> bool:
        copied.append(part)
        return part != 7

    assert not copy_parts(copy, MANY)
    assert sorted(copied) == [*MANY]


def test_part_that_fails_on_a_helper_is_reported() -> None:
    both = threading.Barrier(2, timeout=30)

    def copy(_: int) -> bool:
        both.wait()
        return threading.current_thread() is threading.main_thread()

    assert not copy_parts(copy, range(2))


def test_error_is_raised_only_after_all_running_parts_have_ended() -> None:
    """Otherwise a part could still be written to memory that has been released."""
    begun, let_go = threading.Event(), threading.Event()
    ended = []

    def copy(part: str) -> bool:
        if threading.current_thread() is threading.main_thread():
            begun.wait(30)
            threading.Timer(0.05, let_go.set).start()
            raise MemoryError(part)
        begun.set()
        let_go.wait(30)
        ended.append(part)
        return True

    with pytest.raises(MemoryError):
        copy_parts(copy, "ab")
    assert len(ended) == 1


def test_busy_helpers_are_not_waited_for() -> None:
    let_go = threading.Event()
    with ThreadPoolExecutor(1) as busy:
        other = busy.submit(let_go.wait, 30)
        copied: list[int] = []
        assert copy_parts(lambda part: copied.append(part) is None, MANY, busy)
        assert copied == [*MANY]
        assert not other.done()
        let_go.set()


def test_without_threads_the_caller_copies_all() -> None:
    copied: list[int] = []
    assert copy_parts(lambda part: copied.append(part) is None, MANY, NoThreads())
    assert copied == [*MANY]


def test_small_copies_are_one_part_and_large_ones_at_most_one_per_thread() -> None:
    assert parts_of(0) == parts_of(1) == parts_of(4 * 2**20 - 1) == 1
    assert 1 <= parts_of(4 * 2**20) <= 2
    assert parts_of(2**40) == parts_of(2**41) <= 4
