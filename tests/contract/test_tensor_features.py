"""What every backend promises for tensors that aren't just rows: a batch is answered as each request alone would be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from paceline.backends.base import Device, ModelInstance, ModelSource, OpenModel
from paceline.backends.identity import IdentityBackend
from paceline.backends.onnx.backend import OnnxBackend
from paceline.backends.spec import BatchOutput, ModelSpec, Tensors, TensorSpec
from tests import models
from tests.memory_models import MemoryModel

CPU = Device()
OWN = ModelSpec((TensorSpec("INPUT0", "FP32", (-1,)),), (TensorSpec("OUTPUT0", "FP32", (-1,)),))


def _onnx(folder: Path) -> OpenModel:
    path = models.write(models.identity("FP32", [None]), folder / "model.onnx")
    return OnnxBackend().open(ModelSource("m", path), CPU)


OPENERS: dict[str, Callable[[Path], OpenModel]] = {
    "onnx": _onnx,
    "memory": lambda folder: MemoryModel(OWN),
    "identity": lambda folder: IdentityBackend().open(ModelSource("m", folder, declared=OWN), CPU),
}


@pytest.fixture(params=OPENERS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OpenModel]:
    opened = OPENERS[request.param](tmp_path)
    yield opened
    opened.close()


def served(dims: tuple[int, ...], **more: object) -> ModelSpec:
    tensor = TensorSpec("INPUT0", "FP32", dims)
    return ModelSpec(
        (replace(tensor, **more),),
        (TensorSpec("OUTPUT0", "FP32", dims),),
        True,
        (),
        (BatchOutput(("OUTPUT0",), "INPUT0"),),
    )


def _checked(instance: ModelInstance, requests: list[Tensors]) -> None:
    results = instance.execute(requests).results

    for result, request in zip(results, requests, strict=True):
        (alone,) = instance.execute([request]).results
        np.testing.assert_array_equal(result[0], request[0], strict=True)
        np.testing.assert_array_equal(alone[0], request[0], strict=True)
    instance.close()


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_execute_ragged_batch_equals_each_request_alone(rank: int, model: OpenModel) -> None:
    random = np.random.default_rng(rank)
    shapes = [(rows, *random.integers(1, 5, rank)) for rows in (1, 3, 2, 1)]

    _checked(
        model.instance(served((-1,) * rank, ragged=True), CPU),
        [(random.random(shape, np.float32),) for shape in shapes],
    )


def test_execute_reshaped_batch_equals_each_request_alone(model: OpenModel) -> None:
    scalar = TensorSpec("INPUT0", "FP32", (1,), reshape=())
    spec = ModelSpec((scalar,), (replace(scalar, name="OUTPUT0"),), batched=True)

    _checked(model.instance(spec, CPU), [(np.float32([1]),), (np.float32([2, 3]),)])
