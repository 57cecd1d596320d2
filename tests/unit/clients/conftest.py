"""A scripted peer for each test, and both clients behind one awaitable interface."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from paceline.clients import AsyncInferenceClient, InferenceClient
from tests.unit.clients.peer import Peer, serving


class Twin:
    """Either client; the blocking one is called in a thread, so that both can be awaited."""

    def __init__(self, client: InferenceClient | AsyncInferenceClient) -> None:
        self.client = client

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self.client, name)
        return method if inspect.iscoroutinefunction(method) else functools.partial(asyncio.to_thread, method)


@pytest.fixture
def peer() -> Iterator[Peer]:
    with serving(Peer()) as served:
        yield served


@pytest.fixture(params=[InferenceClient, AsyncInferenceClient], ids=["sync", "aio"])
async def make_twin(request: pytest.FixtureRequest) -> AsyncIterator[Callable[..., Twin]]:
    """Makes clients of either kind, and closes them."""
    made: list[Twin] = []

    def make(target: str, **settings: Any) -> Twin:
        made.append(Twin(request.param(target, **settings)))
        return made[-1]

    yield make
    for twin in made:
        await twin.close()


@pytest.fixture
def twin(make_twin: Callable[..., Twin], peer: Peer) -> Twin:
    return make_twin(peer.target)
