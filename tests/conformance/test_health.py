"""`grpc.health.v1`, called with the standard's own stubs: what load balancers and Kubernetes probes see."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.conformance.triton import Callbacks, assert_same_bits, outputs_of, tensors, wait_for_queued
from tests.harness import ServerProcess

INFERENCE = "inference.GRPCInferenceService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

SLOW = """
class Model:
    inputs = {"INPUT0": ("FP32", [-1, 16])}
    outputs = {"OUTPUT0": ("FP32", [-1, 16])}
    def execute(self, inputs):
        if inputs["INPUT0"].any():  # not while it is warmed up
            open(%r).read()
        return {"OUTPUT0": inputs["INPUT0"]}
"""
"""Executes until somebody has opened the named pipe for writing and has closed it."""

# For more requests that never come, until the server stops.
WAITING = "dynamic_batching { preferred_batch_size: 8 max_queue_delay_microseconds: 600000000 }"


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe")
    return tmp_path / "pipe"


@pytest.fixture
def own_server(tmp_path: Path, pipe: Path) -> Iterator[ServerProcess]:
    """A server that the test may end. Its grace period is longer than any test waits."""
    folder = tmp_path / "models" / "slow"
    (folder / "1").mkdir(parents=True)
    (folder / "1" / "model.py").write_text(SLOW % str(pipe))
    (folder / "config.pbtxt").write_text(f'backend: "python" max_batch_size: 8 {WAITING}')
    flags = ["--exit-timeout-secs", "600", "--allow-python-models", "true"]
    with ServerProcess(tmp_path / "models", args=flags) as started:
        yield started


def health_of(channel: grpc.Channel) -> Any:
    return health_pb2_grpc.HealthStub(channel)


def check(health: Any, service: str = "") -> int:
    status: int = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=20).status
    return status


def watch(health: Any, service: str = "") -> Any:
    return health.Watch(health_pb2.HealthCheckRequest(service=service), timeout=60)


@pytest.mark.parametrize("service", ["", INFERENCE])
def test_check_started_server_is_serving(server: ServerProcess, service: str) -> None:
    with grpc.insecure_channel(server.target) as channel:
        assert check(health_of(channel), service) == SERVING


@pytest.mark.skipif(
    not hasattr(health_pb2, "HealthListRequest"), reason="this grpcio-health-checking has no messages for it"
)
def test_list_has_the_status_of_each_service(server: ServerProcess) -> None:
    with grpc.insecure_channel(server.target) as channel:
        answer = health_of(channel).List(health_pb2.HealthListRequest(), timeout=20)
    assert {name: one.status for name, one in answer.statuses.items()} == dict.fromkeys(
        ("", "liveness", INFERENCE), SERVING
    )


@pytest.mark.parametrize("service", ["nosuch", "inference", "simple"])
def test_check_unknown_service_is_not_found(server: ServerProcess, service: str) -> None:
    with grpc.insecure_channel(server.target) as channel:
        with pytest.raises(grpc.RpcError, match=f"'{service}'") as raised:
            check(health_of(channel), service)
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND  # type: ignore[attr-defined]


def test_watch_unknown_service_reports_service_unknown_and_stays_open(server: ServerProcess) -> None:
    with grpc.insecure_channel(server.target) as channel:
        watching = watch(health_of(channel), "nosuch")
        assert next(watching).status == SERVICE_UNKNOWN
        assert check(health_of(channel)) == SERVING
        assert watching.is_active()
        watching.cancel()


def test_watch_on_sigterm_reports_not_serving_and_ends_before_the_executing_request(
    own_server: ServerProcess, pipe: Path
) -> None:
    sent = {"INPUT0": np.ones((1, 16), np.float32)}
    called = Callbacks()
    with (
        grpc.insecure_channel(own_server.target) as channel,
        tritonclient.grpc.InferenceServerClient(own_server.target) as client,
    ):
        watching = [watch(health_of(channel), service) for service in ("", INFERENCE)]
        assert [next(stream).status for stream in watching] == [SERVING, SERVING]
        client.async_infer("slow", tensors(sent), called)
        wait_for_queued(own_server, "slow", 1)
        own_server.signal(signal.SIGTERM)
        # Each stream is read to its end, which the server sets.
        assert [[answer.status for answer in stream] for stream in watching] == [[NOT_SERVING], [NOT_SERVING]]
        assert called.none_yet
        pipe.write_bytes(b"")
        result, error = called.next()
        assert error is None
        assert_same_bits(outputs_of(result), {"OUTPUT0": sent["INPUT0"]})
        assert own_server.wait(30) == 0


def test_watch_still_reports_the_end_after_another_watcher_has_left(own_server: ServerProcess) -> None:
    with grpc.insecure_channel(own_server.target) as channel:
        leaver, stayer = (watch(health_of(channel)) for _ in range(2))
        assert [next(leaver).status, next(stayer).status] == [SERVING, SERVING]
        leaver.cancel()
        # The cancellation is sent ahead of this on the same connection.
        assert check(health_of(channel)) == SERVING
        own_server.signal(signal.SIGTERM)
        assert [answer.status for answer in stayer] == [NOT_SERVING]
        assert own_server.wait(30) == 0
