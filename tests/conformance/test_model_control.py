"""NVIDIA's client loads and unloads models, lists them, and sends configurations and files along; blocking and
asyncio."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tritonclient.utils import InferenceServerException

from tests import models
from tests.conformance.triton import Triton, tensors
from tests.harness import ServerProcess, write_identity

ROW = np.arange(16, dtype=np.float32).reshape(1, 16)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """A server in explicit mode that has loaded neither `echo` nor `simple`."""
    write_identity(tmp_path)
    models.write(models.add_sub("FP32"), tmp_path / "simple" / "1" / "model.onnx")
    with ServerProcess(tmp_path, args=("--model-control-mode", "explicit")) as started:
        yield started


@pytest.fixture
def triton(either: Triton) -> Triton:
    return either


async def index(triton: Triton) -> dict[str, list[tuple[str, str, str]]]:
    found: dict[str, list[tuple[str, str, str]]] = {}
    for line in (await triton.get_model_repository_index()).models:
        found.setdefault(line.name, []).append((line.version, line.state, line.reason))
    return found


async def settled_index(triton: Triton) -> dict[str, list[tuple[str, str, str]]]:
    """Once nothing is being unloaded."""
    while True:
        found = await index(triton)
        if not any(state == "UNLOADING" for lines in found.values() for _, state, _ in lines):
            return found


async def test_load_infer_unload_and_load_again(triton: Triton) -> None:
    assert await triton.is_server_ready()
    assert await index(triton) == {"echo": [("", "", "")], "simple": [("", "", "")]}
    assert not await triton.is_model_ready("simple")
    await triton.load_model("simple")
    assert await triton.is_model_ready("simple")
    assert (await index(triton))["simple"] == [("1", "READY", "")]
    both = {"INPUT0": ROW, "INPUT1": ROW}
    result = await triton.infer("simple", tensors(both))
    assert np.array_equal(result.as_numpy("OUTPUT0"), ROW + ROW)
    await triton.unload_model("simple")
    assert not await triton.is_model_ready("simple")
    assert (await settled_index(triton))["simple"] == [("1", "UNAVAILABLE", "unloaded")]
    with pytest.raises(InferenceServerException, match="has no available versions") as raised:
        await triton.infer("simple", tensors(both))
    assert raised.value.status() == "StatusCode.NOT_FOUND"
    assert await triton.is_server_ready()
    await triton.load_model("simple")
    result = await triton.infer("simple", tensors(both))
    assert np.array_equal(result.as_numpy("OUTPUT1"), ROW - ROW)


async def test_unload_with_dependents_and_of_the_unknown_is_fine(triton: Triton) -> None:
    await triton.load_model("echo")
    await triton.unload_model("echo", unload_dependents=True)
    await triton.unload_model("nosuch")
    assert set(await index(triton)) == {"echo", "simple"}


async def test_index_as_json_leaves_out_what_is_empty(triton: Triton) -> None:
    await triton.load_model("echo")
    assert await triton.get_model_repository_index(as_json=True) == {
        "models": [{"name": "echo", "version": "1", "state": "READY"}, {"name": "simple"}]
    }


async def test_load_of_an_unknown_model_fails_with_the_reason(triton: Triton) -> None:
    with pytest.raises(InferenceServerException, match="failed to load 'nosuch', failed to poll from model repository"):
        await triton.load_model("nosuch")


async def test_load_with_an_invalid_configuration_fails_with_the_reason(triton: Triton) -> None:
    with pytest.raises(InferenceServerException, match="failed to load 'echo', load parameter 'config'"):
        await triton.load_model("echo", config="max_batch_size: 16")


async def test_load_with_a_configuration_holds_until_the_next_load(triton: Triton) -> None:
    await triton.load_model("echo")
    config = {
        "backend": "identity",
        "max_batch_size": 2,
        "input": [{"name": "INPUT0", "data_type": "TYPE_FP32", "dims": [16]}],
        "output": [{"name": "OUTPUT0", "data_type": "TYPE_FP32", "dims": [16]}],
    }
    await triton.load_model("echo", config=json.dumps(config))
    three = tensors({"INPUT0": np.repeat(ROW, 3, axis=0)})
    with pytest.raises(InferenceServerException):
        await triton.infer("echo", three)
    await triton.load_model("echo")
    assert (await triton.infer("echo", three)).as_numpy("OUTPUT0").shape == (3, 16)


async def test_load_with_files_serves_only_these(triton: Triton) -> None:
    content = models.add_sub("FP32").SerializeToString()
    files = {"file:1/model.onnx": content, "file:3/model.onnx": content}
    with pytest.raises(InferenceServerException, match="config"):
        await triton.load_model("simple", files=files)
    assert (await index(triton))["simple"] == [("", "", "")]
    config = json.dumps({"backend": "onnxruntime", "version_policy": {"all": {}}})
    await triton.load_model("simple", config=config, files=files)
    assert (await index(triton))["simple"] == [("1", "READY", ""), ("3", "READY", "")]
    await triton.load_model("other", config=config, files=files)
    result = await triton.infer("other", tensors({"INPUT0": ROW, "INPUT1": ROW}), model_version="3")
    assert np.array_equal(result.as_numpy("OUTPUT0"), ROW + ROW)


async def test_load_with_files_outside_the_models_folder_is_refused(triton: Triton, tmp_path: Path) -> None:
    await triton.load_model("echo")
    config = json.dumps({"backend": "onnxruntime"})
    for path in ("file:../../escaped", f"file:{tmp_path}/escaped", "file:1/../../../escaped"):
        with pytest.raises(InferenceServerException, match="expected a path inside the model's folder"):
            await triton.load_model("echo", config=config, files={path: b"x"})
    assert not list(tmp_path.rglob("escaped"))
    assert (await index(triton))["echo"] == [("1", "READY", "")]


async def test_load_of_a_broken_model_keeps_the_old_one(triton: Triton, tmp_path: Path) -> None:
    await triton.load_model("simple")
    (tmp_path / "simple" / "1" / "model.onnx").write_bytes(b"broken")
    with pytest.raises(InferenceServerException, match="load failed for model 'simple': ") as raised:
        await triton.load_model("simple")
    assert raised.value.status() == "StatusCode.INVALID_ARGUMENT"
    assert await triton.is_model_ready("simple")
    result = await triton.infer("simple", tensors({"INPUT0": ROW, "INPUT1": ROW}))
    assert np.array_equal(result.as_numpy("OUTPUT0"), ROW + ROW)


async def test_server_metadata_announces_model_control(triton: Triton) -> None:
    extensions = (await triton.get_server_metadata()).extensions
    assert {"model_repository", "model_repository(unload_dependents)"} <= set(extensions)
