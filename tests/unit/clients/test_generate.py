"""Generations through both clients: what is sent to which server, and what its answers become."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from paceline.clients import AsyncInferenceClient, GenerationChunk, InferenceClient, InvalidArgument, ResponseError
from paceline.protos import inference_pb2 as pb
from tests.unit.clients.peer import serving
from tests.unit.clients.sequence_peer import Talking, final

Client = InferenceClient | AsyncInferenceClient
IDS = {"input_ids": ("INT64", [-1])}
VLLM: dict[str, tuple[str, list[int]]] = {
    "text_input": ("BYTES", [1]),
    "stream": ("BOOL", [1]),
    "sampling_parameters": ("BYTES", [1]),
    "return_finish_reason": ("BOOL", [1]),
    "return_logprobs": ("BOOL", [1]),
    "return_num_input_tokens": ("BOOL", [1]),
}


@pytest.fixture
def peer() -> Iterator[Talking]:
    with serving(Talking()) as served:
        assert isinstance(served, Talking)
        served.script = lambda request, context: iter([final(message(text_output=b"", output_ids=7))])
        yield served


@pytest.fixture(params=[InferenceClient, AsyncInferenceClient], ids=["sync", "aio"])
async def client(request: pytest.FixtureRequest, peer: Talking) -> AsyncIterator[Client]:
    made = request.param(peer.target)
    yield made
    closing = made.close()
    if closing is not None:
        await closing


async def generated(client: Client, prompt: Any, **more: Any) -> list[GenerationChunk]:
    """The chunks of either client; those of the blocking one are waited for in a thread."""
    if isinstance(client, AsyncInferenceClient):
        return [chunk async for chunk in client.generate("m", prompt, **more)]
    return await asyncio.to_thread(lambda: list(client.generate("m", prompt, **more)))


def message(parameters: dict[str, str] | None = None, **outputs: bytes | int) -> pb.ModelStreamInferResponse:
    """An answer with an element of each of `outputs`: text as BYTES, numbers as INT64."""
    response = pb.ModelInferResponse(model_name="m")
    for name, value in outputs.items():
        output = response.outputs.add(name=name, datatype="INT64" if isinstance(value, int) else "BYTES", shape=[1])
        if isinstance(value, int):
            output.contents.int64_contents.append(value)
        else:
            output.contents.bytes_contents.append(value)
    for name, said in (parameters or {}).items():
        response.parameters[name].string_param = said
    response.parameters["triton_final_response"].bool_param = False
    return pb.ModelStreamInferResponse(infer_response=response)


def sent(peer: Talking) -> tuple[dict[str, tuple[str, Any]], dict[str, Any]]:
    """Datatypes and values of the only request's inputs, and its parameters, without those of streams."""
    (request,) = (each for each in peer.requests if isinstance(each, pb.ModelInferRequest))
    inputs: dict[str, tuple[str, Any]] = {}
    for tensor, raw in zip(request.inputs, request.raw_input_contents, strict=True):
        text = raw[4:].decode() if tensor.datatype == "BYTES" else raw
        inputs[tensor.name] = tensor.datatype, text
    parameters = {key: getattr(one, str(one.WhichOneof("parameter_choice"))) for key, one in request.parameters.items()}
    del parameters["triton_enable_empty_final_response"]
    return inputs, parameters


@pytest.mark.parametrize("prompt", [[1, 2], np.array([1, 2], np.int32)], ids=["list", "array"])
async def test_token_ids_and_parameters_of_the_request(client: Client, peer: Talking, prompt: Any) -> None:
    peer.takes(**IDS)
    options = {"max_tokens": np.int64(3), "temperature": 0.5, "stop": ["a", "b"], "priority": 1, "seed": None}
    (chunk,) = await generated(client, prompt, **options)
    assert (chunk.text, chunk.token_ids, chunk.finish_reason) == ("", (7,), None)
    inputs, parameters = sent(peer)
    assert inputs == {"input_ids": ("INT64", np.array([1, 2], np.int64).tobytes())}
    assert parameters == {"max_tokens": 3, "temperature": 0.5, "stop": '["a", "b"]', "priority": 1}


