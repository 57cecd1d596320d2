"""Independent references for the protos: tritonclient in the same process, and plain protoc in a clean folder.

tritonclient describes a file of the same package, with the same messages and the same service, and adds it to
protobuf's default pool. Half of the test is importing it beside our modules, the other half agreeing with it byte by
byte.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import ml_dtypes
import numpy as np
import pytest
import tritonclient.grpc as triton  # type: ignore[import-untyped]
from google.protobuf import descriptor_pb2, text_format
from google.protobuf.descriptor import FieldDescriptor, FileDescriptor
from google.protobuf.message import Message
from tritonclient.grpc import model_config_pb2 as triton_config
from tritonclient.grpc import service_pb2 as triton_service
from tritonclient.grpc import service_pb2_grpc as triton_grpc

from paceline.protos import inference_pb2, inference_pb2_grpc, model_config_pb2
from paceline.protos.datatypes import DATATYPES
from paceline.protos.pool import POOL
from paceline.protos.tensors import decode_raw, encode_raw, float32_from_bf16

ROOT = Path(__file__).resolve().parents[2]
PAIRS = [(inference_pb2.DESCRIPTOR, triton_service.DESCRIPTOR), (model_config_pb2.DESCRIPTOR, triton_config.DESCRIPTOR)]

Facts = dict[str, tuple[Any, ...]]


# ---- The descriptors, field by field ---------------------------------------------------------------------------------


def message_facts(message: descriptor_pb2.DescriptorProto, prefix: str) -> Facts:
    name = f"{prefix}.{message.name}"
    facts: Facts = {name: ("message", message.options.map_entry)}
    for field in message.field:
        oneof = message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else None
        kind = descriptor_pb2.FieldDescriptorProto.Type.Name(field.type)
        label = descriptor_pb2.FieldDescriptorProto.Label.Name(field.label)
        facts[f"{name}.{field.name}"] = (field.number, kind, field.type_name, label, oneof, field.proto3_optional)
    for nested in message.nested_type:
        facts |= message_facts(nested, name)
    for enum in message.enum_type:
        facts |= enum_facts(enum, name)
    return facts


def enum_facts(enum: descriptor_pb2.EnumDescriptorProto, prefix: str) -> Facts:
    return {f"{prefix}.{enum.name}.{value.name}": (value.number,) for value in enum.value}


def service_facts(service: descriptor_pb2.ServiceDescriptorProto, prefix: str) -> Facts:
    return {
        f"{prefix}.{service.name}/{method.name}": (
            method.input_type,
            method.output_type,
            method.client_streaming,
            method.server_streaming,
        )
        for method in service.method
    }


def file_facts(descriptor: FileDescriptor) -> Facts:
    file = descriptor_pb2.FileDescriptorProto.FromString(descriptor.serialized_pb)
    facts: Facts = {}
    for message in file.message_type:
        facts |= message_facts(message, file.package)
    for enum in file.enum_type:
        facts |= enum_facts(enum, file.package)
    for service in file.service:
        facts |= service_facts(service, file.package)
    return facts


@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_descriptors_contain_all_of_tritonclients_unchanged(ours: FileDescriptor, theirs: FileDescriptor) -> None:
    present, expected = file_facts(ours), file_facts(theirs)
    assert len(expected) > 100
    for name in sorted(present.keys() - expected.keys()):
        print(f"only in ours: {name} {present[name]}")
    wrong = {name: (facts, present.get(name)) for name, facts in expected.items() if present.get(name) != facts}
    assert not wrong, "\n".join(f"{name}: expected {facts}, got {got}" for name, (facts, got) in wrong.items())


def test_descriptors_add_the_open_inference_properties() -> None:
    added = file_facts(inference_pb2.DESCRIPTOR).keys() - file_facts(triton_service.DESCRIPTOR).keys()
    assert "inference.ModelMetadataResponse.properties" in added


# ---- Every message, filled, both ways --------------------------------------------------------------------------------

SCALARS: dict[int, Any] = {
    FieldDescriptor.CPPTYPE_INT32: -(2**31),
    FieldDescriptor.CPPTYPE_INT64: -(2**63),
    FieldDescriptor.CPPTYPE_UINT32: 2**32 - 1,
    FieldDescriptor.CPPTYPE_UINT64: 2**64 - 1,
    FieldDescriptor.CPPTYPE_DOUBLE: 0.1,
    FieldDescriptor.CPPTYPE_FLOAT: 0.5,
    FieldDescriptor.CPPTYPE_BOOL: True,
}


def fill(message: Message, choice: int) -> Message:
    """Fills every field of `message`, down to the leaves; `choice` selects the member of each oneof."""
    for field in message.DESCRIPTOR.fields:
        oneof = field.containing_oneof
        if oneof is None or oneof.fields[choice % len(oneof.fields)] is field:
            fill_field(message, field, choice)
    return message


def fill_field(message: Message, field: Any, choice: int) -> None:
    value = getattr(message, field.name)
    entry = field.message_type if field.message_type and field.message_type.GetOptions().map_entry else None
    if entry is not None:
        key = scalar(entry.fields_by_name["key"])
        if entry.fields_by_name["value"].message_type:
            fill(value[key], choice)
        else:
            value[key] = scalar(entry.fields_by_name["value"])
    elif field.message_type and hasattr(value, "add"):
        fill(value.add(), choice)
        value.add()
    elif field.message_type:
        fill(value, choice)
        value.SetInParent()
    elif hasattr(value, "extend"):
        value.extend([scalar(field)] * 2)
    else:
        setattr(message, field.name, scalar(field))


def scalar(field: FieldDescriptor) -> Any:
    if field.enum_type:
        return field.enum_type.values[-1].number
    if field.type == FieldDescriptor.TYPE_BYTES:
        return b"\x00\xff" + field.name.encode()
    return SCALARS.get(field.cpp_type, f"ä {field.name}")


MESSAGE_PAIRS = [
    pytest.param(getattr(ours, name), getattr(theirs, name), id=name)
    for ours, theirs in [(inference_pb2, triton_service), (model_config_pb2, triton_config)]
    for name in theirs.DESCRIPTOR.message_types_by_name
]


@pytest.mark.parametrize("choice", range(5))
@pytest.mark.parametrize(("ours", "theirs"), MESSAGE_PAIRS)
def test_messages_filled_by_tritonclient_mean_the_same_both_ways(
    ours: type[Message], theirs: type[Message], choice: int
) -> None:
    sent = fill(theirs(), choice)
    received = ours.FromString(sent.SerializeToString())
    assert text_format.MessageToString(received) == text_format.MessageToString(sent)
    assert theirs.FromString(received.SerializeToString()) == sent


# ---- Over a channel: their client and our service, our stub and their service ----------------------------------------


def arrays() -> dict[str, np.ndarray[Any, np.dtype[Any]]]:
    numbers = [name for name in DATATYPES if name not in ("BF16", "BYTES")]
    made = {name: np.arange(6).reshape(2, 3).astype(DATATYPES[name].dtype) for name in numbers}
    made["BYTES"] = np.array([[b"", b"a\x00\x00", "ä".encode()], [b"x" * 300, b"\xff", b"0"]], object)
    made["BF16"] = np.array([[0, 1, -2], [0.5, 256, -0.0]], ml_dtypes.bfloat16)
    return made


@contextmanager
def serving(add: Callable[[grpc.Server], None]) -> Iterator[str]:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    add(server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


class OurEcho(inference_pb2_grpc.GRPCInferenceServiceServicer):
    """Decodes each input and answers with it, encoded again."""

    def __init__(self) -> None:
        self.requests: list[inference_pb2.ModelInferRequest] = []

    def add_to(self, server: grpc.Server) -> None:
        inference_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, server)  # type: ignore[no-untyped-call]

    def ModelInfer(
        self, request: inference_pb2.ModelInferRequest, context: grpc.ServicerContext
    ) -> inference_pb2.ModelInferResponse:
        self.requests.append(request)
        response = inference_pb2.ModelInferResponse(model_name=request.model_name, id=request.id)
        for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
            datatype = DATATYPES[tensor.datatype]
            response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
            response.raw_output_contents.append(encode_raw(decode_raw(raw, datatype, tensor.shape), datatype))
        return response


class TheirEcho(triton_grpc.GRPCInferenceServiceServicer):  # type: ignore[misc]
    """Answers with tritonclient's messages: the inputs it received, and some statistics and a configuration."""

    def ModelInfer(self, request: Any, context: grpc.ServicerContext) -> Any:
        response = triton_service.ModelInferResponse(model_name=request.model_name, id=request.id)
        for tensor in request.inputs:
            response.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        response.raw_output_contents.extend(request.raw_input_contents)
        return response

    def ModelConfig(self, request: Any, context: grpc.ServicerContext) -> Any:
        config = triton_config.ModelConfig(name=request.name, max_batch_size=8)
        config.dynamic_batching.max_queue_delay_microseconds = 500
        return triton_service.ModelConfigResponse(config=config)

    def ModelStatistics(self, request: Any, context: grpc.ServicerContext) -> Any:
        response = triton_service.ModelStatisticsResponse()
        statistics = response.model_stats.add(name=request.name, inference_count=7, execution_count=2)
        statistics.inference_stats.queue.ns = 2**63
        return response


