"""Requests built and answers read, without a server."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from paceline.clients import ResponseError
from paceline.clients.messages import infer_request, infer_result
from paceline.protos import inference_pb2 as pb


def answer(datatype: str, shape: list[int], raw: bytes | None = None, **contents: Any) -> pb.ModelInferResponse:
    response = pb.ModelInferResponse(model_name="m")
    output = response.outputs.add(name="y", datatype=datatype, shape=shape)
    if raw is not None:
        response.raw_output_contents.append(raw)
    else:
        output.contents.MergeFrom(pb.InferTensorContents(**contents))
    return response


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.arange(12, dtype=np.float32).reshape(3, 4)[::2, ::-1],
        np.asfortranarray(np.arange(6, dtype=np.int16).reshape(2, 3)),
    ],
    ids=["big-endian", "strided", "fortran"],
)
def test_infer_request_any_memory_layout_is_sent_in_order(array: np.ndarray[Any, Any]) -> None:
    request = infer_request("m", {"x": array})
    assert request.raw_input_contents[0] == np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
    assert list(request.inputs[0].shape) == list(array.shape)


def test_infer_request_of_more_than_a_message_holds_is_refused_before_memory_is_allocated() -> None:
    large = np.broadcast_to(np.zeros((1, 1)), (2, 2**28))
    with pytest.raises(ValueError, match=r"input 'x': expected at most 2146435064 bytes, .* got 4294967296"):
        infer_request("m", {"one": np.zeros(1), "x": large})


@pytest.mark.parametrize(
    ("value", "datatype", "shape"),
    [
        ([[1, 2]], "INT64", [1, 2]),
        ([1.5], "FP64", [1]),
        (True, "BOOL", []),
        (["a", b"b"], "BYTES", [2]),
        ("text", "BYTES", []),
        (np.array(["ab", "c"]), "BYTES", [2]),
        (np.float16(1), "FP16", []),
        ([], "FP64", [0]),
    ],
)
def test_infer_request_python_values_become_tensors(value: Any, datatype: str, shape: list[int]) -> None:
    tensor = infer_request("m", {"x": value}).inputs[0]
    assert (tensor.datatype, list(tensor.shape)) == (datatype, shape)


@pytest.mark.parametrize(
    ("datatype", "array"),
    [
        ("FP32", np.array([[1.0, np.nan]], np.float32)),
        ("BOOL", np.array([True, False])),
        ("UINT64", np.array([2**64 - 1], np.uint64)),
        ("BYTES", np.array([b"a\0", "\u00e9".encode(), b""], object)),
    ],
)
def test_infer_request_tensor_is_what_tritonclient_sends(datatype: str, array: np.ndarray[Any, Any]) -> None:
    witness = triton.InferInput("x", list(array.shape), datatype)
    witness.set_data_from_numpy(array)
    request = infer_request("m", {"x": array})
    assert request.raw_input_contents[0] == witness._get_content()
    assert request.inputs[0].SerializeToString() == witness._get_tensor().SerializeToString()


@pytest.mark.parametrize(
    ("inputs", "options", "error", "text"),
    [
        ({"x": np.array([1j])}, {}, TypeError, "input 'x': no v2 datatype"),
        ({"x": [[1], [2, 3]]}, {}, ValueError, "input 'x'"),
        ({"x": [None]}, {}, ValueError, "input 'x'.*NoneType"),
        ({"x": [1.5]}, {"datatypes": {"x": "INT32"}}, ValueError, "input 'x': INT32 takes whole numbers"),
        ({"x": [300]}, {"datatypes": {"x": "UINT8"}}, ValueError, "input 'x': UINT8 takes 0 to 255, got 300"),
        ({"x": ["a"]}, {"datatypes": {"x": "FP32"}}, TypeError, "input 'x': FP32 takes numbers"),
        ({"x": [1]}, {"datatypes": {"x": "FLOAT"}}, ValueError, "input 'x': .*'FLOAT'"),
        ({"x": [1]}, {"datatypes": {"x": ["FP32"]}}, ValueError, "input 'x': .*BYTES, got \\['FP32'\\]"),
        ({"x": [1]}, {"datatypes": {"z": "FP32"}}, ValueError, "datatypes names 'z'"),
        ({"x": [1]}, {"outputs": "yes"}, TypeError, "outputs: expected a sequence of names, got 'yes'"),
        ({"x": [1]}, {"parameters": {"p": [1]}}, TypeError, "parameter 'p': expected .* got list"),
        ({"x": [1]}, {"parameters": {"p": 2**64}}, ValueError, "parameter 'p': .*64 bits"),
        ({"x": [1]}, {"parameters": {"p": -(2**63) - 1}}, ValueError, "parameter 'p': .*64 bits"),
    ],
)
def test_infer_request_misuse_raises_naming_the_culprit(
    inputs: dict[str, Any], options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        infer_request("m", inputs, **options)


def test_infer_request_without_a_model_raises() -> None:
    with pytest.raises(ValueError, match="model is empty"):
        infer_request("", {"x": [1]})


@pytest.mark.parametrize(
    ("value", "field", "sent"),
    [
        (True, "bool_param", True),
        (np.bool_(False), "bool_param", False),
        (-(2**63), "int64_param", -(2**63)),
        (2**63 - 1, "int64_param", 2**63 - 1),
        (2**63, "uint64_param", 2**63),
        (np.int8(-1), "int64_param", -1),
        (0.5, "double_param", 0.5),
        (np.float32(0.5), "double_param", 0.5),
        ("", "string_param", ""),
    ],
)
def test_infer_request_parameter_goes_in_its_field(value: Any, field: str, sent: Any) -> None:
    parameter = infer_request("m", {}, parameters={"p": value}).parameters["p"]
    assert parameter.WhichOneof("parameter_choice") == field
    assert getattr(parameter, field) == sent


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (answer("INT32", [2], int_contents=[1, -2]), np.array([1, -2], np.int32)),
        (answer("UINT8", [2], uint_contents=[0, 255]), np.array([0, 255], np.uint8)),
        (answer("BOOL", [1, 1], bool_contents=[True]), np.array([[True]])),
        (answer("INT64", [], int64_contents=[7]), np.array(7)),
        (answer("UINT64", [1], uint64_contents=[2**64 - 1]), np.array([2**64 - 1], np.uint64)),
        (answer("FP32", [1], fp32_contents=[1.5]), np.array([1.5], np.float32)),
        (answer("FP64", [1], fp64_contents=[1.5]), np.array([1.5])),
        (answer("FP32", [0, 3]), np.zeros((0, 3), np.float32)),
        (answer("FP16", [1], raw=b"\x00\x3c"), np.array([1], np.float16)),
        (answer("BF16", [1], raw=b"\x80\x3f"), np.array([1], np.float32)),
        (answer("FP32", [0], raw=b""), np.zeros(0, np.float32)),
    ],
)
def test_infer_result_raw_or_typed_output_is_read(
    response: pb.ModelInferResponse, expected: np.ndarray[Any, Any]
) -> None:
    array = infer_result(response)["y"]
    assert array.dtype == expected.dtype
    np.testing.assert_array_equal(array, expected)


def test_infer_result_bytes_are_objects_with_their_nuls() -> None:
    for response in (
        answer("BYTES", [1, 2], bytes_contents=[b"a\0", b""]),
        answer("BYTES", [1, 2], raw=b"\2\0\0\0a\0\0\0\0\0"),
    ):
        assert infer_result(response)["y"].tolist() == [[b"a\0", b""]]


@pytest.mark.parametrize(
    ("response", "text"),
    [
        (answer("FP32", [2], raw=b"\0\0\0\0"), "output 'y': expected 8 bytes"),
        (answer("FP32", [2], fp32_contents=[1.0]), "output 'y'"),
        (answer("FP16", [1], fp32_contents=[1.0]), "output 'y'"),
        (answer("FP32", [-1], raw=b""), "output 'y'"),
        (answer("FLOAT", [1], raw=b"\0"), "output 'y': .*'FLOAT'"),
        (answer("BYTES", [1], raw=b"\5\0\0\0a"), "output 'y'"),
    ],
)
def test_infer_result_contradiction_raises_naming_model_and_output(response: pb.ModelInferResponse, text: str) -> None:
    with pytest.raises(ResponseError, match=f"model 'm', {text}"):
        infer_result(response)


def test_infer_result_data_for_some_outputs_only_raises() -> None:
    response = answer("FP32", [1], raw=b"\0\0\0\0")
    response.outputs.add(name="z", datatype="FP32", shape=[1])
    with pytest.raises(ResponseError, match="2 outputs and data for 1"):
        infer_result(response)


def test_infer_result_same_output_twice_raises() -> None:
    response = answer("FP32", [1], fp32_contents=[1.0])
    response.outputs.append(response.outputs[0])
    with pytest.raises(ResponseError, match="twice with output 'y'"):
        infer_result(response)


def test_infer_result_parameters_become_python_values() -> None:
    response = pb.ModelInferResponse(model_name="m", model_version="2", id="r")
    sent = {"bool_param": True, "int64_param": -1, "uint64_param": 2**64 - 1, "double_param": 0.5, "string_param": "s"}
    for field, value in sent.items():
        setattr(response.parameters[field], field, value)
    result = infer_result(response)
    assert (result.model_name, result.model_version, result.id) == ("m", "2", "r")
    assert result.parameters == sent


def test_infer_result_unknown_output_raises_key_error_with_the_names() -> None:
    with pytest.raises(KeyError, match="no output 'z'; the model answered with y"):
        infer_result(answer("FP32", [1], fp32_contents=[1.0]))["z"]


def test_infer_result_is_iterated_by_names_like_a_dict() -> None:
    result = infer_result(answer("FP32", [1], fp32_contents=[1.0]))
    assert [*result] == ["y"]
    assert "y" in result
    assert "z" not in result
    assert {name: array.tolist() for name, array in dict(result).items()} == {"y": [1.0]}
