"""Settings of the command that are visible from outside, given as flags and as environment variables."""

from __future__ import annotations

import signal
import subprocess
import sys
import urllib.error
from pathlib import Path

import pytest

from paceline.clients import InferenceClient
from tests.harness import ServerProcess, write_identity
from tests.ports import free_port


@pytest.mark.parametrize("by_flag", [True, False], ids=["flags", "environment"])
def test_settings_reach_the_server(tmp_path: Path, by_flag: bool) -> None:
    write_identity(tmp_path)
    args = ("--id", "edge-7", "--allow-metrics", "false", "--log-level", "debug") if by_flag else ()
    env = {} if by_flag else {"PACELINE_ID": "edge-7", "PACELINE_ALLOW_METRICS": "false"}
    with ServerProcess(tmp_path, args=args, env=env, fresh=True) as server:
        with InferenceClient(server.target) as client:
            assert client.server_metadata().name == "edge-7"
            assert client.server_ready()
        assert server.metrics_port == 0
        with pytest.raises(urllib.error.URLError):
            server.metrics()
    assert server.returncode == 0


def test_paths_given_in_every_way_are_served_together(tmp_path: Path) -> None:
    write_identity(tmp_path / "one", "a")
    alone = write_identity(tmp_path / "two", "b")
    write_identity(tmp_path / "three", "c")
    with (
        ServerProcess(tmp_path / "one", alone, args=("--model-repository", str(tmp_path / "three"))) as server,
        InferenceClient(server.target) as client,
    ):
        assert all(client.model_ready(name) for name in ("a", "b", "c"))


def test_log_from_start_to_stop_is_one_json_object_per_line(tmp_path: Path) -> None:
    write_identity(tmp_path)
    with ServerProcess(tmp_path, fresh=True) as server:
        pass
    assert len(server.log) == len(server.stderr)
    said = [record["message"].split()[0] for record in server.log]
    assert said == ["loading", "model", "ready:", "stopping:", "stopped"]
    assert {record["level"] for record in server.log} == {"INFO"}


def test_stdin_that_is_closed_is_empty() -> None:
    command = f"exec {sys.executable} -m paceline infer m --server 127.0.0.1:{free_port()} --sequence - <&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("Error: UNAVAILABLE")


INTERRUPTED = """
import os, signal, sys


class Interrupts:
    def find_spec(self, name, *more):
        if name == "click":
            os.kill(os.getpid(), signal.SIGINT)


signal.signal(signal.SIGINT, signal.default_int_handler)  # shells have it ignored in the background
sys.meta_path.insert(0, Interrupts())
from paceline.server.__main__ import main

main()
"""


def test_interrupt_during_the_imports_ends_without_a_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", INTERRUPTED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