def our_stub(channel: grpc.Channel) -> Any:
    return inference_pb2_grpc.GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]


def add_their_echo(server: grpc.Server) -> None:
    triton_grpc.add_GRPCInferenceServiceServicer_to_server(TheirEcho(), server)


def test_tritonclient_infers_on_our_service_and_reads_every_datatype_back() -> None:
    echo = OurEcho()
    sent = arrays()
    inputs = [triton.InferInput(name, array.shape, name) for name, array in sent.items()]
    for tensor, array in zip(inputs, sent.values(), strict=True):
        tensor.set_data_from_numpy(array)
    with serving(echo.add_to) as address:
        client = triton.InferenceServerClient(address)
        result = client.infer("echo", inputs, request_id="7", priority=3, timeout=1000, parameters={"text": "ä"})
        client.close()
    for name, array in sent.items():
        np.testing.assert_array_equal(result.as_numpy(name), array)
    request = echo.requests[0]
    assert (request.model_name, request.id) == ("echo", "7")
    assert request.parameters["priority"].uint64_param == 3
    assert request.parameters["timeout"].int64_param == 1000
    assert request.parameters["text"].string_param == "ä"


def test_tritonclients_raw_bytes_equal_ours_for_every_datatype() -> None:
    for name, array in arrays().items():
        tensor = triton.InferInput(name, array.shape, name)
        tensor.set_data_from_numpy(array)
        assert tensor._get_content() == encode_raw(array, DATATYPES[name]), name


