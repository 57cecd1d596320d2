"""Both clients against a scripted peer: the same calls, answers and errors."""

from __future__ import annotations

import array
import asyncio
import inspect
import json
import math
import re
import threading
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2

from paceline.clients import (
    AsyncInferenceClient,
    Cancelled,
    ClientClosed,
    DeadlineExceeded,
    IndexEntry,
    InferenceClient,
    InferenceError,
    Internal,
    InvalidArgument,
    ModelMetadata,
    NotFound,
    ResponseError,
    ServerMetadata,
    TensorMetadata,
    Tls,
    Unavailable,
)
from paceline.clients.errors import inference_error
from paceline.protos import inference_pb2 as pb
from tests.ports import free_port
from tests.unit.clients.conftest import Twin
from tests.unit.clients.peer import Peer, Stall, echo, refuse, serving, serving_bytes

MakeTwin = Callable[..., Twin]
X = {"x": np.zeros((1, 2), np.float32)}

SAMPLES: dict[str, Any] = {
    "BOOL": np.array([[True], [False]]),
    "UINT8": np.array([0, 255], np.uint8),
    "UINT16": np.array([0, 65535], np.uint16),
    "UINT32": np.array([0, 2**32 - 1], np.uint32),
    "UINT64": np.array([0, 2**64 - 1], np.uint64),
    "INT8": np.array([-128, 127], np.int8),
    "INT16": np.array([-(2**15), 2**15 - 1], np.int16),
    "INT32": np.array([-(2**31), 2**31 - 1], np.int32),
    "INT64": np.array([-(2**63), 2**63 - 1], np.int64),
    "FP16": np.array([[0.5, -2.0], [65504.0, np.inf]], np.float16),
    "FP32": np.array([[1.5, -0.0, np.nan]], np.float32),
    "FP64": np.array(1e300),
    "BYTES": np.array([[b"", b"a\0"], [b"\xff", "\u00e9".encode()]], object),
}


@pytest.mark.parametrize("datatype", SAMPLES)
async def test_infer_each_datatype_comes_back_unchanged(twin: Twin, peer: Peer, datatype: str) -> None:
    sent = SAMPLES[datatype]
    result = await twin.infer("m", {"x": sent})
    assert result.datatypes == {"x": datatype}
    assert result["x"].dtype == sent.dtype
    np.testing.assert_array_equal(result["x"], sent)
    assert peer.requests[0].inputs[0].datatype == datatype


@pytest.mark.parametrize("array", [np.float32(3).reshape(()), np.zeros((0, 4), np.int64), np.zeros((2, 0), object)])
async def test_infer_scalar_or_empty_comes_back_in_shape(twin: Twin, array: np.ndarray[Any, Any]) -> None:
    result = await twin.infer("m", {"x": array})
    assert result["x"].shape == array.shape
    assert result["x"].dtype == array.dtype


@pytest.mark.parametrize(
    ("datatype", "value", "sent"),
    [
        ("FP32", [[5.1, 3.5]], np.array([[5.1, 3.5]], np.float32)),
        ("FP32", [1, 2], np.array([1, 2], np.float32)),
        ("FP16", 0.5, np.array(0.5, np.float16)),
        ("INT32", ((1, 2.0),), np.array([[1, 2]], np.int32)),
        ("UINT8", range(3), np.array([0, 1, 2], np.uint8)),
        ("INT8", [np.float64(1), np.float64(2)], np.array([1, 2], np.int8)),
        ("BYTES", [], np.array([], object)),
    ],
)
async def test_infer_lists_take_the_models_datatype(
    twin: Twin, peer: Peer, datatype: str, value: Any, sent: np.ndarray[Any, Any]
) -> None:
    peer.takes(x=(datatype, [-1]))
    result = await twin.infer("m", {"x": value})
    assert result.datatypes == {"x": datatype}
    np.testing.assert_array_equal(result["x"], sent)


