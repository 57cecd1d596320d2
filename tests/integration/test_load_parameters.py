"""Parameters of a load: configurations, files, and which ones are refused."""

from __future__ import annotations

import json
import resource
from pathlib import Path

import grpc
import pytest

from tests.integration.controlling import (
    READY_M,
    answers,
    explicit,
    index,
    load,
    ready,
)
from tests.integration.serving import echo_model, failure_of, serving, write_model
from tests.rlimits import limited
from tests.wire import infer, rows_of_floats

Code = grpc.StatusCode


async def test_config_override_applies_to_this_load_and_the_next_reads_the_disk(tmp_path: Path) -> None:
    config = "max_batch_size: 4"
    async with serving(tmp_path, {"m": echo_model()}, config=config, settings=explicit(tmp_path)) as served:
        await load(served, "m", config=json.dumps({"backend": "memory", "max_batch_size": 2}))
        three = infer("m", {"a": rows_of_floats(3)})
        code, text = await failure_of(served.infer(three))
        assert (code, "2" in text) == (Code.INVALID_ARGUMENT, True)
        await load(served, "m")
        assert (await served.infer(three)).raw_output_contents[0] == rows_of_floats(3).tobytes()


async def test_config_override_picks_the_versions(tmp_path: Path) -> None:
    folder = write_model(tmp_path, "m")
    (folder / "2").mkdir()
    config = json.dumps({"name": "m", "backend": "memory", "version_policy": {"specific": {"versions": [1]}}})
    async with serving(tmp_path, {"m": echo_model()}, settings=explicit(tmp_path)) as served:
        await load(served, "m", config=config)
        assert await index(served) == READY_M


IDENTITY = json.dumps(
    {
        "backend": "identity",
        "maxBatchSize": 8,
        "input": [{"name": "a", "dataType": "TYPE_FP32", "dims": ["2"]}],
        "output": [{"name": "x", "dataType": "TYPE_FP32", "dims": ["2"]}],
    }
)


async def test_file_override_is_the_whole_model_and_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("TMPDIR", str(scratch))
    write_model(tmp_path / "repository", "m")
    async with serving(tmp_path / "repository", settings=explicit(tmp_path / "repository")) as served:
        await load(served, "m", config=IDENTITY, **{"file:7/model.onnx": b"whatever"})
        assert await index(served) == [("m", "7", "READY", "")]
        assert await answers(served)
        await load(served, "brandnew", config=IDENTITY, **{"file:1/model.onnx": b""})
        assert await answers(served, "brandnew")
        code, _ = await failure_of(load(served, "m", config=IDENTITY, **{"file:notes/readme": b"no version"}))
        assert code is Code.INVALID_ARGUMENT
        assert list(scratch.iterdir()) == []
        assert await failure_of(load(served, "brandnew"))
        assert await answers(served, "brandnew")


