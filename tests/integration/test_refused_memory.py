"""Refused calls leave nothing in memory, not even garbage that only the collector would find."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.protos import inference_pb2 as pb
from paceline.server.config import ControlMode, Settings
from paceline.server.models.load_request import Override
from tests.integration.serving import echo_model, failure_of, serving
from tests.polling import eventually_async
from tests.wire import infer, rows_of_floats


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _refusals() -> int:
    """How many errors that gRPC raised to end calls exist. Each holds the call, the handler's frame and the request."""
    return sum(isinstance(one, grpc.aio.AbortError) for one in gc.get_objects())


@pytest.mark.parametrize("known", [False, True])
async def test_refused_calls_leave_nothing_to_the_garbage_collector(
    tmp_path: Path, uncollected: None, known: bool
) -> None:
    good = infer("m", {"a": rows_of_floats(1)})
    bad = infer("m", {"a": rows_of_floats(1)})
    bad.raw_input_contents[0] += b"more"
    async with serving(tmp_path, {"m": echo_model()}) as served:
        if known:
            await served.infer(good)
        before = _refusals()  # of other tests in this process, whose errors are still referenced
        for _ in range(20):
            assert (await failure_of(served.infer(bad)))[0] is grpc.StatusCode.INVALID_ARGUMENT
        missing = served.stub.ModelMetadata(pb.ModelMetadataRequest(name="missing"))
        assert (await failure_of(missing))[0] is grpc.StatusCode.NOT_FOUND
        health: Any = health_pb2_grpc.HealthStub(served.channel)  # type: ignore[no-untyped-call]
        for _ in range(10):
            unknown = health.Check(health_pb2.HealthCheckRequest(service="nobody"), timeout=20)
            assert (await failure_of(unknown))[0] is grpc.StatusCode.NOT_FOUND
        # gRPC still holds the last ones.
        await eventually_async(lambda: _refusals() < before + 5, "refusals are gone")


def _overrides() -> int:
    """How many contents of models sent by clients exist; each may have hundreds of MB."""
    return sum(isinstance(one, Override) for one in gc.get_objects())


async def test_failed_loads_leave_nothing_to_the_garbage_collector(tmp_path: Path, uncollected: None) -> None:
    settings = Settings(paths=(tmp_path,), model_control_mode=ControlMode.EXPLICIT)
    request = pb.RepositoryModelLoadRequest(model_name="m")
    request.parameters["config"].string_param = '{"backend": "onnxruntime"}'
    request.parameters["file:1/model.onnx"].bytes_param = b"no model"
    async with serving(tmp_path, settings=settings) as served:
        before = _overrides()
        for _ in range(10):
            assert (await failure_of(served.stub.RepositoryModelLoad(request)))[0] is grpc.StatusCode.INVALID_ARGUMENT
        await eventually_async(lambda: _overrides() < before + 3, "what was to be loaded is gone")
