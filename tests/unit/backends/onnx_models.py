"""Helpers of the tests of ONNX models: open them, run them, and run them in onnxruntime directly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort  # type: ignore[import-untyped,unused-ignore]

from paceline.backends.base import Device, ModelInstance, ModelSource
from paceline.backends.onnx.backend import OnnxBackend, OnnxModel
from paceline.backends.spec import Array, ModelSpec, Tensors, TensorSpec
from tests import models

__all__ = ["CPU", "batched", "floats", "instance_of", "open_model", "run_directly", "run_one", "texts_of"]

CPU = Device()


def open_model(model: onnx.ModelProto, folder: Path, parameters: Mapping[str, str] | None = None) -> OnnxModel:
    path = models.write(model, folder / "model.onnx")
    return OnnxBackend().open(ModelSource("m", path, parameters=parameters or {}), CPU)


def batched(spec: ModelSpec) -> ModelSpec:
    def without_axis(tensors: Sequence[TensorSpec]) -> tuple[TensorSpec, ...]:
        return tuple(TensorSpec(tensor.name, tensor.datatype, tensor.dims[1:], tensor.utf8) for tensor in tensors)

    return ModelSpec(without_axis(spec.inputs), without_axis(spec.outputs), batched=True)


def instance_of(model: onnx.ModelProto, folder: Path, parameters: Mapping[str, str] | None = None) -> ModelInstance:
    opened = open_model(model, folder, parameters)
    return opened.instance(batched(opened.spec), CPU)


def run_directly(model: onnx.ModelProto, inputs: Mapping[str, Array]) -> list[Any]:
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return list(session.run(None, inputs))


def run_one(instance: ModelInstance, *inputs: Array) -> Tensors:
    return instance.execute([inputs]).results[0]


def texts_of(*rows: Sequence[bytes]) -> Array:
    return np.array([list(row) for row in rows], object)


def floats(*shape: int) -> Array:
    return np.random.default_rng(7).standard_normal(shape).astype(np.float32)
