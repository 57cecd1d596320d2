"""A machine that runs out of descriptors or disk: the server reports it where it can, and keeps serving."""

from __future__ import annotations

import os
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from paceline.protos import inference_pb2 as pb
from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.fault.traffic import connected, quiet, request, says
from tests.harness import REPO, ServerProcess, write_identity
from tests.integration.http2 import begun_calls
from tests.polling import eventually
from tests.ports import free_port

OK, INVALID = grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT


@contextmanager
def no_more_descriptors(server: ServerProcess, spare: int) -> Iterator[None]:
    """Let the server open `spare` more files, and no further one."""
    # The limit is on descriptors' numbers only, so that open files stay open.
    highest = max(int(entry.name) for entry in Path(f"/proc/{server.pid}/fd").iterdir())
    before = resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (highest + 1 + spare, _hard_limit(server)))
    try:
        yield
    finally:
        resource.prlimit(server.pid, resource.RLIMIT_NOFILE, before)


def _connection(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=20)


def _hard_limit(server: ServerProcess) -> int:
    return resource.prlimit(server.pid, resource.RLIMIT_NOFILE)[1]


def spare_descriptors(server: ServerProcess) -> int:
    allowed, _ = resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    return allowed - len(list(Path(f"/proc/{server.pid}/fd").iterdir()))


@pytest.mark.skipif(sys.platform != "linux", reason="limits of another process are Linux's")
def test_exhausted_descriptors_refuse_loads_while_open_connections_are_served(tmp_path: Path) -> None:
    write_identity(tmp_path)
    args = ("--model-control-mode", "explicit", "--load-model", "echo")
    with ServerProcess(tmp_path, args=args) as server, connected(server) as client:
        stub: Any = GRPCInferenceServiceStub(client.channel)  # type: ignore[no-untyped-call]
        load = pb.RepositoryModelLoadRequest(model_name="echo")
        assert client.code(request()) is OK
        with ExitStack() as opened:
            with no_more_descriptors(server, spare=4):
                newcomers = [opened.enter_context(_connection(server.grpc_port)) for _ in range(20)]
                for _ in range(5):
                    opened.enter_context(_connection(server.metrics_port))
                for one in newcomers:
                    one.sendall(begun_calls(0))
                eventually(lambda: spare_descriptors(server) == 0, "all taken by newcomers")
                refused = stub.RepositoryModelLoad.future(load, timeout=60)
                assert refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert "files that the process may open (ulimit -Hn)" in refused.details()
                assert [client.code(request(first=number)) for number in range(50)] == [OK] * 50
            assert all(one.recv(1) for one in newcomers), "those that waited are accepted"
        stub.RepositoryModelLoad(load, timeout=60)
        with connected(server) as newcomer:
            assert newcomer.code(request()) is OK
        eventually(lambda: quiet(server), "nothing waiting")
        server.signal(signal.SIGTERM)
        assert server.wait(20) == 0


@pytest.mark.parametrize(("form", "frontends"), [("text", "1"), ("json", "2")])
def test_log_on_a_full_disk_loses_only_lines(tmp_path: Path, form: str, frontends: str) -> None:
    """At debug level there is a line for each request."""
    write_identity(tmp_path)
    port = free_port()
    command = [sys.executable, "-m", "paceline", "serve", str(tmp_path), "--grpc-address", "127.0.0.1"]
    command += ["--grpc-port", str(port), "--allow-metrics", "false", "--log-level", "debug"]
    command += ["--log-format", form, "--frontends", frontends]
    # As for users: with unbuffered output, Python would have nothing left to write at the end.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with (
        open("/dev/full", "w") as full,
        subprocess.Popen(command, cwd=REPO, env=env, stderr=full, stdout=full) as server,
    ):
        try:
            with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
                stub: Any = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
                stub.ModelInfer(request(), timeout=60, wait_for_ready=True)
                bad = stub.ModelInfer.future(pb.ModelInferRequest(model_name="echo"), timeout=60)
                assert bad.code() is INVALID
                assert stub.ModelInfer(request(), timeout=60).outputs
            server.send_signal(signal.SIGTERM)
            assert server.wait(30) == 0
        finally:
            server.kill()


def test_traces_on_a_full_disk_are_lost_without_requests(tmp_path: Path) -> None:
    write_identity(tmp_path / "repository")
    (tmp_path / "traces").symlink_to("/dev/full")
    traces = [("file", tmp_path / "traces"), ("level", "TIMESTAMPS"), ("rate", "1")]
    args = [word for key, value in traces for word in ("--trace-config", f"{key}={value}")]
    with ServerProcess(tmp_path / "repository", args=args) as server, connected(server) as client:
        assert [client.code(request()) for _ in range(50)] == [OK] * 50
        eventually(lambda: says(server, "No space left on device"), "a line in the log")
        assert [client.code(request()) for _ in range(50)] == [OK] * 50
        assert sum("No space left on device" in record["message"] for record in server.log) == 1
        assert quiet(server)
        server.signal(signal.SIGTERM)
        assert server.wait(20) == 0
