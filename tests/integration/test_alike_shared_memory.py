"""Requests that arrive together with their tensors in shared memory, where each client has its own region."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest

from paceline.protos import inference_pb2 as pb
from paceline.server.codec.wire_request import RequestReader, WireRequest
from paceline.server.limits import Limits
from tests.integration.regions import ROW, in_region, register, settings, unregister
from tests.integration.scripted import Script, mark_of, totals
from tests.integration.serving import Served, serving
from tests.integration.without_grpc import Context
from tests.polling import eventually_async
from tests.shared_objects import SharedObject, held_by, request_shared_output, shared_object
from tests.wire import infer

CLIENTS = 6
TARGET = 64
TEXT = "max_batch_size: 32 dynamic_batching { }"


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def memories() -> Iterator[list[SharedObject]]:
    with ExitStack() as stack:
        yield [stack.enter_context(shared_object(4096)) for _ in range(CLIENTS)]


@pytest.fixture
async def served(tmp_path: Path, script: Script, memories: list[SharedObject]) -> AsyncIterator[Served]:
    async with serving(tmp_path, {"m": script.model}, config=TEXT, settings=settings(tmp_path)) as served:
        for number, memory in enumerate(memories):
            memory.put(np.full(2, number, np.float32))
            await register(served, f"r{number}", memory.key, 4096)
        yield served


class Clients:
    """Clients that send, all at once and on one stream, requests like those that they have sent before."""

    def __init__(self, served: Served) -> None:
        self.served = served
        self.read = RequestReader()

    def request(self, number: int, target: int | None = TARGET) -> WireRequest:
        message = in_region(region=f"r{number}", target=target)
        message.id = str(number)
        return self.wire(message)

    def wire(self, message: pb.ModelInferRequest) -> WireRequest:
        read = [self.read(message.SerializeToString()) for _ in range(3)][-1]
        assert isinstance(read, WireRequest)
        return read

    async def send(self, *requests: WireRequest) -> list[pb.ModelStreamInferResponse]:
        context = Context(requests)
        await self.served.server._streaming.ModelStreamInfer(None, context)
        assert [one.infer_response.id for one in context.written] == [one.id for one in requests]
        return context.written

    async def known(self) -> Sequence[WireRequest]:
        """A request of each client, sent often enough before to take the short way."""
        requests = [self.request(number) for number in range(CLIENTS)]
        for _ in range(3):
            await self.send(*requests)
        return requests


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the garbage collector: what is released is freed at once, or stays."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _got(memory: SharedObject) -> list[float]:
    return np.frombuffer(memory.get(ROW, TARGET), np.float32).tolist()


async def test_each_result_is_written_where_its_client_wants_it(
    served: Served, script: Script, memories: list[SharedObject]
) -> None:
    clients = Clients(served)
    requests = await clients.known()
    for number, memory in enumerate(memories):
        memory.put(np.full(2, 10 + number, np.float32))
    script.seen.clear()
    answers = await clients.send(*requests)
    assert script.seen == [[10.0 + number for number in range(CLIENTS)]]
    assert [_got(memory) for memory in memories] == [[10.0 + number] * 2 for number in range(CLIENTS)]
    for number, answer in enumerate(answers):
        (output,) = answer.infer_response.outputs
        assert output.parameters["shared_memory_region"].string_param == f"r{number}"
        assert not any(answer.infer_response.raw_output_contents)
    assert totals(await served.metrics())["success"] == 4 * CLIENTS


async def test_some_results_are_requested_in_the_response(
    served: Served, script: Script, memories: list[SharedObject]
) -> None:
    clients = Clients(served)
    requests = [clients.request(number, TARGET if number % 2 else None) for number in range(CLIENTS)]
    for _ in range(3):
        answers = await clients.send(*requests)
    assert script.seen[-1] == [float(number) for number in range(CLIENTS)]
    for number, answer in enumerate(answers):
        if number % 2:
            assert _got(memories[number]) == [number] * 2
        else:
            assert mark_of(answer.infer_response) == number
            assert _got(memories[number]) == [0, 0]


async def test_request_whose_region_is_gone_fails_alone(
    served: Served, script: Script, memories: list[SharedObject]
) -> None:
    clients = Clients(served)
    requests = await clients.known()
    await unregister(served, "r2")
    memories[4].resize(0)
    script.seen.clear()
    told = [answer.error_message for answer in await clients.send(*requests)]
    assert [bool(text) for text in told] == [False, False, True, False, True, False]
    assert "Unable to find shared memory region: 'r2'" in told[2]
    assert "shared memory region 'r4'" in told[4]
    assert script.seen == [[0.0, 1.0, 3.0, 5.0]]


async def test_request_whose_memory_vanishes_during_execution_fails_alone(
    served: Served, script: Script, memories: list[SharedObject]
) -> None:
    clients = Clients(served)
    requests = await clients.known()
    for memory in memories:
        memory.put(bytes(ROW), TARGET)
    gate = script.hold(3.0)
    sending = asyncio.create_task(clients.send(*requests))
    await eventually_async(lambda: gate.entered, "the batch executes")
    memories[4].resize(TARGET)
    gate.open()
    told = [answer.error_message for answer in await sending]
    assert [bool(text) for text in told] == [number == 4 for number in range(CLIENTS)]
    assert "shared memory region 'r4'" in told[4]
    assert [_got(memory) for number, memory in enumerate(memories) if number != 4] == [[n] * 2 for n in (0, 1, 2, 3, 5)]
    assert totals(await served.metrics())["success"] == 4 * CLIENTS - 1


async def test_requests_in_one_region_all_fail_when_its_memory_is_gone(
    served: Served, script: Script, memories: list[SharedObject]
) -> None:
    clients = Clients(served)
    requests = [clients.request(1) for _ in range(CLIENTS)]
    for _ in range(3):
        await clients.send(*requests)
    memories[1].resize(0)
    assert all("shared memory region 'r1'" in answer.error_message for answer in await clients.send(*requests))


async def test_name_registered_again_means_the_new_region(
    served: Served, script: Script, memories: list[SharedObject]
) -> None:
    clients = Clients(served)
    requests = await clients.known()
    await unregister(served, "r0")
    await register(served, "r0", memories[5].key, 4096)
    script.seen.clear()
    await clients.send(*requests)
    assert script.seen == [[5.0, 1.0, 2.0, 3.0, 4.0, 5.0]]


async def test_inputs_in_messages_and_results_in_shared_memory(
    served: Served, script: Script, memories: list[SharedObject]
) -> None:
    clients = Clients(served)
    messages = [infer("m", {"a": np.full((1, 2), 20 + number, np.float32)}) for number in range(CLIENTS)]
    for number, message in enumerate(messages):
        request_shared_output(message, "x", f"r{number}", ROW, TARGET)
    requests = [clients.wire(message) for message in messages]
    for _ in range(3):
        answers = await clients.send(*requests)
    assert script.seen[-1] == [20.0 + number for number in range(CLIENTS)]
    assert [_got(memory) for memory in memories] == [[20.0 + number] * 2 for number in range(CLIENTS)]
    assert not any(content for answer in answers for content in answer.infer_response.raw_output_contents)


async def test_regions_unregistered_during_execution_are_kept_until_the_answers_are_sent(
    served: Served, script: Script, memories: list[SharedObject]
) -> None:
    clients = Clients(served)
    requests = await clients.known()
    for memory in memories:
        memory.put(bytes(ROW), TARGET)
    gate = script.hold(3.0)
    with uncollected():
        sending = asyncio.create_task(clients.send(*requests))
        await eventually_async(lambda: gate.entered, "the batch executes")
        await unregister(served)
        gate.open()
        await sending
        assert [_got(memory) for memory in memories] == [[number] * 2 for number in range(CLIENTS)]
        await eventually_async(lambda: held_by() == (CLIENTS, 0), "nothing is held but by the clients")


async def test_refused_request_keeps_no_clients_memory(
    tmp_path: Path, script: Script, memories: list[SharedObject]
) -> None:
    text = "max_batch_size: 32 dynamic_batching { default_queue_policy { max_queue_size: 5 } }"
    async with serving(tmp_path, {"m": script.model}, config=text, settings=settings(tmp_path)) as served:
        for number, memory in enumerate(memories):
            await register(served, f"r{number}", memory.key, 4096)
        clients = Clients(served)
        requests = [clients.request(number) for number in range(CLIENTS)]
        for _ in range(3):
            for one in requests:
                await clients.send(one)
        with uncollected():
            answers = await clients.send(*requests)
            assert [bool(answer.error_message) for answer in answers] == [False] * 5 + [True]
            await unregister(served)
            await eventually_async(lambda: held_by() == (CLIENTS, 0), "nothing is held but by the clients")


async def test_requests_submitted_together_count_the_same_bytes_as_separately(
    tmp_path: Path, script: Script, memories: list[SharedObject]
) -> None:
    options = settings(tmp_path, limits=Limits(queued_bytes=4 * ROW))
    async with serving(tmp_path, {"m": script.model}, config=TEXT, settings=options) as served:
        for number, memory in enumerate(memories):
            await register(served, f"r{number}", memory.key, 4096)
        clients = Clients(served)
        requests = [clients.request(number) for number in range(CLIENTS)]
        for _ in range(3):
            for one in requests:
                await clients.send(one)
        statuses = [
            answer.infer_response.parameters["paceline_status"].string_param for answer in await clients.send(*requests)
        ]
        assert statuses == [*[""] * 4, *["RESOURCE_EXHAUSTED"] * 2]