@pytest.mark.parametrize(
    ("datatype", "value", "text"),
    [
        ("INT32", [0.5], "input 'x': INT32 takes whole numbers, got float64 with others among them"),
        ("UINT8", [256], "input 'x': UINT8 takes 0 to 255, got 256 to 256"),
        ("FP16", [1e6], "input 'x': FP16 can't hold 1000000.0 to 1000000.0: out of range"),
        ("FP32", [2**24 + 1], "input 'x': FP32 can't hold 16777217: too many digits"),
    ],
)
async def test_infer_lists_that_would_lose_values_are_not_sent(
    twin: Twin, peer: Peer, datatype: str, value: Any, text: str
) -> None:
    peer.takes(x=(datatype, [-1]))
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        await twin.infer("m", {"x": value})
    assert [type(request) for request in peer.requests] == [pb.ModelMetadataRequest]


@pytest.mark.parametrize(
    "value", [np.array([1.5]), np.float64(1.5), [np.array([1.5])], [["text"]], (b"text",), array.array("d", [1.5])]
)
async def test_infer_arrays_and_text_keep_their_datatype_without_metadata(twin: Twin, peer: Peer, value: Any) -> None:
    peer.takes(x=("FP32", [-1]))
    result = await twin.infer("m", {"x": value})
    assert result.datatypes["x"] in ("FP64", "BYTES")
    assert [type(request) for request in peer.requests] == [pb.ModelInferRequest]


async def test_infer_datatypes_of_the_call_come_before_the_models(twin: Twin, peer: Peer) -> None:
    peer.takes(x=("FP32", [-1]))
    assert (await twin.infer("m", {"x": [1]}, datatypes={"x": "INT8"})).datatypes == {"x": "INT8"}
    assert [type(request) for request in peer.requests] == [pb.ModelInferRequest]


async def test_infer_lists_for_inputs_without_metadata_are_numpys(twin: Twin) -> None:
    result = await twin.infer("m", {"x": [1.5], "y": [1]})
    assert result.datatypes == {"x": "FP64", "y": "INT64"}


async def test_infer_asks_once_for_the_metadata_of_each_version(twin: Twin, peer: Peer) -> None:
    peer.takes(x=("FP32", [-1]))
    for version in ("", "", "2", "2"):
        await twin.infer("m", {"x": [1.5]}, version=version, metadata=[("x-one", "1")])
    asked = [number for number, request in enumerate(peer.requests) if isinstance(request, pb.ModelMetadataRequest)]
    assert [peer.requests[number].version for number in asked] == ["", "2"]
    assert all(peer.metadata[number]["x-one"] == "1" for number in asked)


async def test_infer_that_is_refused_asks_again_for_the_metadata(twin: Twin, peer: Peer) -> None:
    peer.takes(x=("FP32", [-1]))
    await twin.infer("m", {"x": [1]})
    peer.takes(x=("INT32", [-1]))
    peer.answer = refuse(grpc.StatusCode.INVALID_ARGUMENT)
    with pytest.raises(InvalidArgument):
        await twin.infer("m", {"x": [1]})
    peer.answer = echo
    assert (await twin.infer("m", {"x": [1]})).datatypes == {"x": "INT32"}


async def test_infer_bf16_from_float32_comes_back_rounded(twin: Twin, peer: Peer) -> None:
    result = await twin.infer("m", {"x": np.array([1.0, 1.001, -3.14159], np.float32)}, datatypes={"x": "BF16"})
    assert peer.requests[0].inputs[0].datatype == "BF16"
    assert result["x"].dtype == np.float32
    np.testing.assert_array_equal(result["x"], np.array([1.0, 1.0, -3.140625], np.float32))


