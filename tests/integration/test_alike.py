"""Requests that arrive together, most of them alike: they are started together and answered together, each as it would
be alone. Without gRPC in front, which would influence what arrives together."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from paceline.backends.errors import ExecutionError
from paceline.backends.spec import ModelSpec, Tensors, TensorSpec
from paceline.protos import inference_pb2 as pb
from paceline.scheduler.errors import QueueFull
from paceline.scheduler.waiting import SharedQueueLimits
from paceline.server.codec.wire_request import AnyMessage, RequestReader, WireRequest
from paceline.server.errors import InvalidRequest
from paceline.server.models.load_queue import LoadQueue
from paceline.server.models.repository import Repository
from paceline.server.requests.inference import Inference
from paceline.server.rpc.handlers import serialized
from paceline.server.telemetry.metrics import Metrics
from tests.integration.scripted import Script, mark_of, request, totals
from tests.integration.serving import Served, serving, write_model
from tests.integration.without_grpc import Context, called
from tests.memory_models import MemoryBackend, MemoryModel
from tests.unit.server.found import find_models

TEXT = "max_batch_size: 32 dynamic_batching { }"


@pytest.fixture
def script() -> Script:
    return Script()


class Sender:
    """Sends requests in the form in which they are read from the wire, which depends on earlier ones like them."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.read = RequestReader()

    def of(self, mark: float, request_id: str = "", columns: int = 2, **parameters: int) -> AnyMessage:
        message = request(mark, columns=columns)
        message.id = request_id
        for name, value in parameters.items():
            message.parameters[name].int64_param = value
        read = self.read(message.SerializeToString())
        assert not isinstance(read, Exception)
        return read

    async def learn(self, *requests: AnyMessage) -> None:
        """Send requests like these often enough for the next ones to take the short way."""
        for _ in range(3):
            for one in requests:
                await called(self.served.server.inference, one)

    async def stream(self, *requests: AnyMessage | Exception) -> list[pb.ModelStreamInferResponse]:
        context = Context(requests)
        await self.served.server._streaming.ModelStreamInfer(None, context)
        return context.written


def _marks(answers: list[pb.ModelStreamInferResponse]) -> list[tuple[str, float]]:
    return [(one.infer_response.id, mark_of(one.infer_response)) for one in answers]


async def test_each_request_gets_its_own_answer(tmp_path: Path, script: Script) -> None:
    async with serving(tmp_path, {"m": script.model}, config=TEXT) as served:
        sender = Sender(served)
        # Requests are alike whatever the lengths of their ids.
        names = ["", "a", "bb", "id of some length", "a", "\N{SNOWMAN}", "bb", ""]
        await sender.learn(*(sender.of(0, name) for name in names))
        script.seen.clear()
        requests = [sender.of(number, name) for number, name in enumerate(names)]
        assert all(isinstance(one, WireRequest) for one in requests)
        answers = await sender.stream(*requests)
        assert _marks(answers) == [(name, number) for number, name in enumerate(names)]
        assert script.seen == [[float(number) for number in range(len(names))]]
        assert totals(await served.metrics())["success"] == 3 * len(names) + len(names)


async def test_unlike_requests_in_between_are_answered_as_usual_and_in_order(tmp_path: Path, script: Script) -> None:
    async with serving(tmp_path, {"m": script.model}, config=TEXT) as served:
        sender = Sender(served)
        await sender.learn(sender.of(0), sender.of(0, columns=3))
        unknown = request(9)
        unknown.inputs[0].name = "nosuch"
        requests = [
            sender.of(1),
            sender.of(2),
            sender.of(3, columns=3),  # another lane
            unknown,
            sender.of(4),
            request(5),  # parsed
            sender.of(6, priority=1),  # another head
            sender.of(7),
            sender.of(8),
        ]
        answers = await sender.stream(*requests)
        told = [one.error_message[:40] or mark_of(one.infer_response) for one in answers]
        assert told == [1, 2, 3, "model 'm': unexpected input 'nosuch', ex", 4, 5, 6, 7, 8]


