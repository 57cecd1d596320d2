"""KServe's SDK in front of the server: its gRPC client, and a transformer written with it whose predictor is this
server.

The SDK is looked for in PACELINE_KSERVE_PYTHON, the Python of an environment that has it, else where `make
witness-kserve` puts it. It connects to nothing beyond loopback.
"""

from __future__ import annotations

import json
import os
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from paceline.clients import ClientError, InferenceClient
from tests.harness import REPO, ServerProcess, write_identity
from tests.polling import eventually
from tests.ports import free_port

HERE = REPO / "tests" / "conformance"
ROWS = 16

# One batch of all, or none.
ALL_TOGETHER = f"dynamic_batching {{ preferred_batch_size: {ROWS} max_queue_delay_microseconds: 600000000 }}"


@pytest.fixture(scope="module")
def python() -> str:
    """A Python that has KServe's SDK."""
    if named := os.environ.get("PACELINE_KSERVE_PYTHON"):
        assert os.access(named, os.X_OK), f"PACELINE_KSERVE_PYTHON names no program: {named}"
        return named
    found = REPO / ".bench" / "rivals" / "kserve" / "bin" / "python"
    if not (found.parents[1] / "installed").exists():
        pytest.skip("there is no KServe SDK: `make witness-kserve` installs it")
    return str(found)


@pytest.fixture
def predictor(tmp_path: Path) -> Iterator[ServerProcess]:
    """As KServe starts it: `resnet` is the InferenceService's name, given to the one model, which has no name
    itself."""
    write_identity(tmp_path, "models", extra=ALL_TOGETHER, rows=ROWS)
    env = {"STORAGE_URI": str(tmp_path / "models"), "INFERENCE_SERVICE_NAME": "resnet"}
    with ServerProcess(env=env) as server:
        yield server


def environment() -> dict[str, str]:
    """Without this process's path: the SDK has its own environment."""
    return {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}


def test_kserve_grpc_client_is_served_in_one_batch(python: str, predictor: ServerProcess) -> None:
    command = [python, str(HERE / "kserve_client.py"), predictor.target, "resnet", str(ROWS)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert found["live"] is found["ready"] is found["model_ready"] is True
    assert found["answers"] == [[f"r{n}", "resnet", "1", n] for n in range(ROWS)]
    assert found["unknown"][0] == "NOT_FOUND"
    assert found["misnamed"][0] == "INVALID_ARGUMENT"
    assert "'WRONG'" in found["misnamed"][1]
    assert found["late"][0] == "DEADLINE_EXCEEDED"
    metrics = predictor.metrics()
    assert metrics['nv_inference_exec_count{model="resnet",version="1"}'] == 1
    assert metrics['nv_inference_request_success{model="resnet",version="1"}'] == ROWS


@pytest.fixture
def transformer(python: str, tmp_path: Path) -> Iterator[tuple[str, str]]:
    """Its HTTP and gRPC addresses; it reaches the predictor by gRPC only."""
    write_identity(tmp_path, "models")
    env = {"STORAGE_URI": str(tmp_path / "models"), "INFERENCE_SERVICE_NAME": "resnet"}
    http, rpc = free_port(), free_port()
    with ServerProcess(env=env) as server, open(tmp_path / "log", "w+") as log:
        flags = ["--model_name", "resnet", "--http_port", str(http), "--grpc_port", str(rpc), "--workers", "1"]
        flags += ["--predictor_host", server.target, "--predictor_protocol", "grpc-v2"]
        command = [python, str(HERE / "kserve_transformer.py"), *flags]
        process = subprocess.Popen(command, env=environment(), stdout=log, stderr=subprocess.STDOUT)
        try:
            eventually(lambda: process.poll() is not None or answers(rpc), "the transformer answers", timeout_s=80)
            assert process.poll() is None, (tmp_path / "log").read_text()
            yield f"http://127.0.0.1:{http}", f"127.0.0.1:{rpc}"
        finally:
            process.kill()
            process.wait()


def answers(port: int) -> bool:
    with InferenceClient(f"127.0.0.1:{port}", timeout_s=2) as client:
        try:
            return client.server_live()
        except ClientError:
            return False


def test_kserve_transformer_uses_the_server_as_predictor(transformer: tuple[str, str]) -> None:
    http, rpc = transformer
    with InferenceClient(rpc) as client:
        given = np.arange(16, dtype=np.float32).reshape(1, 16)
        assert (client.infer("resnet", {"INPUT0": given})["OUTPUT0"] == given * 2 + 1).all()

    body = {"inputs": [{"name": "INPUT0", "datatype": "FP32", "shape": [1, 16], "data": [1.5] * 16}]}
    request = urllib.request.Request(
        f"{http}/v2/models/resnet/infer", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=20) as response:
        answer = json.load(response)
    assert answer["outputs"][0]["data"] == [4.0] * 16


def test_kserve_transformer_keeps_serving_after_the_predictor_refused_a_request(transformer: tuple[str, str]) -> None:
    _, rpc = transformer
    with InferenceClient(rpc) as client:
        with pytest.raises(ClientError, match="INTERNAL"):  # the SDK's status, whatever the predictor answered
            client.infer("resnet", {"INPUT0": np.zeros((1, 3), np.float32)})
        assert (client.infer("resnet", {"INPUT0": np.zeros((1, 16), np.float32)})["OUTPUT0"] == 1).all()
