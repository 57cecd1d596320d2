"""Clients for fault tests: calls in flight, half-sent calls, and a client process to be killed.

Lives here: sending and waiting. Must not: assertions about the server.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from paceline.protos import inference_pb2 as pb
from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.harness import REPO, ServerProcess
from tests.integration.http2 import call_frames
from tests.polling import eventually
from tests.wire import infer, rows_of_floats

__all__ = [
    "Client",
    "client_process",
    "connected",
    "half_a_request",
    "peak_bytes",
    "pending",
    "quiet",
    "request",
    "says",
    "total",
]

_LABELS = '{model="echo",version="1"}'


def request(rows: int = 1, columns: int = 16, first: float = 0) -> pb.ModelInferRequest:
    """A request for the model `echo` of the harness."""
    return infer("echo", {"INPUT0": rows_of_floats(rows, columns, first)})


def total(server: ServerProcess, name: str) -> int:
    """One of the server's counters or gauges for the model `echo`."""
    return int(server.metrics()[f"{name}{_LABELS}"])


def pending(server: ServerProcess) -> int:
    """Requests that wait in the queue."""
    return total(server, "nv_inference_pending_request_count")


def peak_bytes(pid: int) -> int:
    """The most memory that the process has had resident."""
    (line,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


class Client:
    """Stubs on one channel; calls are futures, so that many can be in flight."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel
        self._stub: Any = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]

    def send(self, message: pb.ModelInferRequest, timeout_s: float = 60) -> Any:
        """A call in flight."""
        return self._stub.ModelInfer.future(message, timeout=timeout_s)

    def code(self, message: pb.ModelInferRequest) -> grpc.StatusCode:
        """The status that a call ends with."""
        return self.send(message).code()  # type: ignore[no-any-return]


@contextmanager
def connected(server: ServerProcess, options: Sequence[tuple[str, Any]] = ()) -> Iterator[Client]:
    """A connected client of `server`, its channel with `options`. Calls that wait for the connection are sent in any
    order."""
    with grpc.insecure_channel(server.target, options) as channel:
        grpc.channel_ready_future(channel).result(20)
        yield Client(channel)


def says(server: ServerProcess, text: str) -> bool:
    """Whether a line of the log contains `text`."""
    return any(text in record["message"] for record in server.log)


def quiet(server: ServerProcess) -> bool:
    """Whether nothing waits; AssertionError if a traceback was logged."""
    assert not [record for record in server.log if "exception" in record], server.log
    return pending(server) == 0


_SEND = """
import sys, grpc
from tests.fault.traffic import Client, request
with grpc.insecure_channel(sys.argv[1]) as channel:
    Client(channel).send(request(int(sys.argv[2]))).result()
"""


@contextmanager
def client_process(server: ServerProcess, rows: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that has one request of `rows` rows waiting in the server's queue."""
    before = pending(server)
    process = subprocess.Popen([sys.executable, "-c", _SEND, server.target, str(rows)], cwd=REPO)
    try:
        eventually(lambda: pending(server) == before + 1, "the other process's request in the queue")
        yield process
    finally:
        process.kill()
        process.wait()


def half_a_request(server: ServerProcess, data: bytes, missing: int) -> socket.socket:
    """A connection on which a call with the message `data` was sent, except for the last `missing` bytes of its
    frames."""
    connection = socket.create_connection(("127.0.0.1", server.grpc_port))
    connection.sendall(call_frames(data)[: -missing or None])
    return connection
