"""A Python model that runs what its requests say and may call other models, for tests of what happens then.

Lives here: its source, and making a repository of it. Must not: assertions.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["write_caller"]

SOURCE = """
import asyncio, os, pathlib, threading
import numpy as np

HERE = pathlib.Path(__file__).parent


class Model:
    inputs = {"run": ("BYTES", [-1, 1]), "x": ("FP32", [-1, 16])}
    outputs = {"y": ("FP32", [-1, 4])}

    def load(self, context):
        self.kept = []

    def execute(self, inputs):
        x = inputs["x"]
        known = {"model": self, "models": self.models, "x": x, "y": np.zeros((len(x), 4), np.float32)}
        known |= globals()
        exec(inputs["run"][0, 0].decode(), known)
        return {"y": known["y"]}
"""


def write_caller(root: Path, config: str = "", *, calls: str = "", name: str = "m", source: str = SOURCE) -> Path:
    """Write model `name` into the repository `root`; `calls` names the models that it calls. Input `run` of a batch's
    first row is code, which finds `model`, `models` and the input `x`, and may make another `y`. Its folder."""
    folder = root / name
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(source)
    declared = f'parameters {{ key: "paceline.calls" value {{ string_value: "{calls}" }} }}' if calls else ""
    (folder / "config.pbtxt").write_text(f'backend: "python" {declared} {config}')
    return folder
