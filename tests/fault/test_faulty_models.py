"""Models that raise, return wrong outputs, run out of memory, hang or lose their thread, in a separate server
process."""

from __future__ import annotations

import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from paceline.protos import inference_pb2 as pb
from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.fault.faulty import (
    DIES,
    FAULTS,
    HANGS,
    HANGS_A_WHILE,
    HANGS_UNTIL_TOLD,
    end_hang,
    pipe_for_hangs,
    write_faulty,
)
from tests.fault.traffic import Client, connected, pending, request, total
from tests.harness import ServerProcess
from tests.polling import eventually

OK, INTERNAL = grpc.StatusCode.OK, grpc.StatusCode.INTERNAL
GIVEN_UP = "model 'echo': the execution took longer than 1 s and was given up"
WHOLE = 'parameters { key: "paceline.isolate_failures" value { string_value: "false" } }'
HANGING = "the execution will hang"
LIMITED = ("--execution-timeout-secs", "1")


@pytest.fixture
def instances() -> int:
    return 1


@pytest.fixture
def server(tmp_path: Path, instances: int) -> Iterator[ServerProcess]:
    write_faulty(tmp_path / "models", f"{WHOLE} instance_group {{ count: {instances} }}")
    env = pipe_for_hangs(tmp_path)
    with ServerProcess(tmp_path / "models", args=LIMITED, env=env, module="tests.fault.faulty") as server:
        yield server
        assert pending(server) == 0
        with connected(server) as client:
            assert client.code(request()) is OK


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with connected(server) as client:
        yield client


def asking_for(fault: int) -> pb.ModelInferRequest:
    return request(first=fault)


def ready(client: Client) -> tuple[bool, bool, bool]:
    """Whether the model, the server and its health service report that they are ready."""
    stub = GRPCInferenceServiceStub(client.channel)  # type: ignore[no-untyped-call]
    health = health_pb2_grpc.HealthStub(client.channel).Check(health_pb2.HealthCheckRequest(), timeout=20)
    return (
        stub.ModelReady(pb.ModelReadyRequest(name="echo"), timeout=20).ready,
        stub.ServerReady(pb.ServerReadyRequest(), timeout=20).ready,
        health.status == health_pb2.HealthCheckResponse.SERVING,
    )


def said(server: ServerProcess, text: str) -> int:
    """How often the log has `text`."""
    return sum(text in record["message"] for record in server.log)


def says(server: ServerProcess, text: str) -> bool:
    return said(server, text) > 0


@pytest.mark.usefixtures("frontends")
def test_errors_wrong_outputs_and_lack_of_memory_fail_only_those_requests(
    server: ServerProcess, client: Client
) -> None:
    for code, (_, text) in FAULTS.items():
        call = client.send(asking_for(code))
        expected = grpc.StatusCode.RESOURCE_EXHAUSTED if "allocate" in text else INTERNAL
        assert (call.code(), code) == (expected, code)
        assert text in call.details(), code
        assert client.code(request()) is OK
    labels = 'model="echo",reason="BACKEND",version="1"'
    assert server.metrics()[f"nv_inference_request_failure{{{labels}}}"] == len(FAULTS)
    assert total(server, "nv_inference_request_success") == len(FAULTS)


def test_dead_thread_of_an_instance_is_replaced(server: ServerProcess, client: Client) -> None:
    codes: list[grpc.StatusCode] = []
    for told in range(1, 21):  # now and then it dies before it waits, and loses no request
        assert client.code(asking_for(DIES)) is OK
        eventually(lambda told=told: said(server, "the thread ") == told, "the thread's end on its way")
        assert said(server, "the thread will die") == told, server.log[-1]
        taken_along = client.send(request())
        codes.append(taken_along.code())
        if INTERNAL in codes:
            break
    assert taken_along.details() == "model 'echo': the instance's thread died: SystemExit()"
    replaced = "an instance's thread died and is replaced: echo_1_0"
    eventually(lambda: said(server, replaced) == len(codes), "a line for each of them")
    assert [client.code(request()) for _ in range(3)] == [OK] * 3


