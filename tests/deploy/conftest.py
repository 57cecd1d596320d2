"""Models that another user can read: pytest's own folders are closed to others."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import models

_DOUBLE = """
class Model:
    inputs = {"x": ("FP32", [-1, -1])}
    outputs = {"y": ("FP32", [-1, -1])}

    def execute(self, inputs):
        return {"y": 2 * inputs["x"]}
"""


@pytest.fixture
def storage() -> Iterator[Path]:
    """A folder with the model `m`, which adds and subtracts."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        models.write(models.add_sub(), Path(folder) / "m" / "1" / "model.onnx")
        yield Path(folder)


@pytest.fixture
def python_storage(storage: Path) -> Path:
    """The same folder with a second model, `py`, which is Python code and doubles its input."""
    (storage / "py" / "1").mkdir(parents=True)
    (storage / "py" / "1" / "model.py").write_text(_DOUBLE)
    return storage
