"""What the process apart is asked to run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from backends.base import ModelSpec
from backends.onnx_options import OnnxOptions

__all__ = ["ANSWER", "QUESTION", "Job"]

QUESTION, ANSWER = "question", "answer"


@dataclass(frozen=True, slots=True)
class Job:
    """The model in `path`, opened with `options` on the CPU, to run with inputs of `spec`."""

    name: str
    path: Path
    spec: ModelSpec
    options: OnnxOptions
