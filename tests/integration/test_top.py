"""`paceline top` against real servers: one that serves, a missing one, one that goes away and comes back."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner, Result

from paceline.clients import InferenceClient
from paceline.server.cli import main
from tests.harness import REPO, ServerProcess, write_identity
from tests.integration.controlling import explicit
from tests.integration.serving import echo_model, serving
from tests.polling import eventually
from tests.ports import free_port
from tests.wire import infer, rows_of_floats


def top_once(port: int | None, *args: str) -> Result:
    command = ["top", "--once", "--interval", "0.1", "--metrics", f"127.0.0.1:{port}", *args]
    return CliRunner().invoke(main, command)


async def test_once_prints_one_table_of_the_current_activity(tmp_path: Path) -> None:
    async with serving(tmp_path, {"m": echo_model(), "idle": echo_model()}) as served:
        stop = asyncio.Event()

        async def load() -> None:
            while not stop.is_set():
                await served.infer(infer("m", {"a": rows_of_floats(2)}))

        loading = asyncio.create_task(load())
        record = tmp_path / "arrivals.jsonl"
        for _ in range(20):  # again if the machine stood still meanwhile
            result = await asyncio.to_thread(top_once, served.server.metrics_port, "--record", str(record))
            assert result.exit_code == 0
            summary, empty, headings, busy, idle = result.stdout.splitlines()
            rate = float(busy.split()[2])
            if rate:
                break
        stop.set()
        await loading
    assert rate > 0, result.stdout
    assert summary.startswith("ready, ")
    assert empty == ""
    assert headings.split()[:3] == ["MODEL", "VERSION", "REQ/S"]
    assert busy.split()[:2] == ["m", "1"]
    assert busy.split()[6] == "2.0"
    assert idle.split()[:3] == ["idle", "1", "0.0"]
    recorded = [json.loads(line) for line in record.read_text().splitlines()]
    assert {one["model"]: one["requests"] / one["seconds"] for one in recorded} == {
        "m": pytest.approx(rate, abs=0.5),
        "idle": 0,
    }


async def test_html_is_a_page_of_so_many_intervals(tmp_path: Path) -> None:
    file = tmp_path / "status.html"
    async with serving(tmp_path, {"m": echo_model()}) as served:
        command = ["top", "--interval", "0.1", "--count", "2", "--html", str(file), "--metrics"]
        result = await asyncio.to_thread(
            CliRunner().invoke, main, [*command, f"127.0.0.1:{served.server.metrics_port}"]
        )
    assert (result.exit_code, result.output) == (0, "")
    page = file.read_text()
    assert "<h2>m <small>version 1</small></h2>" in page
    (waiting,) = re.findall(r"Waiting <.*?points=\"(.*?)\"", page)
    assert len(waiting.split()) == 2


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        (("--once", "--html", "x"), "--once can't be combined with --html"),
        (("--count", "3"), "--count needs --html FILE"),
        (("--html", "nowhere/status.html"), "expected a file that can be written"),
    ],
)
def test_page_options_of_no_effect_are_refused(given: Sequence[str], fault: str, tmp_path: Path) -> None:
    (tmp_path / "recorded").write_text("before")
    result = CliRunner().invoke(main, ["top", "--record", str(tmp_path / "recorded"), *given])
    assert result.exit_code == 2
    assert fault in result.stderr
    assert (tmp_path / "recorded").read_text() == "before"


async def test_once_of_a_server_without_models_says_so(tmp_path: Path) -> None:
    async with serving(tmp_path, settings=explicit(tmp_path)) as served:
        result = await asyncio.to_thread(top_once, served.server.metrics_port)
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "no models")


def test_once_without_a_server_prints_one_line_and_exits_with_status_1() -> None:
    result = top_once(free_port())
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("Error: no answer from http://127.0.0.1:")
    assert len(result.stderr.splitlines()) == 1


@contextmanager
def other_server(status: int, body: bytes) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    ("status", "body", "fault"),
    [
        (404, b"", "HTTP status 404"),
        (200, b"<html>", "expected Prometheus' text format"),
        (200, b"up 1\n", "expected metrics of a paceline server"),
        (200, b"\xff\xfe", "no metrics at"),
        (200, b"\x1b[2J{\x07=\r1} x\n", "no metrics at"),
    ],
)
def test_once_at_another_kind_of_server_prints_one_line_and_exits_with_status_1(
    status: int, body: bytes, fault: str
) -> None:
    with other_server(status, body) as port:
        result = top_once(port)
    assert (result.exit_code, result.stdout) == (1, "")
    assert fault in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.rstrip("\n").isprintable()


@pytest.mark.parametrize("given", ["ftp://x/metrics", "file:///etc/passwd"])
def test_once_reads_nothing_but_http(given: str) -> None:
    result = CliRunner().invoke(main, ["top", "--once", "--metrics", given])
    assert result.exit_code == 2
    assert "expected HOST:PORT or the URL of an HTTP server" in result.stderr


def test_once_on_a_unix_socket_says_that_metrics_have_none() -> None:
    result = CliRunner().invoke(main, ["top", "--once", "--metrics", "unix:/run/p.sock"])
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: --metrics: expected HOST:PORT, as metrics are never on a Unix socket")


ENTERED, LEFT = "\x1b[?1049h", "\x1b[?1049l"

# Programs that a shell starts in the background ignore SIGINT, and so do their children: these tests and `top`.
TOP = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from paceline.server.__main__ import main
main()
"""


