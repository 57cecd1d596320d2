"""Answers of decoupled models, through both clients: which are yielded, when it is over, what is told to the server."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import numpy as np
import pytest

from paceline.clients import (
    AsyncInferenceClient,
    Cancelled,
    DeadlineExceeded,
    InferenceClient,
    InferenceError,
    InferResult,
    Internal,
    PermissionDenied,
    ResponseError,
    Unavailable,
)
from paceline.protos import inference_pb2 as pb
from tests.unit.clients.peer import serving, serving_bytes
from tests.unit.clients.sequence_peer import Talking, answer, final

X = {"x": np.array([1.5], np.float32)}
Client = InferenceClient | AsyncInferenceClient


@pytest.fixture
def peer() -> Iterator[Talking]:
    with serving(Talking()) as served:
        assert isinstance(served, Talking)
        yield served


@pytest.fixture(params=[InferenceClient, AsyncInferenceClient], ids=["sync", "aio"])
async def client(request: pytest.FixtureRequest, peer: Talking) -> AsyncIterator[Client]:
    made = request.param(peer.target)
    yield made
    await close(made)


async def close(client: Client) -> None:
    closing = client.close()
    if closing is not None:
        await closing


async def answers(client: Client, inputs: Any = X, **more: Any) -> AsyncIterator[InferResult]:
    """The answers of either client; those of the blocking one are waited for in a thread."""
    if isinstance(client, AsyncInferenceClient):
        async with contextlib.aclosing(client.stream_infer("m", inputs, **more)) as each:
            async for one in each:
                yield one
        return
    with contextlib.closing(client.stream_infer("m", inputs, **more)) as blocking:
        while (one := await asyncio.to_thread(next, blocking, None)) is not None:
            yield one


async def collected(client: Client, inputs: Any = X, **more: Any) -> list[InferResult]:
    return [each async for each in answers(client, inputs, **more)]


def failure(request: pb.ModelInferRequest, text: str, status: str = "") -> pb.ModelStreamInferResponse:
    message = pb.ModelStreamInferResponse(error_message=text)
    message.infer_response.id = request.id
    if status:
        message.infer_response.parameters["paceline_status"].string_param = status
    return message


def empty() -> pb.ModelStreamInferResponse:
    return final(pb.ModelStreamInferResponse(infer_response=pb.ModelInferResponse(model_name="m")))


async def test_answers_are_yielded_up_to_the_final_one(client: Client, peer: Talking) -> None:
    peer.script = lambda request, context: iter([answer(request), answer(request), final(answer(request))])
    results = await collected(client, request_id="r1", parameters={"tag": "t"}, version="2", outputs=("x",))
    assert [(each["x"].tolist(), each.id, each.parameters) for each in results] == [([1.5], "r1", {})] * 3
    (request,) = peer.requests
    assert (request.model_version, [output.name for output in request.outputs]) == ("2", ["x"])
    assert request.parameters["tag"].string_param == "t"
    assert request.parameters["triton_enable_empty_final_response"].bool_param is True


@pytest.mark.parametrize("count", [0, 1, 3])
async def test_empty_final_answer_is_not_yielded(client: Client, peer: Talking, count: int) -> None:
    peer.script = lambda request, context: iter([*(answer(request) for _ in range(count)), empty()])
    assert len(await collected(client)) == count


async def test_answers_without_marks_end_with_the_stream(client: Client, peer: Talking) -> None:
    def unmarked(request: pb.ModelInferRequest, context: grpc.ServicerContext) -> Iterator[pb.ModelStreamInferResponse]:
        for _ in range(2):
            message = answer(request)
            message.infer_response.parameters.clear()
            yield message

    peer.script = unmarked
    assert len(await collected(client)) == 2


@pytest.mark.parametrize("count", [0, 2])
async def test_stream_that_ends_before_the_final_answer_is_unavailable(
    client: Client, peer: Talking, count: int
) -> None:
    peer.script = lambda request, context: iter([answer(request) for _ in range(count)])
    each = answers(client)
    for _ in range(count):
        await anext(each)
    with pytest.raises(Unavailable, match="the server ended the stream before the final answer"):
        await anext(each)


@pytest.mark.parametrize(("status", "kind"), [("INTERNAL", Internal), ("", InferenceError), ("NOPE", InferenceError)])
async def test_error_among_the_answers_is_raised_with_its_status(
    client: Client, peer: Talking, status: str, kind: type[InferenceError]
) -> None:
    peer.script = lambda request, context: iter([answer(request), failure(request, "no more", status), empty()])
    each = answers(client)
    await anext(each)
    with pytest.raises(InferenceError, match="no more") as caught:
        await anext(each)
    assert type(caught.value) is kind


async def test_refused_stream_raises_the_servers_reason(client: Client, peer: Talking) -> None:
    def refuse(request: pb.ModelInferRequest, context: grpc.ServicerContext) -> Iterator[pb.ModelStreamInferResponse]:
        context.abort(grpc.StatusCode.PERMISSION_DENIED, "not you")
        yield from ()

    peer.script = refuse
    for _ in range(20):
        with pytest.raises(PermissionDenied, match="not you"):
            await collected(client)


class Endless:
    """Answers for as long as the stream lives; `ended` is set when it doesn't."""

    def __init__(self, most: int | None = None, size: int = 1) -> None:
        self.sent = 0
        self.ended = threading.Event()
        self._most = most
        self._padding = np.zeros(size, np.uint8).tobytes()

    def __call__(
        self, request: pb.ModelInferRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.ModelStreamInferResponse]:
        over = threading.Event()
        context.add_callback(over.set)
        try:
            while not over.is_set():
                if self.sent == self._most:
                    over.wait(60)
                    return
                message = answer(request)
                message.infer_response.parameters["padding"].string_param = self._padding.decode()
                self.sent += 1
                yield message
        finally:
            self.ended.set()


