"""Captures, sessions that open and close, and what may go on beside what."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from backends.base import Device, ModelSource
from backends.host_accelerator import HostAccelerator
from backends.onnx import OnnxBackend
from backends.onnx_captures import Captures, captures
from tests import models

NEVER_S = 0.05
"""How long to look at what mustn't happen."""


class Beside:
    """Runs `function` on a thread of its own; `done` once it returned."""

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


def test_many_synchronize_side_by_side() -> None:
    turns = Captures()
    with turns.synchronizing():
        assert Beside(lambda: inside(turns.synchronizing())).ends()


def test_a_capture_is_alone() -> None:
    turns = Captures()
    with turns.capturing():
        others = [Beside(lambda: inside(turns.synchronizing())), Beside(lambda: inside(turns.capturing()))]
        assert [one.waits() for one in others] == [True, True]
    assert [one.ends() for one in others] == [True, True]


def test_a_capture_waits_for_those_that_synchronize() -> None:
    turns = Captures()
    with turns.synchronizing():
        capture = Beside(lambda: inside(turns.capturing()))
        assert capture.waits()
    assert capture.ends()


def test_turns_go_on_after_a_failure() -> None:
    turns = Captures()
    for context in (turns.capturing, turns.synchronizing):
        with pytest.raises(ValueError, match="no"), context():
            raise ValueError("no")
    assert Beside(lambda: inside(turns.capturing())).ends()


def test_sessions_open_and_close_while_nothing_is_captured(tmp_path: Path) -> None:
    backend = OnnxBackend(accelerators=lambda device: HostAccelerator())
    path = models.write(models.identity("FP32", ("batch", 2)), tmp_path / "model.onnx")
    with captures.capturing():
        opening = Beside(lambda: backend.open(ModelSource("m", path), Device()))
        assert opening.waits()
    assert opening.ends()
    opened = backend.open(ModelSource("m", path), Device())
    instance = opened.instance(opened.spec, Device())
    with captures.capturing():
        closing = Beside(instance.close)
        assert closing.waits()
    assert closing.ends()
    with captures.capturing():
        closing = Beside(opened.close)
        assert closing.waits()
    assert closing.ends()