async def test_model_with_sampling_parameters_gets_them_as_an_object(client: Client, peer: Talking) -> None:
    peer.takes(**VLLM)
    options = {"max_tokens": np.int64(3), "temperature": 0.5, "stop": ["a", "b"]}
    await generated(client, "Once", **options, timeout=9, priority=1, paceline_deadline_us=8, version="1")
    inputs, parameters = sent(peer)
    assert json.loads(inputs.pop("sampling_parameters")[1]) == {"max_tokens": 3, "temperature": 0.5, "stop": ["a", "b"]}
    assert inputs == {
        "text_input": ("BYTES", "Once"),
        "stream": ("BOOL", b"\x01"),
        "return_finish_reason": ("BOOL", b"\x01"),
    }
    assert parameters == {"timeout": 9, "priority": 1, "paceline_deadline_us": 8}


async def test_parameters_that_are_inputs_of_the_model_are_sent_as_such(client: Client, peer: Talking) -> None:
    peer.takes(**VLLM)
    await generated(client, "Once", logprobs=2, return_num_input_tokens=True, stream=False)
    inputs, parameters = sent(peer)
    assert json.loads(inputs["sampling_parameters"][1]) == {"logprobs": 2}
    flags = {name: value[1] for name, value in inputs.items() if value[0] == "BOOL"}
    assert flags.pop("stream") == b"\0"
    assert flags == dict.fromkeys(("return_finish_reason", "return_logprobs", "return_num_input_tokens"), b"\x01")
    assert parameters == {}


@pytest.mark.parametrize("told", ["parameter", "output"])
async def test_finish_reason_is_that_of_the_last_chunk(client: Client, peer: Talking, told: str) -> None:
    peer.takes(**VLLM)
    if told == "parameter":
        messages = [message(text_output=b"a"), final(message({"finish_reason": "stop"}, text_output="\u00e9".encode()))]
    else:
        messages = [
            message(text_output=b"a", finish_reason=b"None"),
            final(message(text_output="\u00e9".encode(), finish_reason=b"stop")),
        ]
    peer.script = lambda request, context: iter(messages)
    chunks = await generated(client, "Once")
    assert [(one.text, one.finish_reason) for one in chunks] == [("a", None), ("\u00e9", "stop")]
    assert chunks[0].result["text_output"].tolist() == [b"a"]


async def test_inputs_of_a_model_are_asked_for_once(client: Client, peer: Talking) -> None:
    peer.takes(**IDS)
    for _ in range(2):
        await generated(client, [1])
    asked = [type(each) for each in peer.requests]
    assert asked == [pb.ModelMetadataRequest, pb.ModelInferRequest, pb.ModelInferRequest]

    def refuse(request: pb.ModelInferRequest, context: grpc.ServicerContext) -> Iterator[pb.ModelStreamInferResponse]:
        context.abort(grpc.StatusCode.INVALID_ARGUMENT, "another model")
        yield from ()

    peer.script = refuse
    with pytest.raises(InvalidArgument, match="another model"):
        await generated(client, [1])
    peer.takes(**VLLM)
    with contextlib.suppress(InvalidArgument):
        await generated(client, "Once")
    assert [one.name for one in peer.requests[-1].inputs][:2] == ["text_input", "stream"]


@pytest.mark.parametrize("parameters", [{"temperature": float("nan")}, {"stop": [1j]}, {"stop": b"a"}])
async def test_parameters_that_cannot_be_sent_are_refused(
    client: Client, peer: Talking, parameters: dict[str, Any]
) -> None:
    peer.takes(**VLLM)
    with pytest.raises((TypeError, ValueError)):
        await generated(client, "Once", **parameters)
    assert [type(each) for each in peer.requests] == [pb.ModelMetadataRequest]


@pytest.mark.parametrize("outputs", [{"output_ids": b"a"}, {"text_output": 1}, {"text_output": b"\xff"}])
async def test_outputs_that_are_no_tokens_raise_response_error(
    client: Client, peer: Talking, outputs: dict[str, Any]
) -> None:
    peer.takes(**IDS)
    peer.script = lambda request, context: iter([final(message(**outputs))])
    with pytest.raises(ResponseError, match=f"output '{next(iter(outputs))}'"):
        await generated(client, [1])
