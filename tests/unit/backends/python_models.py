"""Helpers of the tests of Python models: open and run them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from paceline.backends.base import Device, DeviceKind, ModelInstance, ModelSource
from paceline.backends.python.backend import PythonBackend
from paceline.backends.spec import Array, ModelSpec, TensorSpec

__all__ = ["CLASS", "CPU", "SPEC", "is_alive", "model_source", "request", "run", "serving"]

CPU = Device(DeviceKind.CPU)
SPEC = ModelSpec((TensorSpec("INPUT0", "INT64", (1,)),), (TensorSpec("OUTPUT0", "INT64", (1,)),), batched=True)
"""The tensors of the puppet (`tests.puppet`)."""

CLASS = """
class Model:
    inputs = {"x": ("FP32", [-1, 4])}
    outputs = {"y": ("FP32", [-1])}
    def execute(self, inputs):
        return {"y": inputs["x"].sum(axis=1)}
"""


def model_source(
    path: Path, declared: ModelSpec | None = None, parameters: Mapping[str, str] | None = None, **more: Any
) -> ModelSource:
    """Of a model `m`, whose process gets to its end however busy the machine is."""
    return ModelSource("m", path, declared, parameters or {}, **{"close_s": 60, **more})


@contextmanager
def serving(folder: Path, text: str, spec: ModelSpec) -> Iterator[ModelInstance]:
    """An instance of a model whose model.py has that text."""
    folder.mkdir(exist_ok=True)
    (folder / "model.py").write_text(text)
    model = PythonBackend().open(model_source(folder / "model.py"), CPU)
    instance = model.instance(spec, CPU)
    try:
        yield instance
    finally:
        instance.close()
        model.close()


def request(*elements: int) -> tuple[Array, ...]:
    return (np.array(elements, np.int64).reshape(-1, 1),)


def run(instance: ModelInstance, *elements: int) -> list[int]:
    (result,) = instance.execute([request(*elements)]).results
    assert not isinstance(result, Exception)
    numbers: list[int] = result[0].ravel().tolist()
    return numbers


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