def test_our_stub_infers_on_tritonclients_service_and_reads_every_datatype_back() -> None:
    sent = arrays()
    request = inference_pb2.ModelInferRequest(model_name="echo", id="7")
    for name, array in sent.items():
        request.inputs.add(name=name, datatype=name, shape=array.shape)
        request.raw_input_contents.append(encode_raw(array, DATATYPES[name]))
    with serving(add_their_echo) as address, grpc.insecure_channel(address) as channel:
        response = our_stub(channel).ModelInfer(request, timeout=30)
    result = triton.InferResult(triton_service.ModelInferResponse.FromString(response.SerializeToString()))
    for tensor, raw in zip(response.outputs, response.raw_output_contents, strict=True):
        decoded = decode_raw(raw, DATATYPES[tensor.datatype], tensor.shape)
        decoded = float32_from_bf16(decoded) if tensor.datatype == "BF16" else decoded
        np.testing.assert_array_equal(decoded, sent[tensor.name])
        np.testing.assert_array_equal(decoded, result.as_numpy(tensor.name))


def test_our_stub_reads_tritonclients_configuration_and_statistics() -> None:
    with serving(add_their_echo) as address, grpc.insecure_channel(address) as channel:
        stub = our_stub(channel)
        config = stub.ModelConfig(inference_pb2.ModelConfigRequest(name="m"), timeout=30).config
        statistics = stub.ModelStatistics(inference_pb2.ModelStatisticsRequest(name="m"), timeout=30)
    assert type(config) is model_config_pb2.ModelConfig
    assert (config.name, config.dynamic_batching.max_queue_delay_microseconds) == ("m", 500)
    assert statistics.model_stats[0].inference_stats.queue.ns == 2**63


