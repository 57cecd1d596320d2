"""A thread that can be used before it gets its long-running work."""

from __future__ import annotations

import threading
from queue import SimpleQueue

import pytest

from paceline.backends.worker_thread import WorkerThread
from tests.polling import eventually
from tests.rlimits import without_threads


def test_all_functions_run_on_one_thread_that_is_named_after_its_work() -> None:
    home = WorkerThread()
    first = home.call(threading.current_thread)
    seen: SimpleQueue[threading.Thread] = SimpleQueue()
    home.start("worker", lambda: seen.put(threading.current_thread()))
    assert seen.get(timeout=30) is first is home.call(threading.current_thread)
    assert (first.name, first.daemon) == ("worker", True)
    home.close()
    first.join(30)
    assert not first.is_alive()


def test_call_raises_what_the_function_raises_and_the_thread_keeps_running() -> None:
    home = WorkerThread()
    thread = home.call(threading.current_thread)
    with pytest.raises(ZeroDivisionError):
        home.call(lambda: 1 // 0)
    assert home.call(threading.current_thread) is thread
    home.close()


def test_call_raises_if_no_thread_can_be_started_and_the_next_one_runs() -> None:
    home = WorkerThread()
    with without_threads(), pytest.raises(RuntimeError, match="can't start new thread"):
        home.submit(int)
    assert home.submit(int).result(timeout=60) == 0
    home.close()


def test_close_lets_running_work_end_first() -> None:
    home = WorkerThread()
    gate, done = threading.Event(), threading.Event()

    def work() -> None:
        gate.wait(30)
        done.set()

    home.start("worker", work)
    home.close()
    assert not done.is_set()
    gate.set()
    eventually(done.is_set, "the work to end")


def test_close_without_work_starts_no_thread() -> None:
    before = {*threading.enumerate()}  # some of them may end meanwhile
    WorkerThread().close()
    assert {*threading.enumerate()} <= before
