"""Server reflection, under both names, lets a client without any .proto file list, describe and call."""

from __future__ import annotations

import base64
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf import descriptor_pb2

from tests.conformance.reflected import PROTOCOLS, ReflectedClient, ReflectionStream
from tests.harness import REPO, ServerProcess, write_identity

INFERENCE = "inference.GRPCInferenceService"
HEALTH = "grpc.health.v1.Health"
ROW = [0.5 * value for value in range(16)]


@pytest.fixture
def channel(server: ServerProcess) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.target) as opened:
        yield opened


@pytest.fixture(params=PROTOCOLS, ids=["v1", "v1alpha"])
def protocol(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def stream(channel: grpc.Channel, protocol: str) -> Iterator[ReflectionStream]:
    with ReflectionStream(channel, protocol) as opened:
        yield opened


@pytest.fixture
def client(channel: grpc.Channel, protocol: str) -> ReflectedClient:
    return ReflectedClient(channel, protocol)


# ---- Listing and describing ------------------------------------------------------------------------------------------


def test_list_services_names_all_four(stream: ReflectionStream) -> None:
    assert sorted(stream.services()) == sorted([INFERENCE, HEALTH, *PROTOCOLS])


def test_every_listed_service_is_described(stream: ReflectionStream) -> None:
    for name in stream.services():
        package, _, service = name.rpartition(".")
        file = stream.files(file_containing_symbol=name)[0]
        assert file.package == package
        assert service in [one.name for one in file.service]


@pytest.mark.parametrize(
    ("symbol", "file"),
    [
        (INFERENCE, "inference.proto"),
        (f"{INFERENCE}.ModelInfer", "inference.proto"),
        ("inference.ModelInferRequest", "inference.proto"),
        ("inference.ModelInferRequest.InferInputTensor", "inference.proto"),
        ("inference.ModelInferRequest.model_name", "inference.proto"),
        ("inference.InferParameter.parameter_choice", "inference.proto"),
        ("inference.ModelConfig", "model_config.proto"),
        ("inference.DataType", "model_config.proto"),
        ("inference.TYPE_FP32", "model_config.proto"),
    ],
)
def test_file_containing_symbol_finds_each_kind_of_symbol(stream: ReflectionStream, symbol: str, file: str) -> None:
    assert stream.files(file_containing_symbol=symbol)[0].name == file


def test_file_by_filename_includes_its_dependencies(stream: ReflectionStream) -> None:
    files = stream.files(file_by_filename="inference.proto")
    assert [file.name for file in files] == ["inference.proto", "model_config.proto"]
    assert files[0].dependency == ["model_config.proto"]
    assert [file.name for file in stream.files(file_by_filename="model_config.proto")] == ["model_config.proto"]


def test_files_equal_those_that_protoc_reads(stream: ReflectionStream, tmp_path: Path) -> None:
    compiled = tmp_path / "set"
    protoc = [sys.executable, "-m", "grpc_tools.protoc", "-I", "protos", "--include_imports"]
    command = [*protoc, f"--descriptor_set_out={compiled}", "inference.proto"]
    subprocess.run(command, cwd=REPO, check=True, timeout=60)
    expected = descriptor_pb2.FileDescriptorSet.FromString(compiled.read_bytes()).file
    for file in expected:
        _forget_json_names(file.message_type)
    got = {file.name: file for file in stream.files(file_by_filename="inference.proto")}
    assert got == {file.name: file for file in expected}


def _forget_json_names(messages: object) -> None:
    """protoc writes out JSON names even where they follow from the fields' names."""
    for message in messages:  # type: ignore[attr-defined]
        for field in message.field:
            field.ClearField("json_name")
        _forget_json_names(message.nested_type)


@pytest.mark.parametrize(
    "request_",
    [
        {"file_containing_symbol": "inference.NoSuch"},
        {"file_containing_symbol": ""},
        {"file_containing_symbol": f"{INFERENCE}.NoSuch"},
        {"file_by_filename": "nosuch.proto"},
        {"all_extension_numbers_of_type": "inference.NoSuch"},
        {"file_containing_extension": {"containing_type": "inference.ModelConfig", "extension_number": 7}},
    ],
    ids=str,
)
def test_unknown_name_gets_an_error_and_the_stream_continues(
    stream: ReflectionStream, request_: dict[str, object]
) -> None:
    response = stream.ask(**request_)
    assert response.error_response.error_code == grpc.StatusCode.NOT_FOUND.value[0]
    assert response.original_request == type(response.original_request)(**request_)
    assert INFERENCE in stream.services()


def test_empty_request_gets_an_error_response(stream: ReflectionStream) -> None:
    assert stream.ask(host="h").error_response.error_code == grpc.StatusCode.INVALID_ARGUMENT.value[0]


def test_stream_half_closed_by_the_client_ends(stream: ReflectionStream) -> None:
    assert stream.services()
    stream.end_requests()
    assert list(stream) == []


# ---- Calling ---------------------------------------------------------------------------------------------------------


def simple_fp32(**more: object) -> dict[str, object]:
    inputs = [
        {"name": name, "datatype": "FP32", "shape": [1, 16], "contents": {"fp32_contents": ROW}}
        for name in ("INPUT0", "INPUT1")
    ]
    return {"model_name": "simple_fp32", "id": "7", "inputs": inputs, **more}


def test_infer_typed_json_gets_raw_outputs_by_default(client: ReflectedClient) -> None:
    answer = client.call(f"{INFERENCE}/ModelInfer", simple_fp32())
    assert (answer["modelName"], answer["modelVersion"], answer["id"]) == ("simple_fp32", "1", "7")
    raw = [struct.unpack("<16f", base64.b64decode(data)) for data in answer["rawOutputContents"]]
    assert raw == [tuple(2 * value for value in ROW), (0.0,) * 16]


def test_infer_without_binary_data_output_is_readable_json(client: ReflectedClient) -> None:
    request = simple_fp32(parameters={"binary_data_output": {"bool_param": False}}, outputs=[{"name": "OUTPUT0"}])
    answer = client.call(f"{INFERENCE}/ModelInfer", request)
    assert answer["rawOutputContents"] == []
    (output,) = answer["outputs"]
    assert (output["name"], output["datatype"], output["shape"]) == ("OUTPUT0", "FP32", ["1", "16"])
    assert output["contents"]["fp32Contents"] == [2 * value for value in ROW]


@pytest.mark.parametrize(
    ("datatype", "field", "values"),
    [
        ("BOOL", "bool_contents", [True, False]),
        ("INT8", "int_contents", [-128, 127]),
        ("INT16", "int_contents", [-32768, 32767]),
        ("INT32", "int_contents", [-(2**31), 2**31 - 1]),
        ("INT64", "int64_contents", [str(-(2**63)), str(2**63 - 1)]),
        ("UINT8", "uint_contents", [0, 255]),
        ("UINT16", "uint_contents", [0, 65535]),
        ("UINT32", "uint_contents", [0, 2**32 - 1]),
        ("UINT64", "uint64_contents", ["0", str(2**64 - 1)]),
        ("FP32", "fp32_contents", [1.5, "NaN"]),
        ("FP64", "fp64_contents", [0.1, "-Infinity"]),
        ("BYTES", "bytes_contents", [base64.b64encode("grün".encode()).decode(), ""]),
    ],
)
def test_infer_typed_json_of_each_datatype_comes_back_unchanged(
    client: ReflectedClient, datatype: str, field: str, values: list[object]
) -> None:
    tensor = {"name": "INPUT0", "datatype": datatype, "shape": [1, 2], "contents": {field: values}}
    request = {
        "model_name": f"identity_{datatype.lower()}",
        "inputs": [tensor],
        "parameters": {"binary_data_output": {"bool_param": False}},
    }
    (output,) = client.call(f"{INFERENCE}/ModelInfer", request)["outputs"]
    assert (output["datatype"], output["shape"]) == (datatype, ["1", "2"])
    camel = field.partition("_")[0] + "Contents"
    assert output["contents"][camel] == values


def test_model_metadata_in_json_has_free_dimensions(client: ReflectedClient) -> None:
    answer = client.call(f"{INFERENCE}/ModelMetadata", {"name": "simple_fp32"})
    assert answer["inputs"][0] == {"name": "INPUT0", "datatype": "FP32", "shape": ["-1", "16"]}


def test_infer_unknown_model_is_not_found_and_named(client: ReflectedClient) -> None:
    with pytest.raises(grpc.RpcError, match="'nosuch'") as raised:
        client.call(f"{INFERENCE}/ModelInfer", {"model_name": "nosuch"})
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND  # type: ignore[attr-defined]


def test_health_check_in_json_is_serving(client: ReflectedClient) -> None:
    assert client.call(f"{HEALTH}/Check", {"service": INFERENCE}) == {"status": "SERVING"}


# ---- The end ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("used", [True, False], ids=["used", "idle"])
def test_stream_open_at_sigterm_is_ended_without_delaying_the_shutdown(
    tmp_path: Path, protocol: str, used: bool
) -> None:
    """The grace period is longer than the test would wait."""
    write_identity(tmp_path)
    with (
        ServerProcess(tmp_path, args=["--exit-timeout-secs", "600"]) as server,
        grpc.insecure_channel(server.target) as channel,
        ReflectionStream(channel, protocol, timeout_s=60) as stream,
    ):
        # An answer on the same connection shows that the server has seen the stream, which was opened before.
        assert stream.services() if used else ReflectedClient(channel, protocol).call(f"{HEALTH}/Check", {})
        server.signal(signal.SIGTERM)
        assert list(stream) == []
        assert server.wait(30) == 0
