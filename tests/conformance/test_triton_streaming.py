"""NVIDIA's client over streams, blocking and asyncio: answers in order, errors among them, and the ways to stop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.grpc.aio
from tritonclient.utils import InferenceServerException

from tests.conformance import zoo
from tests.conformance.triton import Callbacks, assert_same_bits, outputs_of, tensors, wait_for_queued
from tests.harness import ServerProcess

PATIENT = {"INPUT0": np.ones((1, 16), np.float32)}


def filled(number: int, rows: int = 1) -> dict[str, Any]:
    return {name: np.full((rows, 16), number, np.int32) for name in ("INPUT0", "INPUT1")}


@pytest.fixture
def client(server: ServerProcess) -> Iterator[tritonclient.grpc.InferenceServerClient]:
    with tritonclient.grpc.InferenceServerClient(server.target) as made:
        yield made


@pytest.fixture
async def aio(server: ServerProcess) -> AsyncIterator[tritonclient.grpc.aio.InferenceServerClient]:
    async with tritonclient.grpc.aio.InferenceServerClient(server.target) as made:
        yield made


# ---- Blocking --------------------------------------------------------------------------------------------------------


def test_stream_answers_come_in_order_and_say_that_they_are_final(
    client: tritonclient.grpc.InferenceServerClient,
) -> None:
    called = Callbacks()
    client.start_stream(called)
    for number in range(200):
        client.async_stream_infer("simple", tensors(filled(number, 1 + number % 3)), request_id=str(number))
    for number in range(200):
        result, error = called.next()
        assert error is None
        response = result.get_response()
        assert (response.id, response.model_name, response.model_version) == (str(number), "simple", "1")
        assert response.parameters["triton_final_response"].bool_param
        assert_same_bits(outputs_of(result), zoo.answer("simple", filled(number, 1 + number % 3)))
    client.stop_stream()
    assert called.none_yet


def test_stream_stopped_without_cancelling_answers_earlier_requests(
    client: tritonclient.grpc.InferenceServerClient,
) -> None:
    called = Callbacks()
    client.start_stream(called)
    for number in range(50):
        client.async_stream_infer("simple", tensors(filled(number)))
    client.stop_stream()
    for number in range(50):
        result, error = called.next()
        assert error is None
        assert_same_bits(outputs_of(result), zoo.answer("simple", filled(number)))
    assert called.none_yet


def test_stream_stopped_with_cancelling_takes_its_requests_out_of_the_queue(
    client: tritonclient.grpc.InferenceServerClient, server: ServerProcess
) -> None:
    called = Callbacks()
    client.start_stream(called)
    for _ in range(3):
        client.async_stream_infer("patient", tensors(PATIENT))
    wait_for_queued(server, "patient", 3)
    client.stop_stream(cancel_requests=True)
    result, error = called.next()
    assert (result, error.status()) == (None, "StatusCode.CANCELLED")
    wait_for_queued(server, "patient", 0)


def start_stream_with_request(client: tritonclient.grpc.InferenceServerClient, called: Callbacks) -> None:
    """Start a stream that ends soon after its first request was sent."""
    inputs, timeout_s = tensors(PATIENT), 0.3
    while True:
        client.start_stream(called, stream_timeout=timeout_s)
        try:
            return client.async_stream_infer("patient", inputs)
        except InferenceServerException:  # it has ended already
            client.stop_stream()
            while not called.none_yet:
                called.next()
            timeout_s *= 2


def test_stream_timeout_removes_its_requests_from_the_queue(
    client: tritonclient.grpc.InferenceServerClient, server: ServerProcess
) -> None:
    called = Callbacks()
    start_stream_with_request(client, called)
    result, error = called.next()
    while error.status() is None:  # the request's own error, in the stream
        result, error = called.next()
    assert (result, error.status()) == (None, "StatusCode.DEADLINE_EXCEEDED")
    wait_for_queued(server, "patient", 0)


def test_stream_stays_open_after_a_requests_error(client: tritonclient.grpc.InferenceServerClient) -> None:
    called = Callbacks()
    client.start_stream(called)
    client.async_stream_infer("simple", tensors(filled(1)))
    client.async_stream_infer("nosuch", tensors(filled(2)))
    client.async_stream_infer("simple", tensors({"INPUT0": np.ones((1, 16), np.int32)}))
    client.async_stream_infer("simple", tensors(filled(3)))
    outcomes = [called.next() for _ in range(4)]
    assert [error is None for _, error in outcomes] == [True, False, False, True]
    assert "'nosuch'" in outcomes[1][1].message()
    assert "INPUT1" in outcomes[2][1].message()
    assert_same_bits(outputs_of(outcomes[3][0]), zoo.answer("simple", filled(3)))
    client.stop_stream()


def test_stream_ends_at_the_first_error_with_its_status_on_request(
    client: tritonclient.grpc.InferenceServerClient,
) -> None:
    called = Callbacks()
    client.start_stream(called, headers={"triton_grpc_error": "true"})
    client.async_stream_infer("simple", tensors(filled(1)))
    client.async_stream_infer("nosuch", tensors(filled(2)))
    _, error = called.next()
    assert error is None
    result, error = called.next()
    assert (result, error.status()) == (None, "StatusCode.NOT_FOUND")
    assert "'nosuch'" in error.message()
    client.stop_stream()


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_compressed_stream_gives_the_same_answers(
    client: tritonclient.grpc.InferenceServerClient, algorithm: str
) -> None:
    called = Callbacks()
    client.start_stream(called, compression_algorithm=algorithm)
    client.async_stream_infer("simple", tensors(filled(5, 32)))
    result, error = called.next()
    assert error is None
    assert_same_bits(outputs_of(result), zoo.answer("simple", filled(5, 32)))
    client.stop_stream()


@pytest.mark.parametrize(
    "options",
    [
        {"enable_empty_final_response": True},
        {"sequence_id": 7, "sequence_start": True, "sequence_end": True},
        {"sequence_id": "seven", "sequence_start": True},
        {"priority": 2, "timeout": 10_000_000},
        {"parameters": {"text": "x", "number": 1, "flag": True}},
    ],
    ids=lambda options: "-".join(options),
)
def test_stream_options_of_the_client_leave_the_answer_unchanged(
    client: tritonclient.grpc.InferenceServerClient, options: dict[str, Any]
) -> None:
    called = Callbacks()
    client.start_stream(called)
    client.async_stream_infer("simple", tensors(filled(5)), **options)
    result, error = called.next()
    assert error is None
    assert_same_bits(outputs_of(result), zoo.answer("simple", filled(5)))
    client.stop_stream()
    assert called.none_yet


# ---- asyncio ---------------------------------------------------------------------------------------------------------


async def requests(*each: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    for one in each:
        yield one


def simple(number: int, model: str = "simple") -> dict[str, Any]:
    return {"model_name": model, "inputs": tensors(filled(number)), "request_id": str(number)}


async def test_aio_stream_answers_come_in_order_with_errors_in_their_place(
    aio: tritonclient.grpc.aio.InferenceServerClient,
) -> None:
    sent = [simple(number, "nosuch" if number == 7 else "simple") for number in range(20)]
    number = 0
    async for result, error in aio.stream_infer(requests(*sent)):
        if number == 7:
            assert "'nosuch'" in error.message()
        else:
            assert (error, result.get_response().id) == (None, str(number))
            assert_same_bits(outputs_of(result), zoo.answer("simple", filled(number)))
        number += 1
    assert number == 20


async def test_aio_stream_cancelled_removes_its_requests_from_the_queue(
    aio: tritonclient.grpc.aio.InferenceServerClient, server: ServerProcess
) -> None:
    patient = {"model_name": "patient", "inputs": tensors(PATIENT)}
    stream = aio.stream_infer(requests(patient, patient))

    async def read() -> None:
        async for _ in stream:
            pass

    reading = asyncio.create_task(read())
    await asyncio.to_thread(wait_for_queued, server, "patient", 2)
    stream.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await asyncio.to_thread(wait_for_queued, server, "patient", 0)


async def test_aio_stream_ends_at_the_first_error_with_its_status_on_request(
    aio: tritonclient.grpc.aio.InferenceServerClient,
) -> None:
    async def one_and_no_end() -> AsyncIterator[dict[str, Any]]:
        yield simple(1, "nosuch")
        # grpc.aio reports INTERNAL if it is writing just as the stream ends.
        await asyncio.Event().wait()

    stream = aio.stream_infer(one_and_no_end(), headers={"triton_grpc_error": "true"})
    with pytest.raises(grpc.aio.AioRpcError, match="'nosuch'") as raised:
        async for _ in stream:
            pass
    assert raised.value.code() is grpc.StatusCode.NOT_FOUND
