"""Models whose weights are in separate files: where these may be, who may change them, and who can reach them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx
import pytest

from paceline.clients import InferenceClient
from paceline.server.app import Server
from paceline.server.config import Settings
from paceline.server.errors import StartError
from tests import models
from tests.harness import ServerProcess
from tests.integration.serving import serving
from tests.mounts import seen_through_a_process
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


def test_model_keeps_its_weights_when_their_file_is_overwritten_and_cut(tmp_path: Path) -> None:
    write(tmp_path / "m" / "1", "weights.bin")
    weights = tmp_path / "m" / "1" / "weights.bin"
    with ServerProcess(tmp_path) as server, InferenceClient(server.target) as client:
        before = client.infer("m", {"INPUT0": ROWS})["OUTPUT0"]
        with weights.open("r+b") as file:  # the same file, as cp and rsync --inplace write it
            file.write(bytes(weights.stat().st_size))
        assert np.array_equal(client.infer("m", {"INPUT0": ROWS})["OUTPUT0"], before)
        os.truncate(weights, 0)
        assert np.array_equal(client.infer("m", {"INPUT0": ROWS})["OUTPUT0"], before)


async def test_files_behind_a_link_that_only_the_kernel_can_follow_are_found(tmp_path: Path) -> None:
    write(tmp_path / "models" / "m" / "1", "weights.bin")
    (tmp_path / "models" / "m" / "labels.txt").write_text("zero\none\ntwo\nthree\n")
    (tmp_path / "models" / "m" / "config.pbtxt").write_text(
        'input [{ name: "INPUT0" data_type: TYPE_FP32 dims: [ -1, 16 ] }]'
        'output [{ name: "OUTPUT0" data_type: TYPE_FP32 dims: [ -1, 4 ] label_filename: "labels.txt" }]'
    )
    with seen_through_a_process(tmp_path / "models", tmp_path / "mounted") as place:
        (tmp_path / "link").symlink_to(place)
        async with serving(tmp_path / "link") as served:
            assert (await served.infer(infer("m", {"INPUT0": ROWS}))).raw_output_contents


async def test_weights_outside_the_models_folder_fail_the_load(tmp_path: Path) -> None:
    write(tmp_path / "m" / "1", "../../secret.bin")
    (tmp_path / "m" / "1" / "weights.bin").rename(tmp_path / "secret.bin")
    server = Server(Settings(paths=(tmp_path,)))
    with pytest.raises(StartError, match=r"expected a file inside the model's folder, got '../../secret.bin'"):
        await server.start()
