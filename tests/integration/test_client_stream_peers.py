"""The asyncio client's streams to other servers: those that aren't ours, have no room, or end the stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from paceline.clients import AsyncInferenceClient, InferenceError, PermissionDenied, Unavailable
from paceline.protos import inference_pb2 as pb
from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceServicer, add_GRPCInferenceServiceServicer_to_server
from tests.integration.scripted import marked
from tests.polling import eventually_async
from tests.unit.clients.peer import serving_bytes


@asynccontextmanager
async def peer(servicer: GRPCInferenceServiceServicer) -> AsyncIterator[AsyncInferenceClient]:
    """A client of `servicer`, a server that isn't ours."""
    server = grpc.aio.server()
    add_GRPCInferenceServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with AsyncInferenceClient(f"127.0.0.1:{port}", transport="stream", timeout_s=20) as client:
        yield client
    await server.stop(None)


class Foreign(GRPCInferenceServiceServicer):
    """A server without our extensions: errors are only texts, and after three answers it ends the stream."""

    async def ModelStreamInfer(self, requests: Any, context: Any) -> AsyncIterator[pb.ModelStreamInferResponse]:
        for _ in range(3):
            request = await anext(requests)
            answer = pb.ModelStreamInferResponse(error_message="no such thing" if request.model_name == "bad" else "")
            answer.infer_response.id = request.id
            answer.infer_response.model_name = request.model_name
            yield answer


class Pairing(GRPCInferenceServiceServicer):
    """A server that answers requests in pairs, the later one first, and records the ids that it gets."""

    def __init__(self) -> None:
        self.ids: list[str] = []

    async def ModelStreamInfer(self, requests: Any, context: Any) -> AsyncIterator[pb.ModelStreamInferResponse]:
        async for first in requests:
            second = await anext(requests)
            self.ids += [first.id, second.id]
            for request in (second, first):
                answer = pb.ModelStreamInferResponse()
                answer.infer_response.id = request.id
                answer.infer_response.model_name = request.model_name
                yield answer


class EndsStream(GRPCInferenceServiceServicer):
    """A server that reads one request and ends the stream without an answer."""

    async def ModelStreamInfer(self, requests: Any, context: Any) -> AsyncIterator[pb.ModelStreamInferResponse]:
        await anext(requests)
        return
        yield


class Refusing(GRPCInferenceServiceServicer):
    """A server that permits nobody to open a stream."""

    async def ModelStreamInfer(self, requests: Any, context: Any) -> AsyncIterator[pb.ModelStreamInferResponse]:
        await context.abort(grpc.StatusCode.PERMISSION_DENIED, "not you")
        yield


class Stopping(GRPCInferenceServiceServicer):
    """Servers behind one address, one for each stream. The first `stopping` of them are stopping and refuse requests,
    but the very first one has accepted a request before, which it answers after it has refused another one."""

    def __init__(self, stopping: int) -> None:
        self.streams = 0
        self.has_begun = asyncio.Event()
        self._stopping = stopping

    async def ModelStreamInfer(self, requests: Any, context: Any) -> AsyncIterator[pb.ModelStreamInferResponse]:
        self.streams += 1
        stops, held = self.streams <= self._stopping, None
        if self.streams == 1:
            held = await anext(requests)
            self.has_begun.set()
        async for request in requests:
            answer = pb.ModelStreamInferResponse(error_message="the server is stopping" if stops else "")
            answer.infer_response.id = request.id
            if stops:
                answer.infer_response.parameters["paceline_status"].string_param = "UNAVAILABLE"
            yield answer
            if held is not None:
                yield pb.ModelStreamInferResponse(infer_response=pb.ModelInferResponse(id=held.id))
                held = None


class Full(GRPCInferenceServiceServicer):
    """A server that has no room for streams, and records the calls that it gets."""

    def __init__(self) -> None:
        self.calls: list[pb.ModelInferRequest] = []

    async def ModelStreamInfer(self, requests: Any, context: Any) -> AsyncIterator[pb.ModelStreamInferResponse]:
        await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no more streams")
        yield

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Any) -> pb.ModelInferResponse:
        self.calls.append(request)
        return pb.ModelInferResponse(model_name=request.model_name, id=request.id)