async def test_each_request_is_counted_with_the_time_it_took(tmp_path: Path, script: Script) -> None:
    async with serving(tmp_path, {"m": script.model}, config=TEXT) as served:
        sender = Sender(served)
        await sender.learn(sender.of(0))
        counted = served.server.repository.get("m", "").statistics.requests
        before, before_ns, began_ns = counted.count, counted.total_ns, time.monotonic_ns()
        await sender.stream(*(sender.of(mark) for mark in range(8)))
        assert counted.count == before + 8
        assert 0 < counted.total_ns - before_ns <= 8 * (time.monotonic_ns() - began_ns)


async def test_each_failed_request_is_counted_with_the_time_it_took(tmp_path: Path, script: Script) -> None:
    script.errors[9.0] = ExecutionError("no")
    async with serving(tmp_path, {"m": script.model}, config=TEXT) as served:
        began_ns = time.monotonic_ns()
        await Sender(served).stream(request(9), request(9))
        statistics = served.server.repository.get("m", "").statistics
        assert statistics.failed == 2
        assert 0 < statistics.failure_ns <= 2 * (time.monotonic_ns() - began_ns)


async def test_requests_processed_together_are_reshaped_for_the_model(tmp_path: Path) -> None:
    tensors = """
        input { name: "a" data_type: TYPE_FP32 dims: [ 2 ] reshape { shape: [ 1, 2 ] } }
        output { name: "x" data_type: TYPE_FP32 dims: [ -1, -1 ] }
    """
    tensor = TensorSpec("a", "FP32", (-1, -1, -1))
    shapes: list[tuple[int, ...]] = []

    def compute(inputs: Tensors) -> Tensors:
        shapes.append(inputs[0].shape)
        return inputs

    model = MemoryModel(ModelSpec((tensor,), (replace(tensor, name="x"),)), compute)
    async with serving(tmp_path, {"m": model}, config=TEXT + tensors) as served:
        sender = Sender(served)
        await sender.learn(sender.of(0))
        shapes.clear()
        answers = await sender.stream(*(sender.of(mark) for mark in range(4)))
        assert [mark for _, mark in _marks(answers)] == [0, 1, 2, 3]
        assert shapes == [(4, 1, 2)]


async def test_calls_and_streams_share_batches_and_each_gets_answers_of_its_kind(
    tmp_path: Path, script: Script
) -> None:
    async with serving(tmp_path, {"m": script.model}, config=TEXT) as served:
        sender = Sender(served)
        await sender.learn(sender.of(0))
        await sender.stream(*(sender.of(0) for _ in range(8)))  # so that the batcher waits for more requests
        script.seen.clear()
        calls = [asyncio.create_task(called(served.server.inference, sender.of(mark))) for mark in range(3)]
        answers = await sender.stream(*(sender.of(mark) for mark in range(3, 6)))
        assert [mark for _, mark in _marks(answers)] == [3, 4, 5]
        for mark, call in enumerate(calls):
            assert mark_of(pb.ModelInferResponse.FromString(serialized(await call))) == mark
        assert len(script.seen) == 1


async def test_only_requests_that_do_not_fit_into_the_queue_are_refused(tmp_path: Path, script: Script) -> None:
    text = "max_batch_size: 32 dynamic_batching { default_queue_policy { max_queue_size: 3 } }"
    async with serving(tmp_path, {"m": script.model}, config=text) as served:
        sender = Sender(served)
        await sender.learn(sender.of(0))
        answers = await sender.stream(*(sender.of(mark) for mark in range(6)))
        statuses = [one.infer_response.parameters["paceline_status"].string_param for one in answers]
        assert statuses == ["", "", "", *["RESOURCE_EXHAUSTED"] * 3]
        assert [mark for _, mark in _marks(answers[:3])] == [0, 1, 2]


