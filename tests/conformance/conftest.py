"""One real server per module, and NVIDIA's two clients behind one awaitable face."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest
import tritonclient.grpc
import tritonclient.grpc.aio

from tests.conformance import zoo
from tests.conformance.triton import Triton
from tests.harness import ServerProcess


@pytest.fixture(scope="module", params=[1, 2], ids=["alone", "fronts"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of all models of the zoo, that speaks gRPC itself, or has two processes for it."""
    repository = zoo.write_repository(tmp_path_factory.mktemp("repository"))
    with ServerProcess(repository, args=("--frontends", str(request.param))) as started:
        yield started


@pytest.fixture(params=[tritonclient.grpc, tritonclient.grpc.aio], ids=["sync", "aio"])
async def triton(request: pytest.FixtureRequest, server: ServerProcess) -> AsyncIterator[Triton]:
    client = Triton(request.param.InferenceServerClient(server.target))
    yield client
    await client.close()