async def test_infer_over_streams_refused_by_a_stopping_server_goes_to_another() -> None:
    servers = Stopping(1)
    async with peer(servers) as client:
        held = asyncio.create_task(client.infer("m", {"a": marked(1)}, request_id="held"))
        await servers.has_begun.wait()
        for number in range(3):
            assert (await client.infer("m", {"a": marked(1)}, request_id=f"{number}")).id == f"{number}"
        assert (await held).id == "held"
    assert servers.streams == 2


async def test_infer_over_streams_refused_by_two_stopping_servers_is_unavailable() -> None:
    servers = Stopping(9)
    async with peer(servers) as client:
        held = asyncio.create_task(client.infer("m", {"a": marked(1)}, request_id="held"))
        await servers.has_begun.wait()
        with pytest.raises(Unavailable, match="the server is stopping"):
            await client.infer("m", {"a": marked(1)})
        assert (await held).id == "held"
    assert servers.streams == 2


@pytest.mark.parametrize("parameters", [{}, {"paceline_unordered": False, "paceline_deadline_us": 30_000_000, "a": 1}])
async def test_infer_over_streams_without_room_sends_unchanged_requests_as_calls(parameters: Any) -> None:
    full = Full()
    async with peer(full) as client:
        result = await client.infer("m", {"a": marked(1)}, request_id="mine", parameters=parameters)
    assert (result.id, full.calls[0].id) == ("mine", "mine")
    sent = full.calls[0].parameters
    assert {name: getattr(value, value.WhichOneof("parameter_choice")) for name, value in sent.items()} == parameters


async def test_broken_answer_fails_all_who_wait_on_the_stream() -> None:
    with serving_bytes(b"\xff\xff") as target:
        async with AsyncInferenceClient(target, transport="stream", timeout_s=None) as client:
            for _ in range(2):  # the second time, no broken stream may be used
                calls = (client.infer("m", {"a": marked(1)}) for _ in range(40))
                answers = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 20)
                assert {str(one) for one in answers} == {"INTERNAL: Exception deserializing response!"}


async def test_infer_over_streams_of_a_foreign_server_gets_answers_and_errors_without_status() -> None:
    async with peer(Foreign()) as client:
        for _ in range(20):
            for _ in range(2):
                assert (await client.infer("m", {"a": marked(1)}, request_id="mine")).id == "mine"
            with pytest.raises(InferenceError, match="no such thing") as caught:
                await client.infer("bad", {"a": marked(1)})
            assert caught.value.status is grpc.StatusCode.UNKNOWN
            assert client._streams is not None
            streams = client._streams._streams
            await eventually_async(lambda: all(stream.ended for stream in streams), "its end")  # noqa: B023


@pytest.mark.parametrize("request_id", ["mine", "grün/7", "7", "7:x", "x" * 5000])
async def test_request_id_may_be_used_twice_over_streams(request_id: str) -> None:
    pairing = Pairing()
    async with peer(pairing) as client:
        # Twice as many as there are streams, so that each has two at once.
        asking = [client.infer(f"m{number}", {"a": marked(1)}, request_id=request_id) for number in range(32)]
        results = await asyncio.gather(*asking)
    assert [(result.model_name, result.id) for result in results] == [(f"m{n}", request_id) for n in range(32)]
    assert sorted(pairing.ids) == sorted([f"1:{request_id}", f"2:{request_id}"] * 16)


async def test_infer_over_streams_that_end_without_an_answer_are_unavailable() -> None:
    async with peer(EndsStream()) as client:
        for _ in range(20):
            with pytest.raises(Unavailable, match="the server ended the stream"):
                await client.infer("m", {"a": marked(1)})


async def test_infer_over_streams_refused_during_a_write_reports_the_servers_reason() -> None:
    """grpc.aio reports an "internal error" to a writer whose stream has ended, and forgets the status that ended it."""
    outcomes: list[object] = []
    for _ in range(20):
        async with peer(Refusing()) as client:
            outcomes += await asyncio.gather(
                *(client.infer("m", {"a": marked(mark)}) for mark in range(80)), return_exceptions=True
            )
    assert {(type(each), getattr(each, "message", each)) for each in outcomes} == {(PermissionDenied, "not you")}
