"""`buf curl`, a third-party client written in Go, which has no .proto file of ours: it learns everything by reflection.

It is looked for in PACELINE_BUF, then where `make witness` puts it, then on the PATH. It connects to nothing beyond
loopback.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import struct
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.reflected import PROTOCOLS
from tests.harness import REPO, ServerProcess

INFERENCE = "inference.GRPCInferenceService"
HEALTH = "grpc.health.v1.Health"
ROW = list(range(16))

Buf = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def program() -> str:
    """The path of buf."""
    if named := os.environ.get("PACELINE_BUF"):
        assert shutil.which(named), f"PACELINE_BUF names no program: {named}"
        return named
    witness = REPO / ".witness" / "node_modules" / ".bin" / "buf"
    found = shutil.which(witness) or shutil.which("buf")
    if found is None:
        pytest.skip("there is no buf: `make witness` installs it, and PACELINE_BUF may name one")
    return found


@pytest.fixture
def buf(program: str, server: ServerProcess, tmp_path: Path) -> Buf:
    """Runs `buf curl` against the server: `buf(path, request, *flags)`."""
    environment = {**os.environ, "BUF_CACHE_DIR": str(tmp_path / "cache"), "BUF_CONFIG_DIR": str(tmp_path / "config")}

    def run(path: str, request: dict[str, Any] | None = None, *flags: str) -> subprocess.CompletedProcess[str]:
        command = [program, "curl", "--protocol", "grpc", "--http2-prior-knowledge", "--log-format", "text", *flags]
        command += [] if request is None else ["--data", json.dumps(request)]
        url = f"http://{server.target}{path}"
        return subprocess.run(
            [*command, url], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
        )

    return run


def answer(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stderr
    message: dict[str, Any] = json.loads(done.stdout)
    return message


def simple(**more: Any) -> dict[str, Any]:
    inputs = [
        {"name": name, "datatype": "INT32", "shape": [1, 16], "contents": {"int_contents": ROW}}
        for name in ("INPUT0", "INPUT1")
    ]
    return {"model_name": "simple", "id": "7", "inputs": inputs, **more}


@pytest.mark.parametrize("reflect", ["grpc-v1", "grpc-v1alpha"])
def test_list_services_names_all_by_either_reflection_version(buf: Buf, reflect: str) -> None:
    done = buf("", None, "--list-services", "--reflect-protocol", reflect)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == sorted([INFERENCE, HEALTH, *PROTOCOLS])


def test_list_methods_names_the_methods_of_both_services(buf: Buf) -> None:
    done = buf("", None, "--list-methods")
    assert done.returncode == 0, done.stderr
    listed = done.stdout.split()
    rpcs = ("ServerLive", "ServerReady", "ModelReady", "ServerMetadata", "ModelMetadata", "ModelInfer")
    assert {f"{INFERENCE}/{rpc}" for rpc in rpcs} | {f"{HEALTH}/Check", f"{HEALTH}/Watch"} <= set(listed)


@pytest.mark.parametrize("reflect", ["grpc-v1", "grpc-v1alpha"])
def test_infer_typed_json_gets_raw_outputs_by_either_reflection_version(buf: Buf, reflect: str) -> None:
    response = answer(buf(f"/{INFERENCE}/ModelInfer", simple(), "--reflect-protocol", reflect))
    assert (response["modelName"], response["id"]) == ("simple", "7")
    raw = [list(struct.unpack("<16i", base64.b64decode(data))) for data in response["rawOutputContents"]]
    assert raw == [[2 * value for value in ROW], [0] * 16]


def test_infer_without_binary_data_output_shows_numbers(buf: Buf) -> None:
    request = simple(parameters={"binary_data_output": {"bool_param": False}}, outputs=[{"name": "OUTPUT0"}])
    (output,) = answer(buf(f"/{INFERENCE}/ModelInfer", request))["outputs"]
    assert output == {
        "name": "OUTPUT0",
        "datatype": "INT32",
        "shape": ["1", "16"],
        "contents": {"intContents": [2 * value for value in ROW]},
    }


def test_server_ready_without_data_is_true(buf: Buf) -> None:
    assert answer(buf(f"/{INFERENCE}/ServerReady")) == {"ready": True}


def test_model_metadata_shows_the_tensors(buf: Buf) -> None:
    response = answer(buf(f"/{INFERENCE}/ModelMetadata", {"name": "simple"}))
    assert response["inputs"][0] == {"name": "INPUT0", "datatype": "INT32", "shape": ["-1", "16"]}


def test_health_check_shows_serving(buf: Buf) -> None:
    assert answer(buf(f"/{HEALTH}/Check", {"service": INFERENCE})) == {"status": "SERVING"}


@pytest.mark.parametrize(
    ("request_", "code", "number", "phrase"),
    [
        ({"model_name": "nosuch"}, "not_found", 5, "'nosuch'"),
        (simple(model_version="99"), "not_found", 5, "99"),
        ({"model_name": "simple"}, "invalid_argument", 3, "'INPUT0'"),
    ],
    ids=["unknown model", "unknown version", "no inputs"],
)
def test_infer_faulty_request_shows_status_and_reason(
    buf: Buf, request_: dict[str, Any], code: str, number: int, phrase: str
) -> None:
    done = buf(f"/{INFERENCE}/ModelInfer", request_)
    assert (done.stdout, done.returncode) == ("", number << 3)  # its exit status is the code, shifted by three bits
    error = json.loads(done.stderr)
    assert error["code"] == code
    assert phrase in error["message"]
