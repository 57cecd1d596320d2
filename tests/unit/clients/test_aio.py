"""What only the asyncio client has: cancellation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np
import pytest

from clients import AsyncInferenceClient
from tests.unit.clients.peer import Peer, Stall, echo

X = {"x": np.zeros((1, 2), np.float32)}


@pytest.fixture
async def client(peer: Peer) -> AsyncIterator[AsyncInferenceClient]:
    async with AsyncInferenceClient(peer.target) as opened:
        yield opened


async def test_cancel_task_the_server_sees_the_call_end(client: AsyncInferenceClient, peer: Peer) -> None:
    peer.answer = stall = Stall()
    call = asyncio.create_task(client.infer("m", X, timeout_s=None))
    assert await asyncio.to_thread(stall.started.wait, 10)
    assert not stall.ended.is_set()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert await asyncio.to_thread(stall.ended.wait, 10)
    peer.answer = echo
    assert (await client.infer("m", X))["x"].shape == (1, 2)


async def test_timeout_block_passes_raises_timeout_error(client: AsyncInferenceClient, peer: Peer) -> None:
    peer.answer = stall = Stall()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await client.infer("m", X, timeout_s=None)
    # The call may not have got as far as the server; if it has, it ends there too.
    assert not stall.started.is_set() or await asyncio.to_thread(stall.ended.wait, 10)


async def test_cancel_while_closing_stays_a_cancel(client: AsyncInferenceClient, peer: Peer) -> None:
    peer.answer = stall = Stall()
    call = asyncio.create_task(client.infer("m", X, timeout_s=None))
    assert await asyncio.to_thread(stall.started.wait, 10)
    call.cancel()
    await client.close()
    with pytest.raises(asyncio.CancelledError):
        await call


async def test_many_calls_at_once_each_get_their_own_answer(client: AsyncInferenceClient) -> None:
    results = await asyncio.gather(*(client.infer("m", {"x": [number]}) for number in range(32)))
    assert [result["x"].tolist() for result in results] == [[number] for number in range(32)]
