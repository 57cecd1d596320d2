"""Whoever can reach a port can't fill the log, hold the server up or take its memory."""

from __future__ import annotations

import socket
from pathlib import Path

from tests.certificates import Authority
from tests.harness import ServerProcess, write_identity


def test_handshakes_that_fail_leave_no_lines(tmp_path: Path) -> None:
    pair = Authority(tmp_path).sign("server")
    write_identity(tmp_path / "models")
    args = ["--grpc-use-ssl=true", f"--grpc-server-cert={pair.certificate}", f"--grpc-server-key={pair.key}"]
    with ServerProcess(tmp_path / "models", args=args) as server:
        lines = len(server.stderr)
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", server.grpc_port), timeout=20) as connection:
                connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
                while connection.recv(4096):
                    pass
        assert server.terminate() == 0
        said = server.stderr[lines:]
    assert all(line.startswith("{") for line in said), said
