"""The example client in JavaScript, on gRPC's implementation for Node: a second language, from the .proto file alone.

Its packages are looked for where `make witness` puts them. It connects to nothing beyond loopback.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from tests.harness import REPO, ServerProcess

EXAMPLE = REPO / "examples" / "node"

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def node() -> Run:
    program = shutil.which("node")
    if program is None:
        pytest.skip("there is no node")
    if not (EXAMPLE / "node_modules" / "@grpc" / "grpc-js").exists():
        pytest.skip("there is no @grpc/grpc-js: `make witness` installs it")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [program, "client.js", *arguments]
        return subprocess.run(command, cwd=EXAMPLE, capture_output=True, text=True, timeout=60, check=False)

    return run


@pytest.fixture(scope="module")
def printed(node: Run, server: ServerProcess) -> dict[str, Any]:
    done = node(server.target, "simple")
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


OUTPUTS = [
    {"name": "OUTPUT0", "datatype": "INT32", "shape": [1, 16], "data": [2] * 16},
    {"name": "OUTPUT1", "datatype": "INT32", "shape": [1, 16], "data": [0] * 16},
]


def test_node_client_reads_metadata(printed: dict[str, Any]) -> None:
    metadata = printed["metadata"]
    assert (metadata["name"], metadata["versions"]) == ("simple", ["1"])
    assert metadata["inputs"] == [
        {"name": name, "datatype": "INT32", "shape": [-1, 16]} for name in ("INPUT0", "INPUT1")
    ]


def test_node_client_infers_with_a_unary_call(printed: dict[str, Any]) -> None:
    assert printed["answer"] == {"id": "", "model": "simple", "version": "1", "outputs": OUTPUTS}


def test_node_client_streams_requests_of_which_one_fails_alone(printed: dict[str, Any]) -> None:
    first, failed, last = printed["streamed"]
    assert [answer["outputs"] for answer in (first, last)] == [OUTPUTS, OUTPUTS]
    assert (first["id"], last["id"]) == ("a", "c")
    assert failed.keys() == {"id", "error"}
    assert "simple-nosuch" in failed["error"]


@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [(["nosuch"], 1, "NOT_FOUND: "), ([], 2, "usage: "), (["identity_bytes"], 1, "got BYTES")],
    ids=["unknown model", "usage", "datatype"],
)
def test_node_client_reports_errors(
    node: Run, server: ServerProcess, arguments: list[str], status: int, said: str
) -> None:
    done = node(server.target, *arguments)
    assert (done.returncode, done.stdout) == (status, "")
    assert said in done.stderr
