"""Limits for executions of a model that is being loaded."""

from __future__ import annotations

import concurrent.futures
import threading
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

import pytest

from paceline.backends.errors import ExecutionError
from paceline.server.errors import LoadHangs
from paceline.server.models import warmup
from paceline.server.models.warmup import Supervisor


def test_functions_without_a_limit_run_on_the_callers_thread() -> None:
    assert Supervisor(0)(threading.current_thread) is threading.current_thread()


def test_functions_within_the_limit_share_a_daemon_thread_that_ends_with_the_supervisor() -> None:
    supervise = Supervisor(2**63 * 10**6)
    thread = supervise(threading.current_thread)
    assert supervise(threading.current_thread) is thread is not threading.current_thread()
    assert thread.daemon

    def fail() -> None:
        raise ExecutionError("no")

    with pytest.raises(ExecutionError, match="no"):
        supervise(fail)
    supervise.close()
    thread.join(30)
    assert not thread.is_alive()


def test_limits_below_a_minute_become_one_since_first_executions_take_longer() -> None:
    supervise = Supervisor(1)
    assert supervise(lambda: threading.Event().wait(0.01)) is False
    supervise.close()


@pytest.mark.usefixtures("without_minimum_execution_limit")
def test_function_beyond_the_limit_is_not_waited_for_and_its_end_is_reported() -> None:
    gate = threading.Event()
    supervise = Supervisor(1_000_000)
    with pytest.raises(LoadHangs, match=r"longer than its limit: 0\.001 s ") as caught:
        supervise(lambda: gate.wait(30))
    assert not caught.value.ended.done()
    gate.set()
    assert caught.value.ended.result(30)
    supervise.close()


def test_wait_that_expired_while_the_process_was_stopped_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    frozen, gate = iter([True]), threading.Event()

    def wait(futures: Iterable[Future[Any]], timeout: float) -> Any:
        """The first call returns as after SIGCONT: the time is over, and nothing has run in the meantime."""
        if next(frozen, False):
            waited = concurrent.futures.wait(futures, 0)
            gate.set()
            return waited
        return concurrent.futures.wait(futures, timeout)

    monkeypatch.setattr(warmup, "wait", wait)
    supervise = Supervisor(1)
    assert supervise(lambda: gate.wait(30))
    supervise.close()
