"""A log pipe that nobody reads: the server keeps serving, and reports what was lost once somebody reads."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from paceline.protos import inference_pb2 as pb
from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceStub
from tests.harness import REPO, write_identity
from tests.polling import eventually
from tests.ports import free_port
from tests.wire import infer

LONG = "\x01" * 190
"""Part of a request's id: 2 KB, as JSON and twice in its line."""


class Unread:
    """A server that logs to a pipe which only `records` reads. `is_full`: the pipe is full from the beginning."""

    def __init__(self, repository: Path, args: Sequence[str], is_full: bool) -> None:
        self._reading, writing = os.pipe()
        self._rest = b""
        if is_full:
            os.set_blocking(writing, False)
            with suppress(BlockingIOError):
                while True:
                    os.write(writing, b"\n" * 4096)
            os.set_blocking(writing, True)
        self._grpc_port, self._metrics_port = free_port(), free_port()
        flags = ["--grpc-address", "127.0.0.1", "--grpc-port", self._grpc_port, "--metrics-port", self._metrics_port]
        command = [sys.executable, "-m", "paceline", "serve", repository, *flags, "--log-format", "json", *args]
        self.process = subprocess.Popen(list(map(str, command)), cwd=REPO, stderr=writing)
        os.close(writing)
        self._channel = grpc.insecure_channel(f"127.0.0.1:{self._grpc_port}")
        self.stub: Any = GRPCInferenceServiceStub(self._channel)  # type: ignore[no-untyped-call]

    def echo(self, number: int) -> None:
        """Send request `number`, and check its answer."""
        inputs = {"INPUT0": np.full((1, 16), number, np.float32)}
        answer = self.stub.ModelInfer(infer("echo", inputs, id=f"{number}{LONG}"), timeout=60)
        assert answer.raw_output_contents[0] == inputs["INPUT0"].tobytes()

    def records(self, until: str, times: int = 1) -> list[dict[str, Any]]:
        """The records in the pipe, read until `until` is in so many of them."""
        found: list[dict[str, Any]] = []
        while sum(until in one["message"] for one in found) < times:
            *lines, self._rest = (self._rest + os.read(self._reading, 1 << 16)).split(b"\n")
            found += map(json.loads, filter(None, lines))
        return found

    def lost(self) -> int:
        lines = self._get("metrics").splitlines()
        (value,) = (line.split()[1] for line in lines if line.startswith("paceline_lost_log_lines"))
        return int(float(value))

    def is_ready(self) -> bool:
        try:
            return self._get("readyz") == "ok\n"
        except urllib.error.HTTPError as no:
            no.close()
            return False
        except OSError:  # nobody listens yet
            return False

    def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def close(self) -> None:
        self._channel.close()
        self.process.kill()
        self.process.wait()
        os.close(self._reading)

    def _get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics_port}/{path}", timeout=60) as response:
            text: str = response.read().decode()
        return text


@contextmanager
def unread(repository: Path, *args: str, is_full: bool = False) -> Iterator[Unread]:
    made = Unread(repository, args, is_full)
    try:
        eventually(made.is_ready, "the server ready", timeout_s=60)
        yield made
    finally:
        made.close()


def numbers(records: list[dict[str, Any]]) -> list[int]:
    """The numbers of the requests that have a line."""
    return [int(one["request_id"].rstrip("\x01")) for one in records if one["logger"] == "paceline.access"]


def test_unread_log_loses_lines_and_reports_how_many(tmp_path: Path) -> None:
    write_identity(tmp_path)
    with unread(tmp_path, "--log-level", "debug") as server:
        sent = 0
        while sent % 100 or not server.lost():
            server.echo(sent)
            sent += 1
            assert sent < 10_000, "4 MiB were to wait at the most"
        assert server.is_ready()
        records = server.records(until="log lines were lost")
        written, gap = numbers(records), records[-1]
        assert written == [*range(len(written))]
        assert (gap["level"], gap["lost"]) == ("ERROR", sent - len(written))
        assert gap["message"] == f"{gap['lost']} log lines were lost, because stderr didn't accept them"
        server.echo(sent)
        assert numbers(server.records(until=f"request_id='{sent}")) == [sent]
        assert server.lost() == gap["lost"]
        assert server.terminate() == 0


def test_server_whose_log_is_never_read_starts_serves_and_ends(tmp_path: Path) -> None:
    write_identity(tmp_path)
    with unread(tmp_path, "--frontends", "2", "--log-level", "debug", is_full=True) as server:
        for number in range(10):
            server.echo(number)
        assert server.is_ready()
        assert server.terminate() == 0


def test_front_with_lines_to_log_does_not_wait_for_a_reader(tmp_path: Path) -> None:
    write_identity(tmp_path)
    args = ["--frontends", "2", "--allow-remote-settings", "true", "--log-level", "debug"]
    with unread(tmp_path, *args, is_full=True) as server:
        server.echo(0)
        change = pb.LogSettingsRequest()
        change.settings["log_verbose_level"].uint32_param = 2
        server.stub.LogSettings(change, timeout=60)
        for number in range(1, 50):
            server.echo(number)
        records = server.records(until="a frontend has applied the new log settings", times=2)
        records += server.records(until="request_id='49") if 49 not in numbers(records) else []
        assert numbers(records) == [*range(50)]
        assert server.terminate() == 0


CHATTY = """
import numpy as np

class Model:
    inputs = {"INPUT0": ("INT64", [-1, 1])}
    outputs = {"OUTPUT0": ("INT64", [-1, 1])}

    def execute(self, inputs):
        for number in range(int(inputs["INPUT0"][0, 0])):
            print(number, "x" * 7_900)
        return {"OUTPUT0": inputs["INPUT0"]}
"""


def test_python_model_that_prints_more_than_is_read_keeps_answering(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    (tmp_path / "m" / "1" / "model.py").write_text(CHATTY)
    with unread(tmp_path, "--allow-python-models", "true") as server:
        for lines in (1000, 1, 1000):
            request = infer("m", {"INPUT0": np.array([[lines]], np.int64)})
            assert server.stub.ModelInfer(request, timeout=60).outputs
        assert server.lost() > 0
        assert server.is_ready()
        records = server.records(until="log lines were lost")
        printed = [int(one["message"].split()[2]) for one in records if one["logger"] == "paceline.models"]
        assert printed == [*range(len(printed))]
        assert 0 < records[-1]["lost"] <= server.lost()
        assert server.terminate() == 0