async def test_request_at_fault_in_a_failed_batch_fails_alone(tmp_path: Path, script: Script) -> None:
    async with serving(tmp_path, {"m": script.model}, config=TEXT) as served:
        sender = Sender(served)
        await sender.learn(sender.of(0))
        script.errors[4.0] = ExecutionError("no fours")
        answers = await sender.stream(*(sender.of(mark) for mark in range(8)))
        told = ["no fours" in one.error_message or mark_of(one.infer_response) for one in answers]
        assert told == [0, 1, 2, 3, True, 5, 6, 7]
        counted = totals(await served.metrics())
        assert (counted["success"], counted["BACKEND"]) == (3 + 7, 1)


async def test_passed_deadline_fails_only_its_own_request(tmp_path: Path, script: Script) -> None:
    async with serving(tmp_path, {"m": script.model}, config=TEXT) as served:
        sender = Sender(served)
        await sender.learn(sender.of(0))
        await sender.stream(*(sender.of(0) for _ in range(8)))
        inference = served.server.inference
        calls = [called(inference, sender.of(mark), None if mark % 2 else 0.0) for mark in range(6)]
        done = await asyncio.gather(*calls, return_exceptions=True)
        for mark, answer in enumerate(done):
            if mark % 2:
                assert not isinstance(answer, BaseException)
                assert mark_of(pb.ModelInferResponse.FromString(serialized(answer))) == mark
            else:
                assert isinstance(answer, Exception)
                assert not isinstance(answer, InvalidRequest | grpc.RpcError)


async def test_cancelled_requests_are_not_executed_and_the_others_are(tmp_path: Path, script: Script) -> None:
    async with serving(tmp_path, {"m": script.model}, config=TEXT) as served:
        sender = Sender(served)
        await sender.learn(sender.of(0))
        await sender.stream(*(sender.of(0) for _ in range(8)))  # so that the batcher waits for more requests
        script.seen.clear()
        calls = [asyncio.create_task(called(served.server.inference, sender.of(mark))) for mark in range(6)]
        await asyncio.sleep(0)
        calls[1].cancel()
        calls[4].cancel()
        await asyncio.wait(calls)
        assert [call.cancelled() for call in calls] == [False, True, False, False, True, False]
        assert script.seen == [[0.0, 2.0, 3.0, 5.0]]


class LimitsWithoutMemory(SharedQueueLimits):
    """Limits whose check fails for lack of memory when several requests are checked together."""

    def full(self, requests: int, size_bytes: int) -> QueueFull | None:
        if requests > 1:
            raise MemoryError
        return super().full(requests, size_bytes)


async def test_requests_that_cannot_be_submitted_together_are_submitted_one_by_one(
    tmp_path: Path, script: Script, caplog: pytest.LogCaptureFixture
) -> None:
    room = LimitsWithoutMemory(0, 0)
    repository = Repository(Metrics(), LoadQueue(lambda name: MemoryBackend({"m": script.model})), shared_limits=room)
    write_model(tmp_path, "m", TEXT)
    await repository.load_all(find_models([tmp_path]))
    inference, read = Inference(repository), RequestReader()
    inference.serving = True

    def of(mark: float) -> AnyMessage:
        one = read(request(mark).SerializeToString())
        assert not isinstance(one, Exception)
        return one

    for _ in range(3):
        await called(inference, of(0))
    script.seen.clear()
    answers = await asyncio.gather(*(called(inference, of(mark)) for mark in (1, 2, 3)))
    logged = [one for one in caplog.records if one.levelno >= logging.WARNING and one.name.startswith("paceline.")]
    assert [one.getMessage() for one in logged] == ["submitting requests together failed; submitting them one by one"]
    assert [mark_of(pb.ModelInferResponse.FromString(serialized(one))) for one in answers] == [1, 2, 3]
    assert script.seen == [[1, 2, 3]]
    model = repository.get("m", "")
    assert (model.statistics.requests.count, model.statistics.failed) == (6, 0)
    assert (model.batcher.waiting_requests, room.requests, room.size_bytes) == (0, 0, 0)
    await repository.stop()
