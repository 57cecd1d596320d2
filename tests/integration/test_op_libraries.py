"""Models with custom operators: a real library, files that are no libraries, and paths outside the model."""

from __future__ import annotations

from pathlib import Path

import grpc
import numpy as np
import pytest

from paceline.protos import inference_pb2 as pb
from paceline.server.app import Server
from paceline.server.config import Settings
from paceline.server.errors import StartError
from tests import models
from tests.integration.serving import failure_of, serving
from tests.operators import build_library, twice
from tests.wire import infer

ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)


def write(root: Path, library: str, config: str = "") -> Path:
    """A repository of one model that uses the operator; its configuration names `library`."""
    folder = root / "m"
    models.write(twice(), folder / "1" / "model.onnx")
    (folder / "config.pbtxt").write_text(f'model_operations {{ op_library_filename: "{library}" }} {config}')
    return folder


def allowing(root: Path) -> Settings:
    return Settings(paths=(root,), allow_op_libraries=True)


async def load_failure(settings: Settings) -> str:
    """The error with which a server fails to start because its only model can't be loaded."""
    server = Server(settings)
    with pytest.raises(StartError) as caught:
        await server.start()
    return str(caught.value)


@pytest.mark.parametrize(("place", "name"), [("1/twice.so", "twice.so"), ("lib/twice.so", "lib/twice.so")])
async def test_operator_library_in_the_versions_or_the_models_folder_is_used(
    tmp_path: Path, place: str, name: str
) -> None:
    folder = write(tmp_path, name, "instance_group { count: 2 kind: KIND_CPU }")
    (folder / "lib").mkdir()
    build_library(folder / place)
    async with serving(tmp_path, settings=allowing(tmp_path)) as served:
        answer = await served.infer(infer("m", {"INPUT0": ROWS}))
        assert answer.raw_output_contents[0] == (2 * ROWS).tobytes()
        config = (await served.stub.ModelConfig(pb.ModelConfigRequest(name="m"), timeout=20)).config
        assert list(config.model_operations.op_library_filename) == [name]


async def test_operator_libraries_are_refused_unless_the_server_allows_them(tmp_path: Path) -> None:
    build_library(write(tmp_path, "twice.so") / "twice.so")
    models.write(models.mlp(), tmp_path / "other" / "1" / "model.onnx")
    async with serving(tmp_path) as served:
        code, text = await failure_of(served.infer(infer("m", {"INPUT0": ROWS})))
        assert code is grpc.StatusCode.UNAVAILABLE
        assert "model_operations.op_library_filename" in text
        assert "`paceline serve` and `check` allow it with --allow-op-libraries true" in text  # no others do
        assert (await served.stub.ModelReady(pb.ModelReadyRequest(name="other"), timeout=20)).ready


@pytest.mark.parametrize("name", ["none.so", "../twice.so", "/lib/twice.so", "link.so", "1"])
async def test_library_that_is_no_file_inside_the_model_fails_the_load(tmp_path: Path, name: str) -> None:
    folder = write(tmp_path / "models", name)
    (tmp_path / "models" / "twice.so").touch()
    (tmp_path / "elsewhere.so").touch()
    (folder / "link.so").symlink_to(tmp_path / "elsewhere.so")
    assert await load_failure(allowing(tmp_path / "models")) == (
        "failed to load model 'm': model_operations.op_library_filename: "
        f"expected a file inside the version's or the model's folder, got '{name}'"
    )


@pytest.mark.parametrize(("content", "text"), [(b"", "file too short"), (b"no library" * 99, "invalid ELF header")])
async def test_file_that_is_not_a_library_fails_the_load(tmp_path: Path, content: bytes, text: str) -> None:
    path = write(tmp_path, "broken.so") / "1" / "broken.so"
    path.write_bytes(content)
    said = await load_failure(allowing(tmp_path))
    assert said.startswith("failed to load model 'm': ")
    assert f"operator library '{path}': onnx runtime error 1: " in said
    assert text in said


async def test_library_for_a_backend_without_operators_fails_the_load(tmp_path: Path) -> None:
    config = (
        'input { name: "a" data_type: TYPE_FP32 dims: [ 1 ] } output { name: "x" data_type: TYPE_FP32 dims: [ 1 ] }'
    )
    (write(tmp_path, "x.so", f'backend: "identity" {config}') / "1" / "x.so").touch()
    said = await load_failure(allowing(tmp_path))
    assert said == "failed to load model 'm': backend 'identity' has no use for libraries of operators"