# ---- Other processes -------------------------------------------------------------------------------------------------


def run_python(program: str, cwd: Path, **environment: str) -> None:
    variables = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, "-c", program]
    result = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=110, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("implementation", ["upb", "python"])
def test_stubs_made_by_plain_protoc_import_beside_ours(tmp_path: Path, implementation: str) -> None:
    sources = tmp_path / "sources"
    output = tmp_path / "output"
    sources.mkdir()
    output.mkdir()
    for name in ("inference.proto", "model_config.proto"):
        (sources / name).write_bytes((ROOT / "protos" / name).read_bytes())
    outputs = [f"--python_out={output}", f"--grpc_python_out={output}"]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{sources}", *outputs]
    for name in ("inference.proto", "model_config.proto"):
        subprocess.run([*command, name], check=True, cwd=tmp_path, timeout=60)
    program = (
        "import inference_pb2 as plain, inference_pb2_grpc\n"
        "from paceline.protos import inference_pb2 as ours\n"
        "from paceline.protos.pool import POOL\n"
        "assert plain.DESCRIPTOR.pool is not POOL and ours.DESCRIPTOR.pool is POOL\n"
        "assert plain.DESCRIPTOR.serialized_pb == ours.DESCRIPTOR.serialized_pb\n"
        "request = plain.ModelInferRequest(model_name='m', raw_input_contents=[b'x'])\n"
        "assert str(ours.ModelInferRequest.FromString(request.SerializeToString())) == str(request)\n"
    )
    run_python(program, output, PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=implementation)


OURS = "from paceline.protos import inference_pb2 as ours, inference_pb2_grpc, model_config_pb2\n"
OUR_CODEC = "from paceline.protos import datatypes, tensors\n"
THEIRS = "import tritonclient.grpc, tritonclient.grpc.service_pb2 as theirs\n"
EXCHANGE = """
sent = theirs.ModelConfigResponse()
sent.config.instance_group.add(kind=1, gpus=[0])
sent.config.parameters["k"].string_value = "v"
received = ours.ModelConfigResponse.FromString(sent.SerializeToString())
assert received.config.parameters["k"].string_value == "v", received
assert theirs.ModelConfigResponse.FromString(received.SerializeToString()) == sent
assert type(received.config) is model_config_pb2.ModelConfig
datatype = datatypes.by_name("INT8")
contents = ours.InferTensorContents(int_contents=[1, -2])
shape = ours.ModelInferRequest.InferInputTensor(shape=[2]).shape
array = tensors.decode_contents(contents, datatype, shape)
assert array.tolist() == [1, -2]
assert tensors.encode_contents(array, datatype) == contents
assert tensors.decode_raw(b"\\x01\\x02", datatype, shape).sum() == 3
"""


@pytest.mark.parametrize("implementation", ["upb", "python"])
@pytest.mark.parametrize(
    "imports", [OURS + OUR_CODEC + THEIRS, THEIRS + OURS + OUR_CODEC], ids=["ours first", "theirs first"]
)
def test_import_works_in_each_order_and_protobuf_implementation(
    tmp_path: Path, imports: str, implementation: str
) -> None:
    running = "from google.protobuf.internal import api_implementation\nassert api_implementation.Type() == "
    program = imports + running + repr(implementation) + EXCHANGE
    run_python(program, tmp_path, PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION=implementation)


def test_our_service_descriptor_and_tritonclients_are_different_objects_of_the_same_name() -> None:
    ours = POOL.FindServiceByName("inference.GRPCInferenceService")
    theirs = triton_service.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    assert ours is not theirs
    assert ours.full_name == theirs.full_name
