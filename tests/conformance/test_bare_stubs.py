"""Stubs that plain protoc generates from our .proto files, used by a program that knows nothing else of the project.

The program is `bare_client.py`; it runs in its own process, among freshly generated files in a clean folder.
"""

from __future__ import annotations

import base64
import json
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness import REPO, ServerProcess

SUM, DIFFERENCE = [2 * value for value in range(16)], [0] * 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean folder with generated stubs and the program."""
    made = tmp_path_factory.mktemp("bare")
    protoc = [sys.executable, "-m", "grpc_tools.protoc", "-I", "protos", f"--python_out={made}"]
    files = ["inference.proto", "model_config.proto"]
    subprocess.run([*protoc, f"--grpc_python_out={made}", *files], cwd=REPO, check=True, timeout=60)
    shutil.copy(Path(__file__).with_name("bare_client.py"), made)
    return made


@pytest.fixture(scope="module")
def printed(folder: Path, server: ServerProcess) -> dict[str, Any]:
    """What the program printed."""
    command = [sys.executable, "bare_client.py", server.target]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    answers: dict[str, Any] = json.loads(done.stdout)
    return answers


def raw_outputs(response: dict[str, Any]) -> list[bytes]:
    return [base64.b64decode(data) for data in response["rawOutputContents"]]


def test_program_uses_only_the_freshly_generated_stubs(printed: dict[str, Any], folder: Path) -> None:
    assert printed["modules"] == {"inference_pb2": str(folder), "model_config_pb2": str(folder)}


@pytest.mark.parametrize(("rpc", "answer"), [("live", {"live": True}), ("ready", {"ready": True})])
def test_health_rpcs_report_a_started_server_live_and_ready(
    printed: dict[str, Any], rpc: str, answer: dict[str, bool]
) -> None:
    assert printed[rpc] == answer
    assert printed["model ready"] == {"ready": True}


def test_server_metadata_has_name_version_extensions(printed: dict[str, Any]) -> None:
    assert printed["server metadata"].keys() == {"name", "version", "extensions"}


def test_model_metadata_describes_every_tensor(printed: dict[str, Any]) -> None:
    def described(*names: str) -> list[dict[str, Any]]:
        return [{"name": name, "datatype": "INT32", "shape": ["-1", "16"]} for name in names]

    assert printed["model metadata"] == {
        "name": "simple",
        "versions": ["1"],
        "platform": "onnxruntime_onnx",
        "inputs": described("INPUT0", "INPUT1"),
        "outputs": described("OUTPUT0", "OUTPUT1"),
    }


@pytest.mark.parametrize("how", ["typed", "raw"])
def test_infer_typed_or_raw_inputs_gets_raw_outputs(printed: dict[str, Any], how: str) -> None:
    response = printed[how]
    assert (response["modelName"], response["modelVersion"], response["id"]) == ("simple", "1", "7")
    assert response["outputs"] == [
        {"name": name, "datatype": "INT32", "shape": ["1", "16"]} for name in ("OUTPUT0", "OUTPUT1")
    ]
    assert raw_outputs(response) == [struct.pack("<16i", *values) for values in (SUM, DIFFERENCE)]


def test_infer_without_binary_data_output_gets_typed_outputs(printed: dict[str, Any]) -> None:
    response = printed["typed output"]
    assert "rawOutputContents" not in response
    assert [output["contents"] for output in response["outputs"]] == [
        {"intContents": values} for values in (SUM, DIFFERENCE)
    ]


def test_infer_typed_text_comes_back_length_prefixed(printed: dict[str, Any]) -> None:
    assert raw_outputs(printed["text"]) == [b"\x05\0\0\0gr\xc3\xbcn\0\0\0\0"]


def test_infer_scalar_without_dimensions_is_one_element(printed: dict[str, Any]) -> None:
    assert raw_outputs(printed["scalar"]) == [struct.pack("<f", 2.5)]
    assert "shape" not in printed["scalar"]["outputs"][0]


@pytest.mark.parametrize(
    ("fault", "phrases"),
    [
        ("raw too short", ["'simple'", "'INPUT1'", "expected 64 bytes", "got 63"]),
        ("raw missing", ["'simple'", "raw_input_contents", "expected 2", "got 1"]),
        ("raw too many", ["'simple'", "raw_input_contents", "expected 2", "got 3"]),
        ("raw and typed", ["'simple'", "'INPUT1'", "contents", "raw_input_contents"]),
        ("typed too few", ["'simple'", "'INPUT0'", "16", "15"]),
        ("typed of another kind", ["'simple'", "'INPUT0'", "int_contents", "fp32_contents"]),
        ("typed twice", ["'simple'", "'INPUT0'", "int_contents", "int64_contents"]),
        ("no data", ["'simple'", "'INPUT0'", "raw_input_contents"]),
        ("unknown datatype", ["'simple'", "'INPUT0'", "INT32", "'INT33'"]),
        ("parameter of another kind", ["'simple'", "'timeout'", "int64_param", "string_param"]),
        ("typed output of fp16", ["'identity_fp16'", "'OUTPUT0'", "FP16", "binary_data_output"]),
        ("typed output of bf16", ["'identity_bf16'", "'OUTPUT0'", "BF16", "binary_data_output"]),
    ],
)
def test_infer_faulty_request_is_invalid_argument_with_the_reason(
    printed: dict[str, Any], fault: str, phrases: list[str]
) -> None:
    status, text = printed[fault]
    assert status == "INVALID_ARGUMENT"
    missing = [phrase for phrase in phrases if phrase not in text]
    assert not missing, f"{missing} not in {text!r}"
