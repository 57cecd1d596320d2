"""Clients that leave or stall before, during and after their batch: their neighbours get their answers, nothing of
theirs stays, and the server's end doesn't wait for them."""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from tests.fault.traffic import Client, connected, half_a_request, pending, quiet, request, total
from tests.harness import REPO, ServerProcess, write_identity
from tests.integration.http2 import call_frames
from tests.polling import eventually

OK = grpc.StatusCode.OK
ONE = request()


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Batches take 50 ms. A stream may have four requests in progress."""
    folder = tmp_path_factory.mktemp("repository")
    delay = 'parameters { key: "execute_delay_ms" value { string_value: "50" } }'
    write_identity(folder, dims="[ -1 ]", extra=f"dynamic_batching {{ }} {delay}")
    with ServerProcess(folder, args=("--grpc-max-stream-requests", "4")) as server:
        yield server
        server.signal(signal.SIGTERM)
        assert server.wait(20) == 0


@pytest.fixture
def server(shared: ServerProcess) -> Iterator[ServerProcess]:
    yield shared
    eventually(lambda: quiet(shared), "nothing waiting")
    with connected(shared) as client:
        assert client.code(ONE) is OK


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with connected(server) as client:
        yield client


def descriptors(server: ServerProcess) -> int:
    return len(list(Path(f"/proc/{server.pid}/fd").iterdir()))


def resident_bytes(server: ServerProcess) -> int:
    return int(Path(f"/proc/{server.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def reset(connection: socket.socket) -> None:
    """Close with a reset: data in transit is lost."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("leave", [socket.socket.close, reset])
def test_client_gone_in_the_middle_of_its_request_leaves_nothing_behind(
    server: ServerProcess, client: Client, leave: object
) -> None:
    assert client.code(ONE) is OK
    data, before = ONE.SerializeToString(), descriptors(server)
    for missing in (1, len(data), len(data) + 60, len(call_frames(data)) - 3):
        connection = half_a_request(server, data, missing)
        assert client.code(ONE) is OK
        leave(connection)  # type: ignore[operator]
    eventually(lambda: descriptors(server) <= before, "the connections closed")


def test_client_gone_as_soon_as_its_request_is_sent_affects_nobody_else(server: ServerProcess, client: Client) -> None:
    for leave in (socket.socket.close, reset) * 10:
        leave(half_a_request(server, ONE.SerializeToString(), 0))
    assert [client.send(request(first=number)).code() for number in range(8)] == [OK] * 8


_STOPPED = """
import sys, grpc
from tests.fault.traffic import Client, request
from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceStub
with grpc.insecure_channel(sys.argv[1]) as channel:
    if sys.argv[2] == "call":
        calls = [Client(channel).send(request(first=1000)) for _ in range(4)]
        print("sent", flush=True)
        [call.result() for call in calls]
    else:
        large = request(columns=250_000)
        answers = GRPCInferenceServiceStub(channel).ModelStreamInfer(large for _ in range(200))
        next(answers)
        print("sent", flush=True)
        sys.stdin.read()
"""


@contextmanager
def stopped_client(server: ServerProcess, kind: str) -> Iterator[subprocess.Popen[str]]:
    """A client that is stopped after it has sent its requests, and acknowledges nothing any more, like one whose
    machine has left the network. Its system still accepts the first data that arrives."""
    command = [sys.executable, "-c", _STOPPED, server.target, kind]
    process = subprocess.Popen(command, cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "sent\n"
        process.send_signal(signal.SIGSTOP)
        yield process
    finally:
        process.kill()
        process.communicate()


def test_client_stalled_before_its_answer_delays_nobody(server: ServerProcess, client: Client) -> None:
    before = total(server, "nv_inference_request_success")
    with stopped_client(server, "call") as process:
        assert [client.send(request(first=number)).code() for number in range(8)] == [OK] * 8
        eventually(lambda: total(server, "nv_inference_request_success") >= before + 8, "the answers")
        process.kill()
        assert client.code(ONE) is OK


def test_slow_reader_delays_only_its_own_stream(server: ServerProcess, client: Client) -> None:
    """Its 200 answers of a megabyte each would be 200 MB."""
    before = resident_bytes(server)
    with stopped_client(server, "stream"):
        for _ in range(3):
            calls = [client.send(request(first=number)) for number in range(8)]
            assert [call.code() for call in calls] == [OK] * 8
        assert resident_bytes(server) - before < 100_000_000
    eventually(lambda: pending(server) == 0, "an empty queue")


def test_sigterm_ends_in_time_despite_stalled_clients(tmp_path: Path) -> None:
    write_identity(tmp_path, dims="[ -1 ]")
    with ServerProcess(tmp_path) as server, stopped_client(server, "stream"), stopped_client(server, "call"):
        server.signal(signal.SIGTERM)
        assert server.wait(30) == 0
