"""`paceline check`, `describe` and `models` with real models: what they find is what a server serves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from paceline.clients import InferenceClient
from tests import models
from tests.ensembles import ensemble_config, write_ensemble
from tests.harness import ServerProcess, run_command, write_identity

CALLER = """
class Model:
    inputs = {"x": ("FP32", [-1, 16])}
    outputs = {"y": ("FP32", [-1, 16])}

    def execute(self, inputs):
        return {"y": self.models["inner"].infer({"INPUT0": inputs["x"]})["OUTPUT0"]}
"""


def write_onnx(repository: Path, name: str = "mlp") -> Path:
    folder = repository / name
    (folder / "1").mkdir(parents=True)
    models.write(models.mlp(), folder / "1" / "model.onnx")
    return folder


def checked(*arguments: str) -> dict[str, dict[str, Any]]:
    """What `check --json` says of each model, by name."""
    done = run_command("check", *arguments, "--json")
    assert done.stderr == ""
    document = json.loads(done.stdout)
    assert done.returncode == int(not document["ok"])
    return {one["name"]: one for one in document["models"]}


def test_check_says_what_each_load_found(tmp_path: Path) -> None:
    write_onnx(tmp_path)
    write_identity(tmp_path, "echo", extra=" ")
    found = checked(str(tmp_path))
    assert found["mlp"]["found"] == "batches of up to 32 rows, delay 0 us"
    assert found["mlp"]["warm_up"] == "zeros"
    assert found["mlp"]["description"]["batching"]["max_rows"] == 32
    assert found["echo"]["found"] == "up to 8 rows a request, not batched: no dynamic_batching in its configuration"


def test_check_names_the_reason_of_each_failure(tmp_path: Path) -> None:
    write_onnx(tmp_path)
    (tmp_path / "empty" / "1").mkdir(parents=True)
    (tmp_path / "wrong").mkdir()
    (tmp_path / "wrong" / "config.pbtxt").write_text("max_batch_size: many")
    done = run_command("check", str(tmp_path))
    assert done.returncode == 1
    said = done.stdout.splitlines()
    assert any(line.startswith("FAILED  empty version 1: no such file") for line in said)
    assert any(line.startswith(f"FAILED  wrong: {tmp_path}/wrong/config.pbtxt:1:17") for line in said)
    assert any(line.startswith("ok      mlp  version 1  onnxruntime_onnx") for line in said)
    assert said[-1] == "2 of 3 failed"


@pytest.mark.parametrize("path", ["mlp", "mlp/1/model.onnx", "mlp/1"])
def test_check_takes_each_path_that_serve_takes(tmp_path: Path, path: str) -> None:
    write_onnx(tmp_path)
    (found,) = checked(str(tmp_path / path)).values()
    assert found["reason"] == ""


def test_check_follows_flags_about_models(tmp_path: Path) -> None:
    file = write_onnx(tmp_path) / "1" / "model.onnx"
    found = checked(str(file), "--max-batch-size", "4", "--model-name", "net")
    assert found["net"]["found"] == "batches of up to 4 rows, delay 0 us"


def test_check_of_an_ensemble_shows_its_steps_or_reason(tmp_path: Path) -> None:
    steps = [("first", {"INPUT0": "in"}, {"OUTPUT0": "between"}), ("second", {"INPUT0": "between"}, {"OUTPUT0": "out"})]
    tensors = {"inputs": {"in": "FP32 16"}, "outputs": {"out": "FP32 16"}}
    for name in ("first", "second"):
        write_identity(tmp_path / "models", name)
    write_ensemble(tmp_path / "models", "whole", ensemble_config(steps, **tensors))
    write_ensemble(tmp_path / "models", "torn", ensemble_config([steps[0], ("absent", *steps[1][1:])], **tensors))
    said = run_command("check", str(tmp_path / "models")).stdout
    assert "  pipeline   in as INPUT0 -> first -> between as OUTPUT0\n" in said
    assert "             between as INPUT0 -> second -> out as OUTPUT0\n" in said
    (torn,) = (line for line in said.splitlines() if line.startswith("FAILED  torn"))
    assert "models that are not available or ambiguous: absent" in torn
    assert said.endswith("1 of 4 failed\n")


def test_check_warms_up_models_that_call_others(tmp_path: Path) -> None:
    write_identity(tmp_path, "inner")
    (tmp_path / "outer" / "1").mkdir(parents=True)
    (tmp_path / "outer" / "config.pbtxt").write_text(
        'backend: "python" parameters { key: "paceline.calls" value { string_value: "inner" } }'
    )
    (tmp_path / "outer" / "1" / "model.py").write_text(CALLER)
    found = checked(str(tmp_path), "--allow-python-models", "true")
    assert found["outer"]["warm_up"] == "zeros"
    assert found["outer"]["description"]["calls"] == ["inner"]


def test_check_tells_models_that_never_answer_apart(tmp_path: Path) -> None:
    for name, answer in {
        "nothing": "None",
        "unnamed": "inputs['x']",
        "stranger": "{'z': 0}",
        "key": "inputs['X']",
    }.items():
        (tmp_path / name / "1").mkdir(parents=True)
        lines, _ = CALLER.rsplit("return", 1)
        (tmp_path / name / "1" / "model.py").write_text(f"{lines}return {answer}\n")
    done = run_command("check", str(tmp_path), "--allow-python-models", "true", "--log-level", "error")
    assert done.returncode == 1
    whatever = "version 1: the model's outputs aren't as declared, whatever its input: execute: expected"
    assert f"FAILED  nothing {whatever} a dict of outputs by name, got NoneType\n" in done.stdout
    assert f"FAILED  unnamed {whatever} a dict of outputs by name, got ndarray\n" in done.stdout
    assert f"FAILED  stranger {whatever} output 'y', got only ['z']\n" in done.stdout
    assert "  warm-up    none, as it failed on zeros, maybe on any input" in done.stdout
    assert done.stdout.endswith("\n3 of 4 failed; 1 without an answer in warm-up\n")


def test_check_of_nothing_is_one_line(tmp_path: Path) -> None:
    done = run_command("check", str(tmp_path))
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (1, "", 1)
    assert "no models here" in done.stderr
    assert run_command("check").returncode == 2


def test_check_and_server_describe_a_model_alike(tmp_path: Path) -> None:
    write_onnx(tmp_path)
    with ServerProcess(tmp_path) as server:
        described = json.loads(run_command("describe", "mlp", "--server", server.target, "--json").stdout)
        listed = run_command("models", "--server", server.target).stdout.splitlines()
        with InferenceClient(server.target) as client:
            assert client.describe("mlp").versions == ("1",)
            assert client.model_config("mlp").max_batch_size == 32
    assert listed == ["MODEL  VERSION  STATE  REASON", "mlp    1        READY"]
    assert described == checked(str(tmp_path))["mlp"]["description"]
