"""`paceline serve` in KServe's environment, as real processes: the files from a storage initializer, and their name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline.clients import InferenceClient, NotFound
from tests import models
from tests.harness import ServerProcess, run_command, write_identity
from tests.polling import eventually

CONFIG = 'name: "of-the-trainer" default_model_filename: "graph.onnx" max_batch_size: 3'


def put_file(storage: Path, name: str) -> None:
    models.write(models.add_sub(), storage / name)


def is_unknown(client: InferenceClient, model: str) -> bool:
    try:
        client.model_ready(model)
    except NotFound:
        return True
    return False


@pytest.mark.parametrize("file", ["model.onnx", "resnet50.onnx", "1/model.onnx", "7/model.onnx"])
def test_storage_of_one_model_is_served_under_the_name_of_the_inference_service(tmp_path: Path, file: str) -> None:
    put_file(tmp_path, file)
    env = {"STORAGE_URI": str(tmp_path), "INFERENCE_SERVICE_NAME": "my-service"}
    with ServerProcess(env=env) as server, InferenceClient(server.target) as client:
        ones = np.ones((2, 16), np.int32)
        assert (client.infer("my-service", {"INPUT0": ones, "INPUT1": ones})["OUTPUT0"] == 2).all()
        assert client.server_ready()
        assert list(client.model_metadata("my-service").versions) == [file[0] if file[0].isdigit() else "1"]


@pytest.mark.parametrize("flag", ["--model_name=given", "--model-name=given"])
def test_model_name_overrides_the_inference_service_and_the_configuration(tmp_path: Path, flag: str) -> None:
    put_file(tmp_path, "graph.onnx")
    (tmp_path / "config.pbtxt").write_text(CONFIG)
    env = {"INFERENCE_SERVICE_NAME": "my-service"}
    with ServerProcess(tmp_path, args=[flag], env=env) as server, InferenceClient(server.target) as client:
        assert client.model_ready("given")
        for name in ("my-service", "of-the-trainer", tmp_path.name):
            assert is_unknown(client, name)


def test_repository_in_the_storage_keeps_the_names_of_its_models(tmp_path: Path) -> None:
    write_identity(tmp_path, "a")
    write_identity(tmp_path, "b")
    env = {"STORAGE_URI": str(tmp_path), "INFERENCE_SERVICE_NAME": "my-service"}
    with (
        ServerProcess(args=["--model_name", "my-service"], env=env) as server,
        InferenceClient(server.target) as client,
    ):
        assert client.model_ready("a")
        assert client.model_ready("b")
        assert is_unknown(client, "my-service")


def test_folder_given_as_a_path_keeps_its_name_in_an_inference_service(tmp_path: Path) -> None:
    put_file(tmp_path, "echo/model.onnx")
    with (
        ServerProcess(tmp_path / "echo", env={"INFERENCE_SERVICE_NAME": "my-service"}) as server,
        InferenceClient(server.target) as client,
    ):
        assert client.model_ready("echo")


def test_name_is_kept_when_the_storage_changes_while_it_is_polled(tmp_path: Path) -> None:
    put_file(tmp_path, "1/model.onnx")
    flags = ["--model-control-mode", "poll", "--repository-poll-secs", "0.05"]
    env = {"STORAGE_URI": str(tmp_path), "INFERENCE_SERVICE_NAME": "my-service"}
    with ServerProcess(args=flags, env=env) as server, InferenceClient(server.target) as client:
        put_file(tmp_path, "2/model.onnx")
        eventually(lambda: list(client.model_metadata("my-service").versions) == ["2"], "version 2 serves")


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"STORAGE_URI": "s3://bucket/m"}, "STORAGE_URI: expected the folder"),
        ({"INFERENCE_SERVICE_NAME": "svc", "STORAGE_URI": "/nonexistent"}, "/nonexistent: No such file or directory"),
        ({}, "expected at least one PATH"),
    ],
    ids=["not downloaded", "not there", "no KServe"],
)
def test_missing_storage_fails_the_start_with_the_reason(env: dict[str, str], said: str) -> None:
    done = run_command("serve", "--grpc-port", "0", "--metrics-port", "0", env=env)
    assert done.returncode in (1, 2)
    assert said in done.stderr
    assert "Traceback" not in done.stderr