async def test_infer_bf16_from_uint16_sends_the_bits(twin: Twin, peer: Peer) -> None:
    result = await twin.infer("m", {"x": np.array([0x3F80, 0xC000], np.uint16)}, datatypes={"x": "BF16"})
    assert peer.requests[0].raw_input_contents[0] == bytes.fromhex("803f00c0")
    np.testing.assert_array_equal(result["x"], np.array([1.0, -2.0], np.float32))


async def test_infer_all_options_reach_the_server(twin: Twin, peer: Peer) -> None:
    await twin.infer(
        "m",
        {"a": [1, 2], "b": ["text"]},
        version="2",
        outputs=("b",),
        request_id="r1",
        parameters={"priority": 1, "flag": True, "scale": 0.5, "tag": "t"},
        datatypes={"a": "INT32"},
        metadata=(("x-one", "1"), ("x-two-bin", b"\0")),
    )
    request = peer.requests[0]
    assert (request.model_name, request.model_version, request.id) == ("m", "2", "r1")
    assert [output.name for output in request.outputs] == ["b"]
    assert [(each.name, each.datatype, list(each.shape)) for each in request.inputs] == [
        ("a", "INT32", [2]),
        ("b", "BYTES", [1]),
    ]
    assert request.parameters["priority"].int64_param == 1
    assert request.parameters["flag"].bool_param is True
    assert request.parameters["scale"].double_param == 0.5
    assert request.parameters["tag"].string_param == "t"
    assert peer.metadata[0]["x-one"] == "1"
    assert peer.metadata[0]["x-two-bin"] == b"\0"


async def test_infer_typed_answer_is_read(twin: Twin, peer: Peer) -> None:
    def typed(request: pb.ModelInferRequest, context: grpc.ServicerContext) -> pb.ModelInferResponse:
        response = pb.ModelInferResponse(model_name="m")
        response.parameters["rows"].int64_param = 4
        response.outputs.add(name="f", datatype="FP32", shape=[1, 2]).contents.fp32_contents.extend([1.5, 2.5])
        response.outputs.add(name="i", datatype="INT8", shape=[2]).contents.int_contents.extend([-1, 7])
        response.outputs.add(name="s", datatype="BYTES", shape=[1]).contents.bytes_contents.append(b"ok")
        return response

    peer.answer = typed
    result = await twin.infer("m", X)
    np.testing.assert_array_equal(result["f"], np.array([[1.5, 2.5]], np.float32))
    np.testing.assert_array_equal(result["i"], np.array([-1, 7], np.int8))
    assert result["s"].tolist() == [b"ok"]
    assert list(result.outputs) == ["f", "i", "s"]
    assert result.parameters == {"rows": 4}


async def test_infer_tensor_above_grpcs_default_limit_is_sent_and_returned(twin: Twin) -> None:
    large = np.zeros(5 * 2**20, np.uint8)
    assert (await twin.infer("m", {"x": large}))["x"].size == large.size


async def test_infer_contradictory_answer_raises_response_error(twin: Twin, peer: Peer) -> None:
    def short(request: pb.ModelInferRequest, context: grpc.ServicerContext) -> pb.ModelInferResponse:
        response = echo(request, context)
        response.raw_output_contents[0] = b"\0"
        return response

    peer.answer = short
    with pytest.raises(ResponseError, match=r"model 'm', output 'x'.*8 bytes"):
        await twin.infer("m", X)


async def test_infer_answer_that_cannot_be_parsed_raises_internal(make_twin: MakeTwin) -> None:
    with serving_bytes(b"\xff\xff") as target:
        with pytest.raises(Internal, match="Exception deserializing response!"):
            await make_twin(target).infer("m", X)
        with pytest.raises(Internal, match="Exception deserializing response!"):
            await make_twin(target).server_live()


async def test_infer_unusable_input_raises_before_sending(twin: Twin, peer: Peer) -> None:
    with pytest.raises(TypeError, match="input 'x'"):
        await twin.infer("m", {"x": np.array([1j])})
    assert peer.requests == []


