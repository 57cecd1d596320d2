"""The private pool and the classes that the generated modules build in it."""

from __future__ import annotations

import copy
import pickle

import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, text_format

from paceline.protos import inference_pb2, inference_pb2_grpc, model_config_pb2
from paceline.protos.pool import POOL, build_module

SERVICE = "inference.GRPCInferenceService"


def test_pool_knows_the_service_and_both_files() -> None:
    assert POOL.FindServiceByName(SERVICE) is inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    assert POOL.FindFileByName("inference.proto").pool is POOL
    assert POOL.FindFileByName("model_config.proto").pool is POOL


def test_pool_default_pool_stays_unchanged() -> None:
    default = descriptor_pool.Default()
    with pytest.raises(KeyError):
        default.FindFileByName("inference.proto")
    assert inference_pb2.ModelInferRequest.DESCRIPTOR.file.pool is not default


def test_service_has_the_twenty_calls() -> None:
    methods = POOL.FindServiceByName(SERVICE).methods
    assert len(methods) == 20
    streaming = [method.name for method in methods if method.client_streaming or method.server_streaming]
    assert streaming == ["ModelStreamInfer"]
    assert all(hasattr(inference_pb2_grpc.GRPCInferenceServiceServicer, method.name) for method in methods)


def test_metadata_properties_are_encoded_as_in_the_open_inference_protocol() -> None:
    response = inference_pb2.ModelMetadataResponse(properties={"a": "b"})
    assert response.SerializeToString() == b"\x32\x06\x0a\x01a\x12\x01b"


def test_message_nested_class_is_the_class_of_its_fields() -> None:
    request = inference_pb2.ModelInferRequest(inputs=[{"name": "x"}])
    assert type(request.inputs[0]) is inference_pb2.ModelInferRequest.InferInputTensor
    assert isinstance(inference_pb2.ModelConfigResponse().config, model_config_pb2.ModelConfig)


def test_message_class_names_its_module() -> None:
    nested = inference_pb2.ModelInferRequest.InferInputTensor
    assert (nested.__module__, nested.__qualname__) == (
        "paceline.protos.inference_pb2",
        "ModelInferRequest.InferInputTensor",
    )


def test_enum_values_are_reachable_as_in_any_generated_module() -> None:
    assert model_config_pb2.TYPE_BF16 == model_config_pb2.DataType.Value("TYPE_BF16") == 14
    assert model_config_pb2.ModelInstanceGroup.KIND_CPU == 2
    assert model_config_pb2.ModelInstanceGroup.Kind.Name(2) == "KIND_CPU"


def test_message_copy_and_pickle_come_back_equal() -> None:
    request = inference_pb2.ModelInferRequest(model_name="m", raw_input_contents=[b"\x00\x01"])
    assert pickle.loads(pickle.dumps(request)) == request
    assert copy.deepcopy(request) == request


def test_message_text_and_json_forms_come_back_equal() -> None:
    text = """
        name: "m" max_batch_size: 8
        input { name: "x" data_type: TYPE_FP32 dims: [ -1, 4 ] }
        dynamic_batching { preferred_batch_size: 4 priority_queue_policy { key: 1 value { max_queue_size: 2 } } }
        instance_group { kind: KIND_GPU gpus: 0 }
        parameters { key: "k" value { string_value: "v" } }
    """
    config = text_format.Parse(text, model_config_pb2.ModelConfig())
    assert config.WhichOneof("scheduling_choice") == "dynamic_batching"
    assert text_format.Parse(text_format.MessageToString(config), model_config_pb2.ModelConfig()) == config
    assert json_format.Parse(json_format.MessageToJson(config), model_config_pb2.ModelConfig()) == config


def test_build_module_file_with_extensions_is_refused() -> None:
    kinds = descriptor_pb2.FieldDescriptorProto
    field = descriptor_pb2.FieldDescriptorProto(name="extra", number=50_000, extendee=".google.protobuf.FieldOptions")
    field.type, field.label = kinds.TYPE_STRING, kinds.LABEL_OPTIONAL
    file = descriptor_pb2.FileDescriptorProto(name="extended.proto", extension=[field])
    file.dependency.append("google/protobuf/descriptor.proto")
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(descriptor_pb2.DESCRIPTOR.serialized_pb)
    descriptor = pool.AddSerializedFile(file.SerializeToString())
    with pytest.raises(NotImplementedError, match=r"extended\.proto defines extensions"):
        build_module(descriptor, "paceline.protos.extended_pb2", {})
