"""The boundary where exceptions become statuses, over a real connection, with a repository that misbehaves."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from paceline.protos import inference_pb2 as pb
from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceStub
from paceline.server.models.repository import Repository
from paceline.server.models.served_model import ServedModel
from paceline.server.requests.inference import Inference
from paceline.server.rpc import listener
from paceline.server.rpc.calls import TRY_AGAIN_MS, HeaderRules
from paceline.server.rpc.listener import until_quiet
from paceline.server.rpc.service import InferenceService
from paceline.server.rpc.unary_inference import UnaryInference
from paceline.server.telemetry.metrics import Metrics

Code = grpc.StatusCode


class Broken(Repository):
    """A repository in which every look-up raises `error`."""

    def __init__(self, error: Exception) -> None:
        super().__init__(Metrics(), lambda name: pytest.fail("nothing is loaded here"))
        self.error = error

    def get(self, name: str, version: str) -> ServedModel:
        raise self.error


class Bench:
    def __init__(self, inference: Inference, repository: Broken, stub: Any) -> None:
        self.inference = inference
        self.repository = repository
        self.stub = stub

    async def outcome(self, request: pb.ModelInferRequest | None = None) -> tuple[Code, str]:
        call = self.stub.ModelInfer(request or pb.ModelInferRequest(model_name="m"), timeout=10)
        return await call.code(), await call.details()


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    repository = Broken(KeyError("x"))
    inference = Inference(repository)
    inference.serving = inference.ready = True
    service = InferenceService(inference, repository, "id", "1", [UnaryInference(inference, HeaderRules())])
    server = grpc.aio.server()
    service.add_to(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield Bench(inference, repository, GRPCInferenceServiceStub(channel))  # type: ignore[no-untyped-call]
    await server.stop(None)


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyError("x"), "internal error: KeyError: 'x'"),
        (ZeroDivisionError(), "internal error: ZeroDivisionError: "),
        (AttributeError("no \udcff such"), "internal error: AttributeError: no \\udcff such"),
    ],
)
async def test_unforeseen_error_is_internal_and_logged_with_its_traceback(
    bench: Bench, caplog: pytest.LogCaptureFixture, error: Exception, text: str
) -> None:
    bench.repository.error = error
    with caplog.at_level(logging.ERROR, "paceline.server.inference"):
        assert await bench.outcome() == (Code.INTERNAL, text)
    (record,) = caplog.records
    assert record.getMessage() == "ModelInfer failed with an internal error, a bug in paceline; please report it"
    assert record.exc_info
    assert record.exc_info[1] is error


async def test_unforeseen_error_in_one_call_does_not_affect_the_next(bench: Bench) -> None:
    await bench.outcome()
    assert (await bench.stub.ServerMetadata(pb.ServerMetadataRequest())).name == "id"


async def test_not_serving_refuses_inference_before_anything_else(bench: Bench) -> None:
    bench.inference.serving = False
    assert await bench.outcome() == (Code.UNAVAILABLE, "the server is stopping")


async def test_not_serving_tells_clients_that_retry_when_to_do_so(bench: Bench) -> None:
    pushback = ("grpc-retry-pushback-ms", str(TRY_AGAIN_MS))
    for serving in (False, True):
        bench.inference.serving = serving
        call = bench.stub.ModelInfer(pb.ModelInferRequest(model_name="nosuch"), timeout=10)
        assert (pushback in list(await call.trailing_metadata())) == (not serving)


async def test_server_that_is_not_ready_is_live(bench: Bench) -> None:
    assert (await bench.stub.ServerReady(pb.ServerReadyRequest())).ready
    bench.inference.ready = False
    assert not (await bench.stub.ServerReady(pb.ServerReadyRequest())).ready
    assert (await bench.stub.ServerLive(pb.ServerLiveRequest())).live


async def test_until_quiet_ends_soon_when_nobody_calls(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_LONGEST_S", 600)
    await asyncio.wait_for(until_quiet(lambda: bench.inference.refused), 30)


async def test_refused_calls_are_counted_as_arrivals(bench: Bench) -> None:
    bench.inference.serving = False
    for _ in range(11):
        assert (await bench.outcome())[0] is Code.UNAVAILABLE
    assert bench.inference.refused == 11


async def test_until_quiet_ends_even_if_calls_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "_LONGEST_S", 0.2)
    counted, began_s = itertools.count(), time.monotonic()
    await asyncio.wait_for(until_quiet(lambda: next(counted)), 30)
    assert time.monotonic() - began_s >= 0.2