@pytest.mark.parametrize("status", [status for status in grpc.StatusCode if status is not grpc.StatusCode.OK])
async def test_infer_each_status_raises_its_class(twin: Twin, peer: Peer, status: grpc.StatusCode) -> None:
    peer.answer = refuse(status, "why\nnot", (("retry-after", "3"), ("detail-bin", b"\1")))
    with pytest.raises(InferenceError) as caught:
        await twin.infer("m", X)
    error = caught.value
    assert type(error) is type(inference_error(status, ""))
    assert (error.status, error.message) == (status, "why\nnot")
    assert dict(error.trailing_metadata) == {"retry-after": "3", "detail-bin": b"\1"}
    assert isinstance(error.__cause__, grpc.RpcError)


async def test_infer_handler_failure_then_next_call_succeeds(twin: Twin, peer: Peer) -> None:
    peer.answer = refuse(grpc.StatusCode.INTERNAL)
    with pytest.raises(Internal):
        await twin.infer("m", X)
    peer.answer = echo
    assert (await twin.infer("m", X))["x"].shape == (1, 2)


async def test_infer_beyond_its_own_timeout_raises_deadline_exceeded(twin: Twin, peer: Peer) -> None:
    peer.answer = stall = Stall()
    while not stall.started.is_set():  # the time may have passed before there is a connection
        with pytest.raises(DeadlineExceeded):
            await twin.infer("m", X, timeout_s=0.05)
    assert await asyncio.to_thread(stall.ended.wait, 60)


async def test_infer_beyond_the_clients_timeout_raises_deadline_exceeded(make_twin: MakeTwin, peer: Peer) -> None:
    peer.answer = Stall()
    with pytest.raises(DeadlineExceeded):
        await make_twin(peer.target, timeout_s=0.05).infer("m", X)


async def test_timeout_left_out_or_given_or_none_reaches_the_server(make_twin: MakeTwin, peer: Peer) -> None:
    twin = make_twin(peer.target, timeout_s=500.0)
    await twin.server_live()
    await twin.server_live(timeout_s=50.0)
    await twin.server_live(timeout_s=None)
    # No deadline is None or centuries; gRPC rounds up what it sends.
    default_s, own_s, none_s = (left_s or 1e9 for left_s in peer.time_left_s)
    assert 100 < default_s < 1000
    assert 10 < own_s < 100
    assert none_s > 1e6


@pytest.mark.parametrize("timeout_s", [math.inf, 7.5e9, 1e10, 1e300, 10**400])
async def test_timeout_beyond_grpcs_range_is_no_bound(make_twin: MakeTwin, peer: Peer, timeout_s: float) -> None:
    twin = make_twin(peer.target, timeout_s=timeout_s)
    await twin.server_live()
    await twin.server_live(timeout_s=timeout_s)
    await twin.wait_ready(timeout_s)
    assert all((left_s or 1e9) > 1e6 for left_s in peer.time_left_s)


@pytest.mark.parametrize("timeout_s", [0, 0.0, -1, -math.inf])
async def test_timeout_that_has_passed_is_deadline_exceeded(twin: Twin, timeout_s: float) -> None:
    await twin.wait_ready(30.0)
    with pytest.raises(DeadlineExceeded):
        await twin.server_live(timeout_s=timeout_s)
    with pytest.raises(DeadlineExceeded):
        await twin.infer("m", X, timeout_s=timeout_s)
    with pytest.raises(DeadlineExceeded):
        await twin.wait_ready(timeout_s)


