"""Long calls into CUDA, and that calls which queue work don't stop Python behind them, on a stand-in for the driver
whose hangs keep its lock."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from paceline.backends.cuda.accelerator import CudaAccelerator
from paceline.backends.cuda.driver import load_driver
from paceline.backends.cuda.long_calls import LongCalls
from paceline.scheduler.testing import ManualClock
from tests.cuda import stand_in
from tests.polling import eventually

FROZEN_S = 20
"""For how long the whole process stands still if a test fails."""
NEVER_S = 0.05
"""How long to check that something doesn't happen."""


class Hanging:
    """A GPU that will hang, keeping the driver's lock, from `hang` until `end`; `calls` are its long calls."""

    def __init__(self, folder: Path, calls: LongCalls) -> None:
        self.file = folder / "hang"
        self._driver = stand_in.build(folder)
        self._threads: list[threading.Thread] = []
        self.gpu = CudaAccelerator(load_driver(lambda name: self._driver), 0, calls)
        self.gpu.enter()
        self.stream, self.event = self.gpu.stream(), self.gpu.event()
        self.stream.record(self.event)

    def hang(self, wait: Callable[[], None]) -> None:
        """Return once a thread hangs in `wait`."""
        self.file.touch()
        # It couldn't be ended from within if this process stood still.
        rescue = "import os, sys, time; time.sleep(float(sys.argv[1])); os.unlink(sys.argv[2])"
        self._rescuer = subprocess.Popen([sys.executable, "-c", rescue, str(FROZEN_S), str(self.file)])
        self.start(wait)
        eventually(self._driver.stand_in_hangs, "a call that hangs")

    def start(self, call: Callable[[], None]) -> threading.Thread:
        begun = threading.Event()

        def run() -> None:
            begun.set()
            self.gpu.enter()
            call()

        self._threads.append(threading.Thread(target=run, daemon=True))
        self._threads[-1].start()
        assert begun.wait(30)
        return self._threads[-1]

    def end(self) -> None:
        self.file.unlink(missing_ok=True)
        for thread in self._threads:
            thread.join(30)
        self._rescuer.kill()
        self._rescuer.wait(30)


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[LongCalls], Hanging]]:
    monkeypatch.setenv("STAND_IN_HANG", str(tmp_path / "hang"))
    monkeypatch.setenv("STAND_IN_HANG_LOCKED", "1")
    all_of_them: list[Hanging] = []

    def make(calls: LongCalls) -> Hanging:
        all_of_them.append(Hanging(tmp_path, calls))
        return all_of_them[-1]

    yield make
    for one in all_of_them:
        one.end()


@pytest.mark.parametrize(
    ("overdue_ns", "call"),
    [(10**9, lambda hanging: hanging.gpu.synchronize()), (0, lambda hanging: hanging.event.synchronize())],
    ids=["a call that keeps the driver's lock", "an overdue execution"],
)
def test_queueing_behind_what_hangs_stops_no_other_thread(
    made: Any, overdue_ns: int, call: Callable[[Any], None]
) -> None:
    hanging = made(LongCalls(overdue_ns))
    hanging.hang(lambda: call(hanging))
    queueing = hanging.start(lambda: hanging.stream.record(hanging.event))
    queueing.join(NEVER_S)
    assert queueing.is_alive()
    assert hanging.file.exists(), "Python stood still until the hang was over"


def test_memory_is_allocated_and_freed_as_a_long_call(tmp_path: Path) -> None:
    class Counting(LongCalls):
        made = 0

        def making(self) -> Any:
            self.made += 1
            return super().making()

    calls, driver = Counting(), stand_in.build(tmp_path)
    gpu = CudaAccelerator(load_driver(lambda name: driver), 0, calls)
    gpu.enter()
    memory = gpu.device_memory(1)
    assert calls.made == 1
    del memory
    assert calls.made == 2
    assert (calls.expected, calls.overdue) == (0, False)


def overdue(calls: LongCalls) -> bool:
    calls.look()
    return calls.overdue


def test_wait_is_overdue_from_its_limit_until_it_ends() -> None:
    clock = ManualClock()
    calls = LongCalls(10, clock.now_ns)
    calls.wait_began()
    clock.advance(9)
    assert not overdue(calls)
    clock.advance(1)
    assert overdue(calls)
    calls.wait_ended()
    assert not overdue(calls)


def test_longest_wait_of_all_threads_decides() -> None:
    clock = ManualClock()
    calls = LongCalls(10, clock.now_ns)
    calls.wait_began()
    clock.advance(5)
    other = threading.Thread(target=calls.wait_began)
    other.start()
    other.join(30)
    clock.advance(5)
    assert overdue(calls)
    calls.wait_ended()
    assert not overdue(calls)
    clock.advance(5)
    assert overdue(calls)


def test_long_calls_are_counted_and_those_that_fail_as_well() -> None:
    calls = LongCalls()
    with calls.making():
        with pytest.raises(ValueError, match="no"), calls.making():
            raise ValueError("no")
        assert calls.expected == 1
    assert calls.expected == 0


def test_long_call_of_the_garbage_collector_waits_for_nobody() -> None:
    calls = LongCalls()
    with calls._lock, calls.making():  # as if it ran while its thread counts
        assert calls.expected == 1
    assert calls.expected == 0
