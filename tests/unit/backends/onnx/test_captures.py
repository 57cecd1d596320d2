"""Captures, synchronization, and sessions that open and close: what may run at the same time."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.backends.base import Device, ModelSource
from paceline.backends.cuda.long_calls import Captures, captures, long_calls
from paceline.backends.errors import ExecutionError
from paceline.backends.onnx.backend import OnnxBackend
from paceline.backends.spec import ModelSpec, TensorSpec
from paceline.backends.worker_thread import WorkerThread
from tests import models
from tests.host_accelerator import HostAccelerator

NEVER_S = 0.05
"""How long to check that something doesn't happen."""


@pytest.fixture(autouse=True)
def without_old_sessions() -> None:
    """Sessions of earlier tests would wait for captures on whichever thread happens to collect garbage."""
    gc.collect()


class OnThread:
    """Runs `function` on a separate thread; `done` is set once it has returned."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.done, begun = threading.Event(), threading.Event()

        def run() -> None:
            begun.set()
            function()
            self.done.set()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        assert begun.wait(30)

    def waits(self) -> bool:
        return not self.done.wait(NEVER_S)

    def ends(self) -> bool:
        return self.done.wait(30)


def inside(context: Any) -> None:
    with context:
        pass


class Hanging(OnThread):
    """Is inside `context` until `ends` is set."""

    def __init__(self, context: Any, ends: threading.Event) -> None:
        entered = threading.Event()

        def hang() -> None:
            with context:
                entered.set()
                ends.wait(60)

        super().__init__(hang)
        assert entered.wait(30)


def test_threads_synchronize_at_the_same_time() -> None:
    turns = Captures()
    with turns.synchronizing():
        assert OnThread(lambda: inside(turns.synchronizing())).ends()


def test_capture_runs_alone() -> None:
    turns = Captures()
    with turns.capturing():
        others = [OnThread(lambda: inside(turns.synchronizing())), OnThread(lambda: inside(turns.capturing()))]
        assert [one.waits() for one in others] == [True, True]
    assert [one.ends() for one in others] == [True, True]


def test_capture_waits_for_threads_that_synchronize() -> None:
    turns = Captures()
    with turns.synchronizing():
        capture = OnThread(lambda: inside(turns.capturing()))
        assert capture.waits()
    assert capture.ends()


def test_capturing_thread_never_waits_for_itself() -> None:
    turns = Captures()
    with turns.capturing(), turns.synchronizing():
        other = OnThread(lambda: inside(turns.synchronizing()))
        assert other.waits()
    assert other.ends()


def test_hanging_capture_is_not_waited_for_forever() -> None:
    turns, ends = Captures(longest_s=NEVER_S), threading.Event()
    hanging = Hanging(turns.capturing(), ends)
    assert OnThread(lambda: inside(turns.synchronizing())).ends()
    turns._longest_s = 60.0
    with turns.capturing():
        ends.set()
        assert hanging.ends()
        # When it ends, it doesn't end another's turn.
        assert OnThread(lambda: inside(turns.capturing())).waits()


def test_threads_that_synchronize_a_hanging_device_are_waited_for_once() -> None:
    turns, ends = Captures(longest_s=NEVER_S), threading.Event()
    hanging = Hanging(turns.synchronizing(), ends)
    assert OnThread(lambda: inside(turns.capturing())).ends()
    turns._longest_s = 60.0
    assert OnThread(lambda: inside(turns.capturing())).ends()
    with turns.synchronizing():
        assert OnThread(lambda: inside(turns.capturing())).waits()
    ends.set()
    assert hanging.ends()


def test_turns_are_given_back_after_a_failure() -> None:
    turns = Captures()
    for context in (turns.capturing, turns.synchronizing):
        with pytest.raises(ValueError, match="no"), context():
            raise ValueError("no")
    assert OnThread(lambda: inside(turns.capturing())).ends()


@pytest.mark.parametrize("datatype", ["FP32", "BYTES"])  # staged, and plain
def test_sessions_open_and_close_only_while_nothing_is_captured(datatype: str, tmp_path: Path) -> None:
    backend = OnnxBackend(accelerators=lambda device: HostAccelerator())
    source = ModelSource("m", models.write(models.identity(datatype, ("batch", 2)), tmp_path / "model.onnx"))
    with captures.capturing():
        opening = OnThread(lambda: backend.open(source, Device()))
        assert opening.waits()
    assert opening.ends()
    used, unused = (backend.open(source, Device()) for _ in range(2))
    for close in (used.instance(used.spec, Device()).close, unused.close):
        with captures.capturing():
            closing = OnThread(close)
            assert closing.waits()
        assert closing.ends()


def spec_of(datatype: str) -> ModelSpec:
    given, taken = (TensorSpec(name, datatype, (2,)) for name in ("INPUT0", "OUTPUT0"))
    return ModelSpec((given,), (taken,), batched=True)


class Thread:
    """A thread that executes batches full of `element`."""

    def __init__(self, instance: Any, element: Any) -> None:
        self._instance, self._element = instance, element
        self._thread = WorkerThread()

    def execute(self, rows: int) -> None:
        batch = np.full((rows, 2), self._element, np.float32 if self._element == 1 else object)
        self._future = self._thread.submit(lambda: self._instance.execute([(batch,)]))

    def waits(self) -> bool:
        return not wait([self._future], NEVER_S).done

    def ends(self) -> bool:
        return bool(self._future.result(30))


@pytest.mark.parametrize(("datatype", "one"), [("FP32", 1), ("BYTES", b"1")])  # staged, and plain
def test_executions_that_are_a_threads_first_of_their_size_wait_for_captures(
    datatype: str, one: Any, tmp_path: Path
) -> None:
    backend = OnnxBackend(accelerators=lambda device: HostAccelerator())
    source = ModelSource("m", models.write(models.identity(datatype, ("batch", 2)), tmp_path / "model.onnx"))
    opened = backend.open(source, Device())
    instance = opened.instance(spec_of(datatype), Device())
    first, second = Thread(instance, one), Thread(instance, one)
    for thread, rows in ((first, 1), (first, 2), (second, 2)):
        with captures.capturing():
            thread.execute(rows)
            assert thread.waits()
        assert thread.ends()
        with captures.capturing():
            thread.execute(rows)
            assert thread.ends()


def test_trial_takes_turns_with_captures(tmp_path: Path) -> None:
    backend = OnnxBackend(accelerators=lambda device: HostAccelerator())
    model = models.identity("FP32", ("batch", 2))
    opened = backend.open(ModelSource("m", models.write(model, tmp_path / "model.onnx")), Device())
    begun, executed = threading.Event(), threading.Event()

    def supervise(execute: Callable[[], Any]) -> Any:
        begun.set()
        outcome = execute()
        executed.set()
        return outcome

    with captures.capturing():
        trial = OnThread(lambda: opened.try_rows(supervise))
        assert begun.wait(30)
        assert not executed.wait(NEVER_S)
    assert trial.ends()
    assert executed.is_set()


def test_slow_first_execution_is_a_long_call_and_later_ones_are_not(tmp_path: Path) -> None:
    accelerator = HostAccelerator()
    backend = OnnxBackend(accelerators=lambda device: accelerator)
    source = ModelSource("m", models.write(models.identity("FP32", ("batch", 2)), tmp_path / "model.onnx"))
    opened = backend.open(source, Device())
    seen: list[int] = []
    # Called as each batch begins.
    accelerator.enter = lambda: seen.append(long_calls.expected)  # type: ignore[method-assign]
    instance = opened.instance(spec_of("FP32"), Device())
    batch = [(np.zeros((1, 2), np.float32),)]
    before = long_calls.expected
    seen.clear()
    for _ in range(3):
        instance.execute(batch)
    assert [expected - before for expected in seen] == [1, 0, 0]
    with pytest.raises(ExecutionError):
        instance.execute([(np.zeros((3, 5), np.float32),)])
    assert long_calls.expected == before
