"""Which requests become spans, as OpenTelemetry's own in-memory exporter gets them; and that servers that don't trace
import nothing of it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from paceline.scheduler.errors import QueueTimeout
from tests.harness import REPO

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@dataclass
class Sampling:
    on: bool = True
    picked: bool = True

    def is_on(self, model: str) -> bool:
        return self.on

    def picks(self, model: str) -> bool:
        return self.on and self.picked


@dataclass
class Bench:
    spans: Any
    sampling: Sampling
    exporter: Any

    def exported(self) -> list[Any]:
        self.spans.close()
        return list(self.exporter.get_finished_spans())


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    pytest.importorskip("opentelemetry.sdk", reason="the extra otel isn't installed")
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from paceline.server.telemetry.spans import Spans
    from paceline.server.telemetry.trace_settings import OtlpTarget

    monkeypatch.setattr("paceline.server.telemetry.spans._PATIENCE_S", 60.0)
    exporter, sampling = InMemorySpanExporter(), Sampling()
    spans = Spans(OtlpTarget(), sampling.is_on, sampling.picks, exporter)
    spans.start()
    yield Bench(spans, sampling, exporter)
    spans.close()


@pytest.mark.parametrize(
    ("on", "picked", "flags", "expected"),
    [
        (True, True, None, True),
        (True, False, None, False),
        (False, True, None, False),
        (True, False, "01", True),
        (True, True, "00", False),
        (False, True, "01", False),
    ],
)
def test_begin_traces_requests_picked_by_the_caller_or_else_by_sampling(
    bench: Bench, on: bool, picked: bool, flags: str | None, expected: bool
) -> None:
    bench.sampling.on, bench.sampling.picked = on, picked
    parent = (f"00-{TRACE}-{SPAN}-{flags}", "vendor=1") if flags else None
    span = bench.spans.begin("m", "r", 1, parent)
    assert (span is not None) == expected
    if span is not None:
        span.end(None)
    assert len(bench.exported()) == expected


def test_begin_keeps_the_trace_state_of_other_vendors(bench: Bench) -> None:
    bench.spans.begin("m", "", 1, (f"00-{TRACE}-{SPAN}-01", "a=1,b=2")).end(None)
    (span,) = bench.exported()
    assert dict(span.context.trace_state) == {"a": "1", "b": "2"}
    assert format(span.context.trace_id, "032x") == TRACE


def test_end_with_a_long_error_keeps_its_beginning(bench: Bench) -> None:
    bench.spans.begin("m", "", 1, None).end(ValueError("x" * 10_000))
    (span,) = bench.exported()
    assert span.attributes["error.message"] == "x" * 2_000
    assert span.attributes["rpc.grpc.status_code"] == 13


def test_end_in_the_queue_has_the_wait_as_a_child(bench: Bench) -> None:
    request = bench.spans.begin("m", "", 1, None)
    request.on_taken("3", 2)
    request.end(QueueTimeout(5))
    queue, span = bench.exported()
    assert (queue.name, span.name) == ("queue", "infer m")
    assert queue.parent.span_id == span.context.span_id
    assert queue.end_time == span.end_time


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=REPO, capture_output=True, text=True, timeout=60)


def test_server_without_tracing_imports_nothing_of_opentelemetry(tmp_path: Path) -> None:
    code = f"""
import asyncio, sys
from pathlib import Path
from paceline.server.app import Server
from paceline.server.config import ControlMode, Settings

async def main():
    server = Server(
        Settings(
            paths=(Path({str(tmp_path)!r}),),
            model_control_mode=ControlMode.EXPLICIT,
            grpc_address="127.0.0.1",
            grpc_port=0,
            metrics_port=None,
        )
    )
    await server.start()
    await server.stop(1)

asyncio.run(main())
sys.exit(any(name.split(".")[0] == "opentelemetry" for name in sys.modules))
"""
    assert run(code).returncode == 0


def test_server_without_the_extra_says_what_to_install() -> None:
    code = """
import sys
sys.modules["opentelemetry"] = None
from paceline.server.cli import main
main(["serve", "x.onnx", "--trace-config", "mode=opentelemetry", "--grpc-port", "0", "--metrics-port", "0"])
"""
    done = run(code)
    assert done.returncode == 1
    assert "Error: --trace-config: mode opentelemetry needs more packages: pip install 'opentelemetry-" in done.stderr
    assert "Traceback" not in done.stderr