BAD_LOADS: list[tuple[str, dict[str, object], str]] = [
    ("", {}, "model name cannot be empty"),
    ("..", {}, "model name must not contain path traversal characters"),
    (".", {}, "model name must not contain path traversal characters"),
    ("../outside", {}, "model name must not contain path traversal characters"),
    ("/etc", {}, "model name must not contain path traversal characters"),
    ("m/1", {}, "model name must not contain path traversal characters"),
    ("a\\b", {}, "model name must not contain path traversal characters"),
    ("m", {"config": b"{}"}, "invalid value type for load parameter 'config', expected string_param, got bytes_param"),
    ("m", {"config": True}, "invalid value type for load parameter 'config', expected string_param, got bool_param"),
    ("m", {"config": "{"}, "load parameter 'config': expected a ModelConfig as JSON"),
    ("m", {"config": ""}, "load parameter 'config': expected a ModelConfig as JSON"),
    ("m", {"config": " []"}, "load parameter 'config': expected a ModelConfig as JSON"),
    ("m", {"config": '""'}, "load parameter 'config': expected a ModelConfig as JSON"),
    ("m", {"config": "null"}, "load parameter 'config': expected a ModelConfig as JSON, an object, got 'null'"),
    ("m", {"config": "[" * 100_000}, "load parameter 'config': expected a ModelConfig as JSON"),
    ("m", {"config": '{"max_batchsize": 3}'}, "max_batchsize"),
    ("m", {"config": '{"max_batch_size": "many"}'}, "load parameter 'config': expected a ModelConfig as JSON"),
    ("m", {"config": '{"name": "other"}'}, "name: expected 'm', the name of its folder, got 'other'"),
    (
        "m",
        {"config": '{"backend": "memory", "instance_group": [{"passive": true}]}'},
        "instance_group.passive is not supported",
    ),
    ("m", {"force": True}, "failed to load 'm', unrecognized load parameter 'force'"),
    (
        "m",
        {"file:1/model.onnx": b""},
        "failed to load 'm', load parameter 'config': expected one together with 'file:...', got none",
    ),
    (
        "m",
        {"config": IDENTITY, "file:1/model.onnx": "text"},
        "invalid value type for load parameter 'file:1/model.onnx', expected bytes_param, got string_param",
    ),
    ("m", {"config": IDENTITY, "file:../1/model.onnx": b""}, "expected a path inside the model's folder"),
    ("m", {"config": IDENTITY, "file:1/../../x": b""}, "expected a path inside the model's folder"),
    ("m", {"config": IDENTITY, "file:/tmp/x": b""}, "expected a path inside the model's folder"),
    ("m", {"config": IDENTITY, "file:": b""}, "expected a path inside the model's folder"),
    ("m", {"config": IDENTITY, "file:.": b""}, "expected a path inside the model's folder"),
    ("m", {"config": IDENTITY, "file:1\0/model.onnx": b""}, "expected a path inside the model's folder"),
    ("m", {"config": IDENTITY, "file:1": b"", "file:1/model.onnx": b""}, "it conflicts with another file"),
    ("m", {"config": IDENTITY, "file:1//x": b"", "file:1/x": b""}, "expected each file once, got '1/x' twice"),
    ("m", {"config": IDENTITY, f"file:1/{'x' * 300}": b""}, "failed to load 'm', load parameter 'file:1/xxx"),
]


@pytest.mark.parametrize(("name", "parameters", "text"), BAD_LOADS, ids=lambda value: str(value)[:40])
async def test_bad_load_request_is_refused_and_the_model_keeps_serving(
    tmp_path: Path, name: str, parameters: dict[str, object], text: str
) -> None:
    write_model(tmp_path, "outside")
    repository = tmp_path / "repository"
    async with serving(repository, {"m": echo_model()}, settings=explicit(repository, load=("m",))) as served:
        code, details = await failure_of(load(served, name, **parameters))
        assert code is Code.INVALID_ARGUMENT
        assert text in details
        assert await answers(served)
        assert [line[:3] for line in await index(served)] == [("m", "1", "READY")]
        assert await ready(served)
        await load(served, "m")
        assert await index(served) == READY_M


async def test_load_fails_where_its_files_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scratch = tmp_path / "scratch"
    monkeypatch.setenv("TMPDIR", str(scratch))
    repository = tmp_path / "repository"
    brought: dict[str, object] = {"config": IDENTITY, "file:1/model.onnx": bytes(100_000)}
    why = f"failed to load 'new', its files can't be written below '{scratch}' (TMPDIR): "
    async with serving(repository, {"m": echo_model()}, settings=explicit(repository, load=("m",))) as served:
        missing = await failure_of(load(served, "new", **brought))
        assert missing == (Code.UNAVAILABLE, why + "No such file or directory")
        scratch.mkdir()
        with limited(resource.RLIMIT_FSIZE, 65_536):
            full = await failure_of(load(served, "new", **brought))
        assert full == (Code.UNAVAILABLE, why + "File too large")
        assert list(scratch.iterdir()) == []
        await load(served, "new", **brought)
        assert await answers(served, "new")
