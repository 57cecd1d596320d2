"""Features of the asyncio client alone: cancellation, and an event loop that it belongs to."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import numpy as np
import pytest

from paceline.clients import AsyncInferenceClient, ClientClosed, DeadlineExceeded, Unimplemented
from paceline.protos import inference_pb2 as pb
from tests.unit.clients.peer import Peer, Stall, echo, serving

X = {"x": np.zeros((1, 2), np.float32)}


@pytest.fixture
async def client(peer: Peer) -> AsyncIterator[AsyncInferenceClient]:
    async with AsyncInferenceClient(peer.target) as opened:
        yield opened


async def test_cancelled_task_ends_the_call_at_the_server(client: AsyncInferenceClient, peer: Peer) -> None:
    peer.answer = stall = Stall()
    call = asyncio.create_task(client.infer("m", X, timeout_s=None))
    assert await asyncio.to_thread(stall.started.wait, 60)
    assert not stall.ended.is_set()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await asyncio.to_thread(stall.ended.wait, 60)
    peer.answer = echo
    assert (await client.infer("m", X))["x"].shape == (1, 2)


async def test_timeout_block_raises_timeout_error_and_ends_the_call(client: AsyncInferenceClient, peer: Peer) -> None:
    peer.answer = stall = Stall()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await client.infer("m", X, timeout_s=None)
    # The call may not have got as far as the server; if it has, it ends there too.
    assert not stall.started.is_set() or await asyncio.to_thread(stall.ended.wait, 60)


async def test_cancel_while_closing_stays_a_cancel(client: AsyncInferenceClient, peer: Peer) -> None:
    peer.answer = stall = Stall()
    call = asyncio.create_task(client.infer("m", X, timeout_s=None))
    assert await asyncio.to_thread(stall.started.wait, 60)
    call.cancel()
    await client.close()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_many_calls_at_once_each_get_their_own_answer(client: AsyncInferenceClient) -> None:
    results = await asyncio.gather(*(client.infer("m", {"x": [number]}) for number in range(32)))
    assert [result["x"].tolist() for result in results] == [[number] for number in range(32)]


CLIENT_SETTINGS: list[dict[str, Any]] = [
    {},
    {"transport": "stream"},
    {"coalesce": 4},
    {"transport": "stream", "coalesce": 4},
]
ANOTHER = r"belongs to the event loop in which it was first used, and this is another one: make a client in each loop"


async def use(client: AsyncInferenceClient) -> None:
    """Make a call. That the peer doesn't implement streams makes no difference here."""
    with contextlib.suppress(Unimplemented):
        await client.infer("m", X)


def uses(client: AsyncInferenceClient) -> list[Coroutine[Any, Any, Any]]:
    return [use(client), client.server_live(), client.wait_ready(5), client.__aenter__()]


@pytest.mark.parametrize("way", CLIENT_SETTINGS, ids=str)
def test_use_after_the_first_loop_ended_is_refused(peer: Peer, way: dict[str, Any]) -> None:
    client = AsyncInferenceClient(peer.target, **way)
    asyncio.run(use(client))
    seen = len(peer.requests)
    for again in uses(client):
        with pytest.raises(RuntimeError, match=ANOTHER):
            asyncio.run(again)
    gc.collect()  # coroutines that were never awaited would be reported now, as errors
    assert len(peer.requests) == seen
    asyncio.run(client.close())
    with pytest.raises(ClientClosed):
        asyncio.run(use(client))


@pytest.mark.parametrize("way", CLIENT_SETTINGS, ids=str)
async def test_use_in_a_second_loop_is_refused_with_a_reason(peer: Peer, way: dict[str, Any]) -> None:
    async with AsyncInferenceClient(peer.target, **way) as client:
        for again in [*uses(client), client.close()]:
            with pytest.raises(RuntimeError, match=ANOTHER):
                await asyncio.to_thread(asyncio.run, again)
        await use(client)
        assert await client.server_live()
    await asyncio.to_thread(asyncio.run, client.close())


@pytest.mark.parametrize(
    ("coalesce", "error"), [(2.5, TypeError), (32.0, TypeError), ("3", TypeError), (1, ValueError), (True, ValueError)]
)
def test_coalesce_that_is_no_number_of_rows_is_refused(coalesce: Any, error: type[Exception]) -> None:
    with pytest.raises(error) as refusal:
        AsyncInferenceClient("h:1", coalesce=coalesce)
    expected = "coalesce: expected 2 rows or more in a request, a whole number, or None"
    assert str(refusal.value) == f"{expected}, got {coalesce!r}"


async def test_many_calls_with_lists_ask_once_for_the_metadata(client: AsyncInferenceClient, peer: Peer) -> None:
    peer.takes(x=("INT32", [-1]))
    results = await asyncio.gather(*(client.infer("m", {"x": [number]}) for number in range(32)))
    assert [(result.datatypes["x"], result["x"].tolist()) for result in results] == [("INT32", [n]) for n in range(32)]
    assert sum(isinstance(request, pb.ModelMetadataRequest) for request in peer.requests) == 1


async def test_metadata_holds_up_its_model_alone_and_no_timeout() -> None:
    held = threading.Event()

    class Slow(Peer):
        def ModelMetadata(self, request: Any, context: Any) -> pb.ModelMetadataResponse:
            if request.name == "m":
                held.wait(60)
            return super().ModelMetadata(request, context)

    with serving(Slow()) as peer:
        async with AsyncInferenceClient(peer.target) as client:
            first = asyncio.create_task(client.infer("m", {"x": [1]}, timeout_s=None))
            with pytest.raises(DeadlineExceeded):
                await client.infer("m", {"x": [2]}, timeout_s=0.05)
            assert (await client.infer("another", {"x": [3]}, timeout_s=20))["x"].tolist() == [3]
            held.set()
            assert (await first)["x"].tolist() == [1]
