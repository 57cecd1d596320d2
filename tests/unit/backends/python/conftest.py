"""Fixtures that the tests of Python models share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.backends.base import ModelSource
from paceline.backends.python.backend import PythonBackend
from paceline.backends.python.instance import PythonInstance
from paceline.backends.python.process import ModelProcess
from tests import puppet
from tests.unit.backends.python_models import CPU, SPEC


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes get to their end, and their last lines are read, however busy the machine is."""
    monkeypatch.setattr(ModelProcess.__init__, "__defaults__", (60.0,))
    monkeypatch.setattr("paceline.backends.python.process._OUTPUT_GRACE_S", 60.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "1"


@pytest.fixture
def instance(folder: Path) -> Iterator[PythonInstance]:
    """An instance of the puppet (`tests.puppet`)."""
    model = PythonBackend().open(ModelSource("m", puppet.write_puppet(folder)), CPU)
    made = model.instance(SPEC, CPU)
    yield made
    made.close()
    model.close()
