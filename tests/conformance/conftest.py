"""Real servers that tests of all modules share, and NVIDIA's two clients behind one awaitable interface."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from functools import cache

import pytest
import tritonclient.grpc
import tritonclient.grpc.aio

from tests.conformance import zoo
from tests.conformance.triton import Triton
from tests.harness import ServerProcess


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], ServerProcess]]:
    """Servers of all models of the zoo, by the number of processes that speak gRPC for them. Each is started on first
    use."""
    with ExitStack() as stack:

        @cache
        def started(frontends: int) -> ServerProcess:
            repository = zoo.write_repository(tmp_path_factory.mktemp("repository"))
            return stack.enter_context(ServerProcess(repository, args=("--frontends", str(frontends))))

        yield started


@pytest.fixture(scope="module", params=[1, 2], ids=["alone", "fronts"])
def server(request: pytest.FixtureRequest, servers: Callable[[int], ServerProcess]) -> ServerProcess:
    """A server of all models of the zoo, which speaks gRPC itself or has two processes for it."""
    return servers(request.param)


@pytest.fixture
async def triton(request: pytest.FixtureRequest, server: ServerProcess) -> AsyncIterator[Triton]:
    """The blocking client of the one server, the asyncio client of the other: what a client sends doesn't depend on who
    reads it."""
    alone = request.node.callspec.params["server"] == 1
    client = Triton((tritonclient.grpc if alone else tritonclient.grpc.aio).InferenceServerClient(server.target))
    yield client
    await client.close()


@pytest.fixture(params=[tritonclient.grpc, tritonclient.grpc.aio], ids=["sync", "aio"])
async def either(request: pytest.FixtureRequest, server: ServerProcess) -> AsyncIterator[Triton]:
    """Both clients, of a module with a server of its own."""
    client = Triton(request.param.InferenceServerClient(server.target))
    yield client
    await client.close()
