"""Fixtures that the tests of Python models share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from paceline.backends.python.backend import PythonBackend
from paceline.backends.python.instance import PythonInstance
from tests import puppet
from tests.unit.backends.python_models import CPU, SPEC, model_source


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last lines of processes are read, however busy the machine is."""
    monkeypatch.setattr("paceline.backends.python.process._OUTPUT_GRACE_S", 60.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "1"


@pytest.fixture
def instance(folder: Path) -> Iterator[PythonInstance]:
    """An instance of the puppet (`tests.puppet`)."""
    model = PythonBackend().open(model_source(puppet.write_puppet(folder)), CPU)
    made = model.instance(SPEC, CPU)
    yield made
    made.close()
    model.close()