def test_hang_fails_its_batch_in_time_replaces_the_instance_and_shows_in_readiness(
    server: ServerProcess, client: Client
) -> None:
    assert ready(client) == (True, True, True)
    health = health_pb2_grpc.HealthStub(client.channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
    hung = client.send(asking_for(HANGS))
    eventually(lambda: says(server, HANGING), "the request executing")
    waiting = [client.send(request(first=number)) for number in range(6)]
    assert (hung.code(), hung.details()) == (INTERNAL, GIVEN_UP)
    # Requests that waited for the instance are executed by its replacement.
    assert [call.code() for call in waiting] == [OK] * 6
    eventually(lambda: ready(client) == (True, True, True), "the model ready again")
    told = [next(health).status for _ in range(3)]
    status = health_pb2.HealthCheckResponse
    assert told == [status.SERVING, status.NOT_SERVING, status.SERVING]
    assert total(server, "paceline_hung_executions") == 1
    eventually(lambda: says(server, "an execution hangs and was given up; instances left: 0"), "the line of the log")


@pytest.mark.parametrize("instances", [2])
def test_hang_of_one_of_several_instances_leaves_the_model_ready(server: ServerProcess, client: Client) -> None:
    hung = client.send(asking_for(HANGS))
    eventually(lambda: says(server, HANGING), "the request executing")
    assert client.code(request()) is OK
    assert ready(client) == (True, True, True)
    assert hung.code() is INTERNAL
    eventually(lambda: says(server, "an instance has been replaced"), "another instance")
    eventually(lambda: says(server, "an execution hangs and was given up; instances left: 1"), "the line of the log")


def test_hang_that_ends_after_all_changes_nothing_and_returns_its_instance(
    server: ServerProcess, client: Client, tmp_path: Path
) -> None:
    assert client.code(asking_for(HANGS_UNTIL_TOLD)) is INTERNAL
    assert client.code(request()) is OK
    end_hang(tmp_path)
    eventually(lambda: says(server, "an execution that hung has ended"), "the end of the hang")
    assert client.code(request()) is OK
    assert total(server, "nv_inference_request_success") == 2


def test_too_many_hangs_get_no_more_instances_and_the_model_stays_unready(tmp_path: Path) -> None:
    write_faulty(tmp_path, 'parameters { key: "paceline.execution_timeout_ms" value { string_value: "20" } }')
    with ServerProcess(tmp_path, module="tests.fault.faulty") as server, connected(server) as client:
        for _ in range(17):
            assert client.code(asking_for(HANGS)) is INTERNAL
        eventually(lambda: says(server, "17 instances hang, so no more are started"), "no more instances")
        assert ready(client) == (False, False, False)
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(f"http://127.0.0.1:{server.metrics_port}/readyz", timeout=20)
        with caught.value as answer:
            assert (answer.code, answer.read().strip()) == (503, b"models have no instance left: 'echo'")
        assert total(server, "paceline_hung_executions") == 17
        late = client.send(request(), timeout_s=0.2)
        assert late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        eventually(lambda: pending(server) == 0, "an empty queue")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signal_ends_the_server_with_status_0_despite_hanging_threads(tmp_path: Path, number: int) -> None:
    write_faulty(tmp_path)
    with ServerProcess(tmp_path, args=LIMITED, module="tests.fault.faulty") as server, connected(server) as client:
        assert client.code(asking_for(HANGS)) is INTERNAL
        assert client.code(request()) is OK
        server.signal(number)
        assert server.wait(20) == 0


def test_execution_may_take_any_time_without_a_limit(tmp_path: Path) -> None:
    write_faulty(tmp_path)
    with ServerProcess(tmp_path, module="tests.fault.faulty") as server, connected(server) as client:
        assert client.code(asking_for(HANGS_A_WHILE)) is OK
        assert total(server, "paceline_hung_executions") == 0
