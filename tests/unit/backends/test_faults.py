from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest

from paceline.backends.errors import ExecutionError
from tests.memory_models import Faults, Gate, change_datatype, lose_output, lose_row

BOOM = ExecutionError("boom")
INPUTS = [np.zeros((3, 2), np.float32)]


def _thread(target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    return thread


def _joined(thread: threading.Thread) -> bool:
    thread.join(timeout=60)
    return not thread.is_alive()


def test_faults_change_nothing_if_none_are_set() -> None:
    faults = Faults()

    faults.before(INPUTS)

    assert faults.after(INPUTS) is INPUTS


def test_raise_next_twice_raises_twice_and_then_no_more() -> None:
    faults = Faults()
    faults.raise_next(BOOM, times=2)

    for _ in range(2):
        with pytest.raises(ExecutionError, match="boom"):
            faults.before(INPUTS)
    faults.before(INPUTS)


def test_raise_when_raises_only_where_the_condition_holds() -> None:
    faults = Faults()
    faults.raise_when(lambda inputs: bool((inputs[0] == 9).any()), BOOM)

    faults.before(INPUTS)
    with pytest.raises(ExecutionError, match="boom"):
        faults.before([np.full((1, 2), 9)])
    faults.before(INPUTS)


def test_distort_next_changes_one_execution() -> None:
    faults = Faults()
    faults.distort_next(lose_row)

    assert [output.shape for output in faults.after(INPUTS)] == [(2, 2)]
    assert faults.after(INPUTS) is INPUTS


def test_distortions_lose_an_output_and_change_the_datatype() -> None:
    assert lose_output([*INPUTS, *INPUTS]) == INPUTS
    assert change_datatype(INPUTS)[0].dtype == np.complex64
    assert change_datatype(INPUTS)[0].shape == (3, 2)


def test_clear_forgets_every_fault() -> None:
    faults = Faults()
    faults.raise_next(BOOM)
    faults.raise_when(lambda inputs: True, BOOM)
    faults.distort_next(lose_row)

    faults.clear()

    faults.before(INPUTS)
    assert faults.after(INPUTS) is INPUTS


def test_gate_open_lets_through_and_counts() -> None:
    gate = Gate()

    gate.enter()
    gate.enter()

    assert gate.entered == 2


def test_gate_closed_holds_until_opened() -> None:
    gate = Gate()
    gate.close()
    threads = [_thread(gate.enter), _thread(gate.enter)]
    gate.wait_entered(2)

    assert all(thread.is_alive() for thread in threads)
    gate.open()
    assert all(_joined(thread) for thread in threads)


def test_gate_release_lets_that_many_through_and_holds_the_rest() -> None:
    gate, through = Gate(), threading.Semaphore(0)

    def execution() -> None:
        gate.enter()
        through.release()

    gate.close()
    threads = [_thread(execution) for _ in range(3)]
    gate.wait_entered(3)

    gate.release(2)
    assert through.acquire(timeout=60)
    assert through.acquire(timeout=60)
    assert sum(thread.is_alive() for thread in threads) >= 1
    assert not through.acquire(blocking=False)

    gate.open()
    assert all(_joined(thread) for thread in threads)


def test_gate_released_in_advance_lets_the_next_pass_at_once() -> None:
    gate = Gate(hold_limit_s=0)
    gate.close()
    gate.release()

    gate.enter()

    with pytest.raises(ExecutionError):
        gate.enter()


def test_gate_never_opened_gives_up_with_an_error() -> None:
    gate = Gate(hold_limit_s=0.01)
    gate.close()

    with pytest.raises(ExecutionError, match=r"held at a closed gate for 0\.01 s"):
        gate.enter()


def test_wait_entered_timeout_says_how_many_have_entered() -> None:
    gate = Gate()
    gate.enter()

    with pytest.raises(TimeoutError, match="expected 2 executions within 0 s, got 1"):
        gate.wait_entered(2, timeout_s=0)
