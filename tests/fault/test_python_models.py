"""Processes of Python models when their server ends, in whichever way, and when they hang or crash."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy as np
import pytest

from paceline.protos import inference_pb2 as pb
from tests import puppet
from tests.fault.traffic import connected, says
from tests.harness import ServerProcess
from tests.polling import eventually
from tests.wire import infer

STARTS_ANOTHER = """
import subprocess

class Starting(Model):
    def load(self, context):
        super().load(context)
        (HERE / "started").write_text(str(subprocess.Popen(["sleep", "1000"]).pid))

Model = Starting
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = puppet.write_puppet(tmp_path / "m" / "1")
    path.write_text(path.read_text() + STARTS_ANOTHER)
    return path.parent


@pytest.fixture
def server(folder: Path, tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path, args=["--allow-python-models", "true"]) as server:
        yield server


def request(element: int) -> pb.ModelInferRequest:
    return infer("m", {"INPUT0": np.array([[element]], np.int64)})


def pid_of(server: ServerProcess) -> int:
    with connected(server) as client:
        answer = client.send(request(puppet.PID)).result()
    return int(np.frombuffer(answer.raw_output_contents[0], np.int64)[0])


def is_gone(pid: int) -> bool:
    """Whether the process has ended, reaped or not: after the server's end, that isn't up to the tests."""
    try:
        return ") Z " in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):  # the latter if it ended between opening and reading
        return True


def test_model_process_ends_with_a_killed_server(server: ServerProcess) -> None:
    pid = pid_of(server)
    server.kill()
    eventually(lambda: is_gone(pid), "the model's process gone")


@pytest.mark.parametrize("what", [puppet.HANG, puppet.GRAB])
def test_hanging_model_process_ends_with_a_killed_server(server: ServerProcess, folder: Path, what: int) -> None:
    pid, started = pid_of(server), int((folder / "started").read_text())
    with connected(server) as client:
        hanging = client.send(request(what))
        eventually((folder / "hangs").exists, "the model hanging")
        assert not is_gone(started)
        server.kill()
        assert hanging.code() is grpc.StatusCode.UNAVAILABLE
    eventually(lambda: is_gone(pid), "the model's process gone")
    eventually(lambda: is_gone(started), "what it has started gone")


def test_hanging_model_process_does_not_keep_the_server_from_ending(folder: Path, tmp_path: Path) -> None:
    args = ["--allow-python-models", "true", "--exit-timeout-secs", "1"]
    with ServerProcess(tmp_path, args=args) as server, connected(server) as client:
        pid = pid_of(server)
        hanging = client.send(request(puppet.HANG))
        eventually((folder / "hangs").exists, "the model hanging")
        assert server.terminate() == 0
        assert hanging.code() is not grpc.StatusCode.OK
    eventually(lambda: is_gone(pid), "the model's process gone")


@pytest.mark.parametrize("what", [puppet.HANG, puppet.GRAB])
def test_execution_hanging_beyond_the_limit_is_killed_and_leaves_nothing_behind(
    folder: Path, tmp_path: Path, what: int
) -> None:
    args = ["--allow-python-models", "true", "--execution-timeout-secs", "3"]
    with ServerProcess(tmp_path, args=args) as server, connected(server) as client:
        pid = pid_of(server)
        hanging = client.send(request(what))
        assert hanging.code() is grpc.StatusCode.INTERNAL
        assert "took longer than 3 s and was given up" in hanging.details()
        eventually(lambda: is_gone(pid), "the model's process gone")
        assert client.code(request(1)) is grpc.StatusCode.OK
        assert pid_of(server) != pid
        assert len((folder / "loads").read_text().splitlines()) == 2, "one process took its place"
        eventually(lambda: says(server, "an execution that hung has ended"), "its thread free again")
        assert server.terminate() == 0


def test_orderly_end_of_a_server_closes_the_model(server: ServerProcess, folder: Path) -> None:
    pid = pid_of(server)
    assert server.terminate() == 0
    assert (folder / "closed").exists()
    assert is_gone(pid)


def test_server_still_answers_after_crashes_in_a_row(server: ServerProcess) -> None:
    with connected(server) as client:
        for what in (puppet.EXIT, puppet.SEGFAULT) * 2:
            assert client.code(request(what)) is grpc.StatusCode.INTERNAL
            assert client.code(request(1)) is grpc.StatusCode.OK
    assert server.metrics()['paceline_lost_instances{model="m",version="1"}'] == 4
    for line in ("an instance is lost: the model's process was killed by SIGSEGV", "Fatal Python error: Segmentation"):
        eventually(lambda line=line: says(server, line), line)  # type: ignore[misc]
