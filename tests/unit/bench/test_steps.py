from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from bench.scenario import Closed, Side
from bench.steps import BenchError, Counters, Load, batch_figures
from bench.subjects import cpu_s, main_thread_cpu_s
from paceline.clients.load.sending import METHOD

REPORT = "Inferences/Second,p50 latency,p90 latency,p99 latency\n100.0,1000,2000,3000\n"


@dataclass(frozen=True, slots=True)
class FakeServer:
    """A server's address, by default of one that is never called; its process is unknown."""

    target: str = "host:1"
    pid: int = -1

    def __enter__(self) -> FakeServer:
        return self

    def __exit__(self, *exc: object) -> None: ...


def analyzer(folder: Path, unstable: int) -> Load:
    """A load by a stand-in for perf_analyzer, which finds too few answers `unstable` times and records its calls."""
    (folder / "made.csv").write_text(REPORT)
    binary = folder / "perf_analyzer"
    binary.write_text(f"""#!/bin/sh
        echo "$@" >> "{folder}/calls"
        [ $(wc -l < "{folder}/calls") -gt {unstable} ] || {{ echo "Failed to obtain stable measurement."; exit 2; }}
        while [ "$1" != -f ]; do shift; done
        cp "{folder}/made.csv" "$2"
        echo "Request count: 300"
    """)
    binary.chmod(0o755)
    side = Side("echo", "tiny", ((16,),))
    return Load(FakeServer(), (), Closed(8), "tiny", binary=binary, side=side)


def windows_ms(folder: Path) -> list[int]:
    calls = [line.split() for line in (folder / "calls").read_text().splitlines()]
    return [int(call[call.index("-p") + 1]) for call in calls]


@contextmanager
def slow_server(seconds: float) -> Iterator[str]:
    def infer(request: bytes, context: grpc.ServicerContext) -> bytes:
        time.sleep(seconds)
        return b"answer"

    _, service, method = METHOD.split("/")
    handler = grpc.method_handlers_generic_handler(service, {method: grpc.unary_unary_rpc_method_handler(infer)})
    server = grpc.server(ThreadPoolExecutor(2), handlers=[handler])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    server.stop(None).wait()


def test_load_warms_up_and_measures(tmp_path: Path) -> None:
    found = analyzer(tmp_path, unstable=0).measure(3.0, 1.5)
    assert (found["requests_per_s"], found["p99_ms"], found["answered"]) == (100.0, 3.0, 1.0)
    assert windows_ms(tmp_path) == [500, 1_000]


def test_load_with_too_few_answers_is_measured_for_longer(tmp_path: Path) -> None:
    assert analyzer(tmp_path, unstable=3).measure(3.0, 1.5)["requests_per_s"] == 100.0
    assert windows_ms(tmp_path) == [500, 1_000, 2_000, 4_000]


def test_load_with_hardly_any_answers_fails_in_the_end(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="no answer in some of 3 windows"):
        analyzer(tmp_path, unstable=99).measure(3.0, 1.5)
    assert len(windows_ms(tmp_path)) == 5


def test_batch_figures_are_rows_and_model_time_per_batch() -> None:
    before, after = Counters(10, 20, 5, 1_000), Counters(14, 28, 7, 9_000)
    assert batch_figures(before, after) == {"rows_per_batch": 4, "model_ms_per_batch": 2}


def test_batch_figures_are_empty_if_no_request_was_answered() -> None:
    before = Counters(10, 20, 5, 1_000)
    assert batch_figures(before, before._replace(batches=7, model_us=9_000)) == {}
    assert batch_figures(before, before) == batch_figures(None, before) == {}


def test_cpu_time_includes_child_processes() -> None:
    burn = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    start = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn!r}])"
    with subprocess.Popen([sys.executable, "-c", start], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        assert (cpu_s(process.pid) or 0) >= 0.29


def test_cpu_time_of_the_first_thread_is_its_own() -> None:
    burn = "def burn():\n    while time.thread_time() < 0.3: pass\n"
    run = f"import threading, time\n{burn}one = threading.Thread(target=burn)\none.start()\none.join()\n"
    run += "print(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", run], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        every, first = cpu_s(process.pid) or 0, main_thread_cpu_s(process.pid)
        assert first is not None
        assert every >= first + 0.1
    assert main_thread_cpu_s(process.pid) is None


def test_cpu_time_of_an_ended_process_is_unknown() -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    assert cpu_s(process.pid) is None
    assert cpu_s(os.getpid()) is not None


def test_our_own_load_without_an_answer_in_time_is_measured_for_longer(tmp_path: Path) -> None:
    request = tmp_path / "request"
    request.write_bytes(b"request")
    with slow_server(0.15) as target:
        found = Load(FakeServer(target), (request,), Closed(2), "tiny").measure(0.1, 0.0)
    assert found["requests_per_s"] > 0