async def test_iterator_that_is_closed_early_cancels_the_request(client: Client, peer: Talking) -> None:
    peer.script = endless = Endless(most=5)
    async with contextlib.aclosing(answers(client)) as each:
        assert (await anext(each))["x"].tolist() == [1.5]
    assert await asyncio.to_thread(endless.ended.wait, 60)


async def test_slow_reader_holds_the_server_up(client: Client, peer: Talking) -> None:
    peer.script = endless = Endless(most=200, size=2**20)
    async with contextlib.aclosing(answers(client)) as each:
        await anext(each)
        for _ in range(100):  # answers that nobody asks for would come meanwhile
            live = client.server_live()
            assert live if isinstance(live, bool) else await live
        assert endless.sent < 50
        for _ in range(100):
            await anext(each)
    assert await asyncio.to_thread(endless.ended.wait, 60)


async def test_answers_beyond_the_timeout_are_deadline_exceeded(client: Client, peer: Talking) -> None:
    peer.script = endless = Endless(most=2)
    with pytest.raises(DeadlineExceeded):
        await collected(client, timeout_s=0.5)
    assert not endless.sent or await asyncio.to_thread(endless.ended.wait, 60)


async def test_client_that_is_closed_meanwhile_raises_cancelled(client: Client, peer: Talking) -> None:
    peer.script = Endless(most=1)
    each = answers(client)
    await anext(each)
    waiting = asyncio.ensure_future(anext(each))
    await close(client)
    with pytest.raises(Cancelled):
        await waiting


async def test_cancelled_task_cancels_the_request(peer: Talking) -> None:
    peer.script = endless = Endless(most=1)
    async with AsyncInferenceClient(peer.target) as client:
        each = client.stream_infer("m", X)
        await anext(each)
        waiting = asyncio.ensure_future(anext(each))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert await asyncio.to_thread(endless.ended.wait, 60)


async def test_unusable_input_raises_before_sending(client: Client, peer: Talking) -> None:
    with pytest.raises(TypeError, match="input 'x'"):
        await collected(client, {"x": np.array([1j])})
    assert peer.requests == []


async def test_lists_take_the_models_datatype(client: Client, peer: Talking) -> None:
    peer.takes(x=("INT8", [-1]))
    assert [each.datatypes for each in await collected(client, {"x": [1]})] == [{"x": "INT8"}] * 2


async def test_contradictory_answer_raises_response_error(client: Client, peer: Talking) -> None:
    def short(request: pb.ModelInferRequest, context: grpc.ServicerContext) -> Iterator[pb.ModelStreamInferResponse]:
        message = answer(request)
        message.infer_response.raw_output_contents[0] = b"\0"
        yield message

    peer.script = short
    with pytest.raises(ResponseError, match="output 'x'"):
        await collected(client)


@pytest.mark.parametrize("kind", [InferenceClient, AsyncInferenceClient])
async def test_answer_that_cannot_be_parsed_raises_internal(kind: type[Any]) -> None:
    with serving_bytes(b"\xff\xff") as target:
        client = kind(target)
        with pytest.raises(Internal, match="Exception deserializing response!"):
            await collected(client)
        await close(client)
