"""Clients that are killed: their requests leave the queue, their neighbours' stay."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.fault.traffic import Client, client_process, connected, pending, request, total
from tests.harness import ServerProcess, write_identity
from tests.polling import eventually

OK = grpc.StatusCode.OK
CONFIG = """
    dynamic_batching { max_queue_delay_microseconds: 100000000 }
    parameters { key: "execute_delay_ms" value { string_value: "1000" } }
"""


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    """Batches leave when they are full, four rows, and take a second."""
    write_identity(tmp_path, rows=4, extra=CONFIG)
    with ServerProcess(tmp_path) as server:
        yield server
        assert pending(server) == 0
        with connected(server) as client:
            assert client.code(request(rows=4)) is OK


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with connected(server) as client:
        yield client


@pytest.mark.usefixtures("frontends")
def test_killed_clients_waiting_request_gives_up_its_place_in_the_batch(server: ServerProcess, client: Client) -> None:
    with client_process(server, rows=2) as doomed:
        neighbour = client.send(request())
        eventually(lambda: pending(server) == 2, "both requests in the queue")
        doomed.kill()
        eventually(lambda: pending(server) == 1, "the dead client's request gone")
    others = client.send(request(rows=3, first=100))
    assert neighbour.result().raw_output_contents[0] == request().raw_input_contents[0]
    assert others.code() is OK
    assert (total(server, "nv_inference_count"), total(server, "nv_inference_exec_count")) == (4, 1)
    failures = server.metrics()['nv_inference_request_failure{model="echo",reason="CANCELED",version="1"}']
    assert failures == 1


def test_client_killed_while_its_batch_executes_does_not_affect_its_neighbour(
    server: ServerProcess, client: Client
) -> None:
    with client_process(server, rows=1) as doomed:
        neighbour = client.send(request(rows=3))
        eventually(lambda: pending(server) == 0, "the batch executing")
        doomed.kill()
        doomed.wait()
        assert neighbour.result().raw_output_contents[0] == request(rows=3).raw_input_contents[0]
    assert (total(server, "nv_inference_count"), total(server, "nv_inference_exec_count")) == (4, 1)


def test_closed_channel_removes_its_requests_from_the_queue(server: ServerProcess) -> None:
    with connected(server) as client:
        calls = [client.send(request(columns=16)) for _ in range(3)]
        eventually(lambda: pending(server) == 3, "three requests in the queue")
    eventually(lambda: pending(server) == 0, "an empty queue")
    assert {call.code() for call in calls} == {grpc.StatusCode.CANCELLED}
    assert total(server, "nv_inference_exec_count") == 0
