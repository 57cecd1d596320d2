"""Both clients against a scripted peer: the same inference, answers and errors."""

from __future__ import annotations

import array
import asyncio
import re
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np
import pytest

from paceline.clients import (
    DeadlineExceeded,
    InferenceError,
    Internal,
    InvalidArgument,
    ResponseError,
)
from paceline.clients.errors import inference_error
from paceline.protos import inference_pb2 as pb
from tests.unit.clients.conftest import Twin
from tests.unit.clients.peer import Peer, Stall, echo, refuse, serving_bytes

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
        ("INT32", [0.5], "input 'x': INT32 takes whole numbers, got 0.5"),
        ("UINT8", [256], "input 'x': UINT8 takes 0 to 255, got 256 to 256"),
        ("FP16", [1e6], "input 'x': FP16 can't hold 1000000.0 to 1000000.0: out of range"),
        ("FP32", [2**24 + 1], "input 'x': FP32 can't hold 16777217: too many digits"),
        ("FP32", [None], "input 'x': FP32 takes numbers, got None"),
    ],
)
async def test_infer_lists_that_would_lose_values_are_not_sent(
    twin: Twin, peer: Peer, datatype: str, value: Any, text: str
) -> None:
    peer.takes(x=(datatype, [-1]))
    with pytest.raises((ValueError, TypeError), match=f"^{re.escape(text)}$"):
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