@contextmanager
def started(port: int, stdout: int) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-c", TOP, "top", "--interval", "0.1", "--metrics", f"127.0.0.1:{port}"]
    # In its own process group, as under a shell: orphaned groups aren't stopped by SIGTSTP.
    process = subprocess.Popen(command, cwd=REPO, stdout=stdout, stdin=subprocess.DEVNULL, process_group=0)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def watching(port: int, stdout: int) -> Iterator[None]:
    with started(port, stdout) as process:
        yield
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


class Reader:
    """Collects the text that arrives at a file descriptor, in a thread."""

    def __init__(self, descriptor: int) -> None:
        self.text = ""
        self._descriptor = descriptor
        self._thread = threading.Thread(target=self._read)
        self._thread.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._descriptor, 65536)
            except OSError:  # how a terminal ends
                return
            if not data:
                return
            self.text += data.decode()

    def close(self) -> None:
        self._thread.join()
        os.close(self._descriptor)


def infer_once(server: ServerProcess, times: int) -> None:
    with InferenceClient(server.target) as client:
        for _ in range(times):
            client.infer("echo", {"INPUT0": np.ones((1, 16), np.float32)})


def rates(text: str) -> list[float]:
    """The requests per second of model `echo`, from each whole line that has them."""
    lines = text.rpartition("\n")[0].splitlines()
    return [float(line.split()[2]) for line in lines if line.startswith("echo") and line.split()[2] != "-"]


def test_view_survives_a_server_that_goes_away_and_comes_back(tmp_path: Path) -> None:
    write_identity(tmp_path)
    port = free_port()
    end, start = os.pipe()
    reader = Reader(end)
    with watching(port, start):
        os.close(start)
        eventually(lambda: "trying again every 0.1 s" in reader.text, "that nobody answers")
        for _ in range(2):
            before = len(reader.text)
            with ServerProcess(tmp_path, args=("--metrics-port", str(port))) as server:
                infer_once(server, 5)
                eventually(lambda: rates(reader.text[before:]), "the model's rate")  # noqa: B023 - called here
            gone = len(reader.text)
            eventually(lambda: "trying again" in reader.text[gone:], "that it is gone")  # noqa: B023 - called here
    reader.close()
    assert "Traceback" not in reader.text
    assert min(rates(reader.text)) >= 0


def test_view_in_a_terminal_leaves_the_alternate_screen(tmp_path: Path) -> None:
    write_identity(tmp_path)
    with ServerProcess(tmp_path) as server:
        ours, theirs = pty.openpty()
        reader = Reader(ours)
        with watching(server.metrics_port, theirs):
            os.close(theirs)
            eventually(lambda: "echo" in reader.text, "the model")
        reader.close()
    assert reader.text.startswith(ENTERED)
    assert reader.text.endswith(LEFT)


def test_view_in_a_terminal_restores_the_screen_while_suspended_and_on_termination() -> None:
    ours, theirs = pty.openpty()
    reader = Reader(ours)
    with started(free_port(), theirs) as process:
        os.close(theirs)
        eventually(lambda: "no answer" in reader.text, "a first look")
        process.send_signal(signal.SIGTSTP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        eventually(lambda: reader.text.endswith(LEFT), "the screen that was there before")
        stopped = len(reader.text)
        process.send_signal(signal.SIGCONT)
        eventually(lambda: "no answer" in reader.text[stopped:], "another look")
        assert reader.text[stopped:].startswith(ENTERED)
        process.terminate()
        assert process.wait(20) == 128 + signal.SIGTERM
    reader.close()
    assert reader.text.endswith(LEFT)


@pytest.mark.parametrize(
    ("args", "ending", "status"), [((), ">/dev/full", 1), (("--once",), ">/dev/full", 1), ((), ">&-", 2)]
)
def test_top_that_cannot_write_says_so(args: tuple[str, ...], ending: str, status: int) -> None:
    with other_server(200, b"paceline_ready 1\n") as port:
        command = [
            sys.executable,
            "-m",
            "paceline",
            "top",
            "--interval",
            "0.1",
            "--metrics",
            f"127.0.0.1:{port}",
            *args,
        ]
        done = subprocess.run(["sh", "-c", f'"$@" {ending}', "sh", *command], cwd=REPO, capture_output=True, timeout=60)
    assert done.returncode == status
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(b"Error: ")
