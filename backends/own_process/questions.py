"""What the separate process is asked to do before it executes.

Lives here: questions, and asking them. Must not: know what for.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from paceline.backends.base import Device
from paceline.backends.errors import BackendError
from paceline.backends.onnx.options import OnnxOptions
from paceline.backends.onnx.spec import Found
from paceline.backends.python.process import ModelProcess
from paceline.backends.spec import ModelSpec

__all__ = ["FILE", "Job", "Question", "Trying", "ask"]

FILE = Path(__file__).with_name("model.py")
"""What runs there."""


@dataclass(frozen=True, slots=True)
class Job:
    """The model in `path`, to be opened with `options` on `device`. `declared` as in `ModelSource`."""

    name: str
    path: Path
    options: OnnxOptions
    device: Device = field(default_factory=Device)
    declared: ModelSpec | None = None


@dataclass(frozen=True, slots=True)
class Trying:
    """The spec of a trial's batches. While they execute, the process may allocate `memory_bytes` more than it has."""

    spec: ModelSpec
    memory_bytes: int


Question: TypeAlias = Job | ModelSpec | Trying | None
"""A job: open it, and say what it is (`Found`). A spec: that of the batches to come. None: close the model."""


def ask(process: ModelProcess, question: Question) -> Found | None:
    """The answer of `process`. Blocks. Raises LoadError if the model can't be opened, ProcessError if the process has
    ended, and ExecutionError for any other failure."""
    result: Found | BackendError | None = pickle.loads(process.ask(pickle.dumps(question, -1)))
    if isinstance(result, BackendError):
        raise result
    return result