@pytest.mark.parametrize(
    ("method", "arguments", "text"),
    [
        ("infer", {"inputs": X, "model": None}, "model: expected a str, got None"),
        ("infer", {"inputs": X, "model": "m", "version": 1}, "version: expected a str, got 1"),
        ("infer", {"inputs": X, "model": "m", "request_id": 7}, "request_id: expected a str, got 7"),
        ("infer", {"inputs": X, "model": "m", "outputs": [1]}, "outputs: expected a str, got 1"),
        ("infer", {"inputs": X, "model": "m", "outputs": None}, "outputs: expected a sequence of names, got None"),
        ("infer", {"inputs": X, "model": "m", "outputs": 5}, "outputs: expected a sequence of names, got 5"),
        ("infer", {"inputs": X, "model": "m", "outputs": b"y"}, "outputs: expected a sequence of names, got b'y'"),
        ("infer", {"inputs": None, "model": "m"}, "inputs: expected a mapping by name, got NoneType"),
        ("infer", {"inputs": {1: X["x"]}, "model": "m"}, "inputs: expected a str, got 1"),
        ("infer", {"inputs": {b"x": X["x"]}, "model": "m"}, "inputs: expected a str, got b'x'"),
        ("infer", {"inputs": X["x"], "model": "m"}, "inputs: expected a mapping by name, got ndarray"),
        ("infer", {"inputs": X, "model": "m", "parameters": ["a"]}, "parameters: expected a mapping by name, got list"),
        ("infer", {"inputs": X, "model": "m", "parameters": {1: "a"}}, "parameters: expected a str, got 1"),
        ("infer", {"inputs": X, "model": "m", "datatypes": ["x"]}, "datatypes: expected a mapping by name, got list"),
        ("infer", {"inputs": X, "model": "m", "datatypes": "FP32"}, "datatypes: expected a mapping by name, got str"),
        ("infer", {"inputs": X, "model": "m", "timeout_s": "1"}, "timeout_s: expected a number of seconds.* got '1'"),
        ("model_ready", {"model": None}, "model: expected a str, got None"),
        ("model_ready", {"model": "m", "version": 1}, "version: expected a str, got 1"),
        ("model_metadata", {"model": b"m"}, "model: expected a str, got b'm'"),
        ("model_metadata", {"model": "m", "version": None}, "version: expected a str, got None"),
        ("health", {"service": None}, "service: expected a str, got None"),
        ("server_live", {"timeout_s": "1"}, "timeout_s: expected a number of seconds, or None, got '1'"),
        ("server_live", {"metadata": None}, "metadata: expected pairs of key and value, got NoneType"),
        ("server_live", {"metadata": "ab"}, "metadata: expected pairs of key and value, got str"),
        (
            "server_live",
            {"metadata": ["ab"]},
            "metadata: expected pairs of key and value, got something else among them",
        ),
        ("wait_ready", {"timeout_s": [1]}, r"timeout_s: expected a number of seconds, or None, got \[1\]"),
    ],
)
async def test_argument_of_a_wrong_type_is_refused_by_name_before_sending(
    twin: Twin, peer: Peer, method: str, arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(TypeError, match=f"^{text}$"):
        await getattr(twin, method)(**arguments)
    assert peer.requests == []


@pytest.mark.parametrize(
    ("method", "arguments", "argument"),
    [
        ("infer", {"model": "\ud800", "inputs": X}, "model"),
        ("infer", {"model": "m", "inputs": {"\ud800": X["x"]}}, "inputs"),
        ("infer", {"model": "m", "inputs": X, "request_id": "\ud800"}, "request_id"),
        ("infer", {"model": "m", "inputs": X, "parameters": {"p": "\ud800"}}, "parameter 'p'"),
        ("model_ready", {"model": "m", "version": "\ud800"}, "version"),
        ("health", {"service": "\ud800"}, "service"),
    ],
)
async def test_text_that_utf8_cannot_encode_is_refused_by_name_before_sending(
    twin: Twin, peer: Peer, method: str, arguments: dict[str, Any], argument: str
) -> None:
    with pytest.raises(ValueError, match=rf"^{argument}: expected text that UTF-8 can encode, got '\\ud800'$"):
        await getattr(twin, method)(**arguments)
    assert peer.requests == []


@pytest.mark.parametrize("timeout_s", [30, 30.0, np.float32(30), np.int64(30), Fraction(30)])
async def test_timeout_of_any_numeric_type_is_accepted(make_twin: MakeTwin, peer: Peer, timeout_s: float) -> None:
    twin = make_twin(peer.target, timeout_s=timeout_s)
    await twin.wait_ready(timeout_s)
    assert await twin.server_live()
    assert await twin.server_live(timeout_s=timeout_s)


TARGET = "target: expected a gRPC name such as '127.0.0.1:8001', got "
SCHEME = "leave out the scheme; tls=True selects TLS"


@pytest.mark.parametrize("client", [InferenceClient, AsyncInferenceClient])
@pytest.mark.parametrize(
    ("target", "settings", "error", "text"),
    [
        ("", {}, ValueError, "target: expected a gRPC name such as '127.0.0.1:8001', got ''"),
        (
            "http://h:1",
            {},
            ValueError,
            f"{TARGET}'http://h:1': leave out the scheme; tls=True selects TLS",
        ),
        ("127.0.0.1:99999", {}, ValueError, f"{TARGET}'127.0.0.1:99999', whose port is above 65535"),
        (None, {}, TypeError, "target: expected a str, got None"),
        (8001, {}, TypeError, "target: expected a str, got 8001"),
        ("h:1", {"timeout_s": "1"}, TypeError, "timeout_s: expected a number of seconds, or None, got '1'"),
        ("h:1", {"timeout_s": ...}, TypeError, "timeout_s: expected a number of seconds, or None, got Ellipsis"),
        ("h:1", {"tls": "ca.crt"}, TypeError, "tls: expected True, False or clients.Tls, got 'ca.crt'"),
        ("h:1", {"token": 5}, TypeError, "token: expected a str, got int"),
        ("h:1", {"token": b"secret"}, TypeError, "token: expected a str, got bytes"),
        ("h:1", {"credentials": 5}, TypeError, "credentials: expected grpc.ChannelCredentials, got int"),
        ("h:1", {"options": 5}, TypeError, "options: expected pairs of name and value, got 5"),
        ("h:1", {"options": [("a",)]}, TypeError, "options: expected pairs of name and value, got [('a',)]"),
        ("h:1", {"metadata": 5}, TypeError, "metadata: expected pairs of key and value, got int"),
    ],
)
def test_invalid_settings_are_refused_by_name(
    client: Any, target: Any, settings: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error) as refusal:
        client(target, **settings)
    assert str(refusal.value) == text


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"ca": 5}, "TLS: ca: expected the path of a file, got 5"),
        ({"ca": b"ca.crt"}, "TLS: ca: expected the path of a file, got b'ca.crt'"),
        ({"certificate": 5, "key": 5}, "TLS: certificate: expected the path of a file, got 5"),
        ({"server_name": 5}, "TLS: server_name: expected a str, got 5"),
    ],
)
def test_tls_argument_of_a_wrong_type_is_refused_by_name(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(TypeError) as refusal:
        Tls(**arguments)
    assert str(refusal.value) == text


async def test_timeout_of_nan_is_refused_before_sending(make_twin: MakeTwin, peer: Peer) -> None:
    twin = make_twin(peer.target)
    for method, arguments in ((twin.server_live, ()), (twin.infer, ("m", X)), (twin.wait_ready, ())):
        with pytest.raises(ValueError, match="timeout_s: expected a number of seconds, got nan"):
            await method(*arguments, timeout_s=math.nan)
    with pytest.raises(ValueError, match="timeout_s"):
        make_twin(peer.target, timeout_s=math.nan)
    assert peer.requests == []


async def test_metadata_of_client_and_call_both_reach_the_server(make_twin: MakeTwin, peer: Peer) -> None:
    twin = make_twin(peer.target, metadata=(("authorization", "token"),))
    await twin.server_live(metadata=[("x-call", "1")])
    assert peer.metadata[0]["authorization"] == "token"
    assert peer.metadata[0]["x-call"] == "1"


async def test_given_options_override_the_clients_own(make_twin: MakeTwin, peer: Peer) -> None:
    twin = make_twin(peer.target, options=[("grpc.max_receive_message_length", 10)])
    with pytest.raises(InferenceError) as caught:
        await twin.infer("m", X)
    assert caught.value.status is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_server_live_and_ready_return_the_servers_answer(twin: Twin, peer: Peer) -> None:
    peer.readiness = [False, True]
    assert await twin.server_live() is True
    assert await twin.server_ready() is False
    assert await twin.server_ready() is True


async def test_model_ready_names_model_and_version(twin: Twin, peer: Peer) -> None:
    assert await twin.model_ready("m", "4") is True
    assert await twin.model_ready("other") is False
    assert [(each.name, each.version) for each in peer.requests] == [("m", "4"), ("other", "")]


async def test_server_metadata_is_read(twin: Twin) -> None:
    assert await twin.server_metadata() == ServerMetadata("peer", "7", ("statistics",))


async def test_repository_index_is_read(twin: Twin, peer: Peer) -> None:
    peer.index.models.add(name="m", version="1", state="READY")
    peer.index.models.add(name="n", state="UNAVAILABLE", reason="broken")
    assert await twin.repository_index() == (
        IndexEntry("m", "1", "READY", ""),
        IndexEntry("n", "", "UNAVAILABLE", "broken"),
    )


async def test_model_metadata_is_read(twin: Twin, peer: Peer) -> None:
    peer.model = pb.ModelMetadataResponse(name="m", versions=["1", "2"], platform="p", properties={"k": "v"})
    peer.model.inputs.add(name="x", datatype="FP32", shape=[-1, 4])
    peer.model.outputs.add(name="y", datatype="BYTES", shape=[])
    assert await twin.model_metadata("m") == ModelMetadata(
        name="m",
        versions=("1", "2"),
        platform="p",
        inputs=(TensorMetadata("x", "FP32", (-1, 4)),),
        outputs=(TensorMetadata("y", "BYTES", ()),),
        properties={"k": "v"},
    )


async def test_health_known_and_unknown_service(twin: Twin, peer: Peer) -> None:
    assert await twin.health() == "SERVING"
    peer.health.status = health_pb2.HealthCheckResponse.NOT_SERVING
    assert await twin.health("inference.GRPCInferenceService") == "NOT_SERVING"
    with pytest.raises(NotFound):
        await twin.health("unknown")


async def test_health_unknown_status_raises_response_error(twin: Twin, peer: Peer) -> None:
    peer.health = health_pb2.HealthCheckResponse(status=99)
    with pytest.raises(ResponseError, match="99"):
        await twin.health()


async def test_wait_ready_asks_until_the_server_is_ready(twin: Twin, peer: Peer) -> None:
    peer.readiness = [False, grpc.StatusCode.UNAVAILABLE, True]
    await twin.wait_ready(30.0)
    assert len(peer.requests) == 3


async def test_wait_ready_returns_when_the_server_comes_later(make_twin: MakeTwin) -> None:
    address = _free_address()
    waiting = asyncio.ensure_future(make_twin(address).wait_ready(30.0))
    with serving(Peer(), address) as peer:
        await waiting
    assert len(peer.requests) == 1


async def test_wait_ready_never_ready_raises_deadline_exceeded(twin: Twin, peer: Peer) -> None:
    peer.readiness = [False]
    with pytest.raises(DeadlineExceeded, match=r"was not ready within 0\.1 s"):
        await twin.wait_ready(0.1)


async def test_wait_ready_without_a_server_raises_deadline_exceeded(make_twin: MakeTwin) -> None:
    with pytest.raises(DeadlineExceeded, match="was not ready"):
        await make_twin(_free_address()).wait_ready(0.1)


async def test_wait_ready_other_error_is_raised(twin: Twin, peer: Peer) -> None:
    peer.readiness = [grpc.StatusCode.PERMISSION_DENIED]
    with pytest.raises(InferenceError) as caught:
        await twin.wait_ready(30.0)
    assert caught.value.status is grpc.StatusCode.PERMISSION_DENIED


async def test_call_without_a_server_raises_unavailable_at_once(make_twin: MakeTwin) -> None:
    with pytest.raises(Unavailable):
        await make_twin(_free_address()).server_live(timeout_s=30.0)


async def test_call_without_a_server_waits_where_the_service_config_says_so(make_twin: MakeTwin) -> None:
    service = {"methodConfig": [{"name": [{}], "waitForReady": True}]}
    twin = make_twin(_free_address(), options=[("grpc.service_config", json.dumps(service))])
    with pytest.raises(DeadlineExceeded):
        await twin.server_live(timeout_s=0.2)


async def test_close_during_a_call_raises_cancelled(twin: Twin, peer: Peer) -> None:
    peer.answer = Stall()
    call = asyncio.ensure_future(twin.infer("m", X))
    assert await asyncio.to_thread(peer.answer.started.wait, 60)
    await twin.close()
    with pytest.raises(Cancelled):
        await call


async def test_closed_client_refuses_calls(twin: Twin, peer: Peer) -> None:
    await twin.server_live()
    await twin.close()
    await twin.close()
    with pytest.raises(ClientClosed, match=r"InferenceClient\('127\.0\.0\.1:\d+'\)"):
        await twin.server_live()


async def test_credentials_make_the_connection_secure(make_twin: MakeTwin, peer: Peer) -> None:
    # The peer speaks plain text: a failed handshake shows that there is one.
    twin = make_twin(peer.target, credentials=grpc.ssl_channel_credentials())
    with pytest.raises(Unavailable):
        await twin.server_live(timeout_s=30.0)


async def test_context_manager_closes_at_the_end(peer: Peer) -> None:
    async with AsyncInferenceClient(peer.target) as asynchronous:
        assert await asynchronous.server_live()
    with pytest.raises(ClientClosed):
        await asynchronous.server_live()
    with InferenceClient(peer.target) as blocking:
        assert blocking.server_live()
    with pytest.raises(ClientClosed):
        blocking.server_live()


def test_both_clients_have_the_same_methods_and_arguments() -> None:
    def surface(client: type) -> dict[str, inspect.Signature]:
        members = inspect.getmembers(client, inspect.isfunction)
        return {name: inspect.signature(member) for name, member in members if not name.startswith("_")}

    assert surface(InferenceClient) == surface(AsyncInferenceClient)
    settings = dict(inspect.signature(AsyncInferenceClient).parameters)
    assert settings.pop("transport").default == "call"
    assert settings.pop("coalesce").default is None
    assert settings == dict(inspect.signature(InferenceClient).parameters)


def test_first_use_from_many_threads_opens_one_channel(peer: Peer) -> None:
    together = threading.Barrier(4)
    with InferenceClient(peer.target) as client:

        def use() -> None:
            together.wait()
            client.server_live()

        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(peer.requests) == 4


def test_close_by_another_thread_as_a_call_begins_raises_client_closed(peer: Peer) -> None:
    with InferenceClient(peer.target) as client:

        def closing() -> Iterator[tuple[str, str]]:
            closer = threading.Thread(target=client.close)
            closer.start()
            closer.join()
            yield "x-late", "1"

        class Closing(list[tuple[str, str]]):
            """Metadata that closes the client when it is read, which is after the call got its channel."""

            def __iter__(self) -> Iterator[tuple[str, str]]:
                return closing()

        with pytest.raises(ClientClosed):
            client.server_live(metadata=Closing())


def _free_address() -> str:
    return f"127.0.0.1:{free_port()}"
