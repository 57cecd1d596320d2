"""Sequences of the asyncio client over streams: what is sent without waiting, and in which order everything arrives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest

from paceline.clients import AsyncInferenceClient, AsyncInferenceSequence, InferResult, SequenceLost, Unavailable
from paceline.protos import inference_pb2 as pb
from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceServicer, add_GRPCInferenceServiceServicer_to_server
from tests.polling import eventually_async
from tests.unit.clients.sequence_peer import Sums

LARGE = np.zeros(2**19, np.float32)  # of more than 1 MiB


class Summing(GRPCInferenceServiceServicer):
    """A server whose answers to the steps of a sequence wait until `may_answer`. `has_room` decides about streams."""

    def __init__(self) -> None:
        self.sums = Sums()
        self.seen: list[tuple[str, str]] = []
        self.cancelled: list[str] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.has_room = True
        self.ends_after = 1_000_000
        self.streams = 0

    def _step(self, way: str, request: pb.ModelInferRequest) -> Any:
        self.seen.append((way, request.id))
        value = memoryview(request.raw_input_contents[0]).cast("f")[0]
        request.raw_input_contents[0] = np.float32(value).tobytes()
        return self.sums.step(request)

    async def ModelInfer(self, request: pb.ModelInferRequest, context: Any) -> pb.ModelInferResponse:
        outcome = self._step("call", request)
        await self.may_answer.wait()
        assert isinstance(outcome, pb.ModelInferResponse)
        return outcome

    async def ModelStreamInfer(self, requests: Any, context: Any) -> AsyncIterator[pb.ModelStreamInferResponse]:
        if not self.has_room:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no more streams")
        self.streams += 1
        answers: asyncio.Queue[Any] = asyncio.Queue()

        async def read() -> None:
            number = self.streams
            async for request in requests:
                if request.parameters["paceline_cancel"].bool_param:
                    self.cancelled.append(request.id)
                else:
                    answers.put_nowait((request.id, self._step(f"stream {number}", request)))

        reading = asyncio.create_task(read())
        try:
            for _ in range(self.ends_after):
                own_id, outcome = await answers.get()
                await self.may_answer.wait()
                if isinstance(outcome, tuple):
                    message = pb.ModelStreamInferResponse(error_message=outcome[1])
                    message.infer_response.parameters["paceline_status"].string_param = outcome[0].name
                else:
                    message = pb.ModelStreamInferResponse(infer_response=outcome)
                message.infer_response.id = own_id
                yield message
        finally:
            reading.cancel()


@asynccontextmanager
async def summing() -> AsyncIterator[tuple[Summing, AsyncInferenceClient]]:
    server, servicer = grpc.aio.server(options=[("grpc.max_receive_message_length", -1)]), Summing()
    add_GRPCInferenceServiceServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with AsyncInferenceClient(f"127.0.0.1:{port}", transport="stream", timeout_s=30) as client:
            yield servicer, client
    finally:
        await server.stop(None)


def step(sequence: AsyncInferenceSequence, value: float, array: Any = None, **more: Any) -> asyncio.Task[InferResult]:
    """The step as a task; `value` is its id too."""
    given = np.array([value], np.float32) if array is None else array + np.float32(value)
    return asyncio.create_task(sequence.infer({"x": given}, request_id=f"{value}", **more))


async def sums_of(*steps: asyncio.Task[InferResult]) -> list[float]:
    return [float((await each)["sum"][0]) for each in steps]


async def test_steps_after_the_first_are_sent_without_waiting_for_answers() -> None:
    async with summing() as (server, client):
        sequence = client.sequence("m")
        assert await sums_of(step(sequence, 1)) == [1]
        server.may_answer.clear()
        steps = [step(sequence, value, last=value == 9) for value in range(2, 10)]
        await eventually_async(lambda: len(server.seen) == 9, "all steps at the server")
        server.may_answer.set()
        assert await sums_of(*steps) == [3, 6, 10, 15, 21, 28, 36, 45]
    assert server.sums.seen == [("S", 1), *(("", value) for value in range(2, 9)), ("E", 9)]


async def test_first_step_is_answered_before_others_are_sent() -> None:
    async with summing() as (server, client):
        server.may_answer.clear()
        sequence = client.sequence("m")
        steps = [step(sequence, value) for value in (1, 2, 3)]
        await eventually_async(lambda: len(server.seen) == 1, "the first step at the server")
        server.sums.failures = {1: grpc.StatusCode.INTERNAL}
        server.may_answer.set()
        assert await sums_of(*steps) == [1, 3, 6]
    assert [flag for flag, _ in server.sums.seen] == ["S", "", ""]


async def test_each_sequence_keeps_to_one_of_several_streams() -> None:
    async with summing() as (server, client):
        sequences = [client.sequence("m") for _ in range(8)]
        for value in range(1, 5):
            await sums_of(*(step(sequence, value) for sequence in sequences))
    # The streams give each request a number of its own, in front of the caller's id.
    ways = [way for way, own_id in server.seen if own_id.endswith(":4")]
    assert len(set(ways)) == 4
    assert sorted(way for way, own_id in server.seen if own_id.endswith(":1")) == sorted(ways)


async def test_large_step_is_a_call_in_its_turn() -> None:
    async with summing() as (server, client):
        sequence = client.sequence("m")
        await step(sequence, 1)
        server.may_answer.clear()
        steps = [step(sequence, value, LARGE if value == 3 else None) for value in (2, 3, 4)]
        await eventually_async(lambda: len(server.seen) == 2, "the second step at the server")
        server.may_answer.set()
        assert await sums_of(*steps) == [3, 6, 10]
    assert [way.split()[0] for way, _ in server.seen] == ["stream", "stream", "call", "stream"]


async def test_sequence_without_room_for_streams_is_calls_in_order() -> None:
    async with summing() as (server, client):
        server.has_room = False
        sequence = client.sequence("m")
        assert await sums_of(*(step(sequence, value) for value in range(1, 6))) == [1, 3, 6, 10, 15]
    assert {way for way, _ in server.seen} == {"call"}


async def test_sequence_goes_on_after_its_stream_ended() -> None:
    async with summing() as (server, client):
        server.ends_after = 1
        sequence = client.sequence("m")
        assert await sums_of(step(sequence, 1)) == [1]
        assert client._streams is not None
        streams = client._streams._streams
        await eventually_async(lambda: all(stream.ended for stream in streams), "the end of the stream")
        server.ends_after = 100
        assert await sums_of(*(step(sequence, value) for value in (2, 3))) == [3, 6]
    assert [way for way, _ in server.seen] == ["stream 1", "stream 2", "stream 2"]
    assert [flag for flag, _ in server.sums.seen] == ["S", "", ""]


async def test_steps_in_flight_on_a_broken_stream_are_unavailable() -> None:
    async with summing() as (server, client):
        server.ends_after = 2
        sequence = client.sequence("m")
        await step(sequence, 1)
        server.may_answer.clear()
        steps = [step(sequence, value) for value in (2, 3, 4)]
        await eventually_async(lambda: len(server.seen) == 4, "all steps at the server")
        server.may_answer.set()
        assert await sums_of(steps[0]) == [3]
        for lost in steps[1:]:
            with pytest.raises(Unavailable, match="the server ended the stream"):
                await lost
        server.ends_after = 100
        assert await sums_of(step(sequence, 5)) == [15]  # the server had executed them


async def test_steps_in_flight_are_lost_with_their_sequence() -> None:
    async with summing() as (server, client):
        sequence = client.sequence("m")
        await step(sequence, 1)
        server.sums.live.clear()
        for lost in [step(sequence, value) for value in (2, 3, 4)]:
            with pytest.raises(SequenceLost):
                await lost
        assert await sums_of(*(step(sequence, value) for value in (5, 6))) == [5, 11]
    assert [flag for flag, _ in server.sums.seen] == ["S", "", "", "", "S", ""]


async def test_cancelled_step_is_withdrawn_and_those_behind_go_on() -> None:
    async with summing() as (server, client):
        sequence = client.sequence("m")
        await step(sequence, 1)
        server.may_answer.clear()
        given_up, kept = step(sequence, 2), step(sequence, 3)
        await eventually_async(lambda: len(server.seen) == 3, "both steps at the server")
        given_up.cancel()
        await eventually_async(lambda: len(server.cancelled) == 1, "the cancellation at the server")
        server.may_answer.set()
        assert await sums_of(kept, step(sequence, 4)) == [6, 10]
    assert server.cancelled == [own_id for _, own_id in server.seen if own_id.endswith(":2")]


async def test_cancelled_step_that_waits_is_never_sent() -> None:
    async with summing() as (server, client):
        server.may_answer.clear()
        sequence = client.sequence("m")
        first, given_up, last = (step(sequence, value) for value in (1, 2, 3))
        await eventually_async(lambda: len(server.seen) == 1, "the first step at the server")
        given_up.cancel()
        server.may_answer.set()
        assert await sums_of(first, last) == [1, 4]
    assert server.sums.seen == [("S", 1), ("", 3)]


async def test_later_step_refused_by_a_stopping_server_moves_nowhere() -> None:
    async with summing() as (server, client):
        server.sums.text = "the server is stopping"
        server.sums.failures = {2: grpc.StatusCode.UNAVAILABLE}
        sequence = client.sequence("m")
        await step(sequence, 1)
        with pytest.raises(Unavailable, match="the server is stopping"):
            await step(sequence, 2)
        assert await sums_of(step(sequence, 3)) == [4]
    assert [way for way, _ in server.seen] == ["stream 1", "stream 1", "stream 1"]
