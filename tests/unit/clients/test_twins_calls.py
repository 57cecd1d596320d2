"""Both clients against a scripted peer: what they ask besides inference, and how they begin and end."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2

from paceline.clients import (
    AsyncInferenceClient,
    Cancelled,
    ClientClosed,
    DeadlineExceeded,
    IndexEntry,
    InferenceClient,
    InferenceError,
    ModelMetadata,
    NotFound,
    ResponseError,
    ServerMetadata,
    TensorMetadata,
    Unavailable,
)
from paceline.protos import inference_pb2 as pb
from paceline.protos.model_config_pb2 import ModelConfig
from tests.ports import free_port
from tests.unit.clients.conftest import Twin
from tests.unit.clients.peer import Peer, Stall, serving

MakeTwin = Callable[..., Twin]
X = {"x": np.zeros((1, 2), np.float32)}


async def test_server_live_and_ready_return_the_servers_answer(twin: Twin, peer: Peer) -> None:
    peer.readiness = [False, True]
    assert await twin.server_live() is True
    assert await twin.server_ready() is False
    assert await twin.server_ready() is True


async def test_model_ready_names_model_and_version(twin: Twin, peer: Peer) -> None:
    assert await twin.model_ready("m", "4") is True
    assert await twin.model_ready("other") is False
    assert [(each.name, each.version) for each in peer.requests] == [("m", "4"), ("other", "")]


async def test_server_metadata_is_read(twin: Twin) -> None:
    assert await twin.server_metadata() == ServerMetadata("peer", "7", ("statistics",))


async def test_repository_index_is_read(twin: Twin, peer: Peer) -> None:
    peer.index.models.add(name="m", version="1", state="READY")
    peer.index.models.add(name="n", state="UNAVAILABLE", reason="broken")
    assert await twin.repository_index() == (
        IndexEntry("m", "1", "READY", ""),
        IndexEntry("n", "", "UNAVAILABLE", "broken"),
    )


async def test_model_metadata_is_read(twin: Twin, peer: Peer) -> None:
    peer.model = pb.ModelMetadataResponse(name="m", versions=["1", "2"], platform="p", properties={"k": "v"})
    peer.model.inputs.add(name="x", datatype="FP32", shape=[-1, 4])
    peer.model.outputs.add(name="y", datatype="BYTES", shape=[])
    assert await twin.model_metadata("m") == ModelMetadata(
        name="m",
        versions=("1", "2"),
        platform="p",
        inputs=(TensorMetadata("x", "FP32", (-1, 4)),),
        outputs=(TensorMetadata("y", "BYTES", ()),),
        properties={"k": "v"},
    )


async def test_model_config_is_the_servers_message(twin: Twin, peer: Peer) -> None:
    peer.config = ModelConfig(name="m", max_batch_size=4)
    assert await twin.model_config("m", "2") == peer.config
    assert (peer.requests[-1].name, peer.requests[-1].version) == ("m", "2")


async def test_describe_joins_metadata_and_configuration(twin: Twin, peer: Peer) -> None:
    peer.takes(x=("FP32", [-1, 4]))
    peer.config = ModelConfig(name="m", backend="b", max_batch_size=4)
    found = await twin.describe("m")
    assert (found.platform, found.inputs) == ("b", (TensorMetadata("x", "FP32", (-1, 4)),))
    assert found.batching is not None
    assert found.batching.max_rows == 4


async def test_describe_without_model_config_has_tensors_alone(twin: Twin, peer: Peer) -> None:
    peer.takes(x=("FP32", [-1, 4]))
    found = await twin.describe("m")
    assert (found.is_configured, found.inputs) == (False, (TensorMetadata("x", "FP32", (-1, 4)),))


async def test_models_are_sorted_by_name_and_number(twin: Twin, peer: Peer) -> None:
    for name, version in (("m", "10"), ("m", "9"), ("a", "1")):
        peer.index.models.add(name=name, version=version, state="READY")
    found = await twin.models(ready_only=True)
    assert [(entry.name, entry.version) for entry in found] == [("a", "1"), ("m", "9"), ("m", "10")]
    assert peer.requests[-1].ready


async def test_health_known_and_unknown_service(twin: Twin, peer: Peer) -> None:
    assert await twin.health() == "SERVING"
    peer.health.status = health_pb2.HealthCheckResponse.NOT_SERVING
    assert await twin.health("inference.GRPCInferenceService") == "NOT_SERVING"
    with pytest.raises(NotFound):
        await twin.health("unknown")


async def test_health_unknown_status_raises_response_error(twin: Twin, peer: Peer) -> None:
    peer.health = health_pb2.HealthCheckResponse(status=99)
    with pytest.raises(ResponseError, match="99"):
        await twin.health()


async def test_wait_ready_asks_until_the_server_is_ready(twin: Twin, peer: Peer) -> None:
    peer.readiness = [False, grpc.StatusCode.UNAVAILABLE, True]
    await twin.wait_ready(30.0)
    assert len(peer.requests) == 3


async def test_wait_ready_returns_when_the_server_comes_later(make_twin: MakeTwin) -> None:
    address = _free_address()
    waiting = asyncio.ensure_future(make_twin(address).wait_ready(30.0))
    with serving(Peer(), address) as peer:
        await waiting
    assert len(peer.requests) == 1


async def test_wait_ready_never_ready_raises_deadline_exceeded(twin: Twin, peer: Peer) -> None:
    peer.readiness = [False]
    with pytest.raises(DeadlineExceeded, match=r"was not ready within 0\.1 s"):
        await twin.wait_ready(0.1)


async def test_wait_ready_without_a_server_raises_deadline_exceeded(make_twin: MakeTwin) -> None:
    with pytest.raises(DeadlineExceeded, match="was not ready"):
        await make_twin(_free_address()).wait_ready(0.1)


async def test_wait_ready_other_error_is_raised(twin: Twin, peer: Peer) -> None:
    peer.readiness = [grpc.StatusCode.PERMISSION_DENIED]
    with pytest.raises(InferenceError) as caught:
        await twin.wait_ready(30.0)
    assert caught.value.status is grpc.StatusCode.PERMISSION_DENIED


async def test_call_without_a_server_raises_unavailable_at_once(make_twin: MakeTwin) -> None:
    with pytest.raises(Unavailable):
        await make_twin(_free_address()).server_live(timeout_s=30.0)


async def test_call_without_a_server_waits_where_the_service_config_says_so(make_twin: MakeTwin) -> None:
    service = {"methodConfig": [{"name": [{}], "waitForReady": True}]}
    twin = make_twin(_free_address(), options=[("grpc.service_config", json.dumps(service))])
    with pytest.raises(DeadlineExceeded):
        await twin.server_live(timeout_s=0.2)


async def test_close_during_a_call_raises_cancelled(twin: Twin, peer: Peer) -> None:
    peer.answer = Stall()
    call = asyncio.ensure_future(twin.infer("m", X))
    assert await asyncio.to_thread(peer.answer.started.wait, 60)
    await twin.close()
    with pytest.raises(Cancelled):
        await call


async def test_closed_client_refuses_calls(twin: Twin, peer: Peer) -> None:
    await twin.server_live()
    await twin.close()
    await twin.close()
    with pytest.raises(ClientClosed, match=r"InferenceClient\('127\.0\.0\.1:\d+'\)"):
        await twin.server_live()


async def test_credentials_make_the_connection_secure(make_twin: MakeTwin, peer: Peer) -> None:
    # The peer speaks plain text: a failed handshake shows that there is one.
    twin = make_twin(peer.target, credentials=grpc.ssl_channel_credentials())
    with pytest.raises(Unavailable):
        await twin.server_live(timeout_s=30.0)


async def test_context_manager_closes_at_the_end(peer: Peer) -> None:
    async with AsyncInferenceClient(peer.target) as asynchronous:
        assert await asynchronous.server_live()
    with pytest.raises(ClientClosed):
        await asynchronous.server_live()
    with InferenceClient(peer.target) as blocking:
        assert blocking.server_live()
    with pytest.raises(ClientClosed):
        blocking.server_live()


def test_first_use_from_many_threads_opens_one_channel(peer: Peer) -> None:
    together = threading.Barrier(4)
    with InferenceClient(peer.target) as client:

        def use() -> None:
            together.wait()
            client.server_live()

        threads = [threading.Thread(target=use) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(peer.requests) == 4


def test_close_by_another_thread_as_a_call_begins_raises_client_closed(peer: Peer) -> None:
    with InferenceClient(peer.target) as client:

        def closing() -> Iterator[tuple[str, str]]:
            closer = threading.Thread(target=client.close)
            closer.start()
            closer.join()
            yield "x-late", "1"

        class Closing(list[tuple[str, str]]):
            """Metadata that closes the client when it is read, which is after the call got its channel."""

            def __iter__(self) -> Iterator[tuple[str, str]]:
                return closing()

        with pytest.raises(ClientClosed):
            client.server_live(metadata=Closing())


def _free_address() -> str:
    return f"127.0.0.1:{free_port()}"
