"""Models whose weights are in separate files: in Triton's two layouts, but not outside the model's folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest

from server.app import Server
from server.config import Settings
from server.errors import StartError
from tests import models
from tests.integration.serving import serving
from tests.wire import infer

ROWS = np.random.default_rng(0).standard_normal((3, 16), np.float32)


def write(folder: Path, weights: str) -> None:
    folder.mkdir(parents=True)
    onnx.save_model(
        models.mlp(), folder / "model.onnx", save_as_external_data=True, location="weights.bin", size_threshold=0
    )
    model = onnx.load(folder / "model.onnx", load_external_data=False)
    for tensor in model.graph.initializer:
        for entry in tensor.external_data:
            entry.value = weights if entry.key == "location" else entry.value
    models.write(model, folder / "model.onnx")


@pytest.mark.parametrize("place", ["m/1", "m/1/model.onnx", "m"], ids=["beside", "a folder", "without versions"])
async def test_weights_beside_the_model_are_found(tmp_path: Path, place: str) -> None:
    write(tmp_path / place, "weights.bin")
    models.write(models.mlp(), tmp_path / "whole" / "1" / "model.onnx")
    async with serving(tmp_path) as served:
        apart, whole = [await served.infer(infer(name, {"INPUT0": ROWS})) for name in ("m", "whole")]
    assert apart.raw_output_contents == whole.raw_output_contents


async def test_weights_outside_the_models_folder_fail_the_load(tmp_path: Path) -> None:
    write(tmp_path / "m" / "1", "../../secret.bin")
    (tmp_path / "m" / "1" / "weights.bin").rename(tmp_path / "secret.bin")
    server = Server(Settings(paths=(tmp_path,)))
    with pytest.raises(StartError, match="External data path escapes model directory"):
        await server.start()
