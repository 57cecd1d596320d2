"""Mode opentelemetry from end to end: W3C context in over gRPC, spans out over OTLP to a real receiver."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from paceline.backends.errors import ExecutionError
from paceline.protos import inference_pb2 as pb
from paceline.protos.inference_pb2_grpc import GRPCInferenceServiceStub
from paceline.server.config import Settings
from paceline.server.telemetry.trace_settings import OtlpTarget, TraceConfig, TraceSettings
from tests.calling_puppet import write_caller
from tests.harness import ServerProcess, write_identity
from tests.integration.collector import Collector, Seen, collecting
from tests.integration.serving import Served, echo_model, failure_of, serving
from tests.memory_models import MemoryModel
from tests.polling import eventually_async
from tests.wire import infer, rows_of_floats

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = ("traceparent", f"00-{TRACE}-{SPAN}-01")
UNSAMPLED = ("traceparent", f"00-{TRACE}-{SPAN}-00")
SERVER, INTERNAL = 2, 1
UNSET, ERROR = 0, 2
TOGETHER = "max_batch_size: 4 dynamic_batching { preferred_batch_size: 4 max_queue_delay_microseconds: 60000000 }"


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@asynccontextmanager
async def traced(
    folder: Path, collector: Collector, model: MemoryModel | None = None, config: str = "", **how: Any
) -> AsyncIterator[Served]:
    """A server that traces; when it has ended, the collector has everything."""
    settings = TraceSettings(**{"timestamps": True, "rate": 1, **how})
    target = OtlpTarget(collector.url, {"zone": "a"})
    whole = Settings(paths=(folder,), trace=TraceConfig(settings=settings, otlp=target), allow_remote_settings=True)
    async with serving(folder, {"m": model or echo_model()}, config=config, settings=whole) as served:
        yield served


def request(rows: int = 1, id: str = "") -> pb.ModelInferRequest:
    return infer("m", {"a": rows_of_floats(rows)}, id=id)


async def call(served: Served, message: pb.ModelInferRequest, *headers: tuple[str, str]) -> pb.ModelInferResponse:
    answer: pb.ModelInferResponse = await served.stub.ModelInfer(message, timeout=20, metadata=headers)
    return answer


def lies_within(inner: Seen, outer: Seen) -> bool:
    return outer.start_ns <= inner.start_ns <= inner.end_ns <= outer.end_ns


async def test_request_is_a_server_span_in_its_callers_trace_with_queue_and_compute(
    tmp_path: Path, collector: Collector
) -> None:
    before_ns = time.time_ns()
    async with traced(tmp_path, collector) as served:
        await call(served, request(3, "r7"), SAMPLED, ("tracestate", "vendor=1"))
    span = collector.one("infer m")
    assert (span.trace, span.parent, span.kind, span.status) == (TRACE, SPAN, SERVER, UNSET)
    assert span.state == "vendor=1"
    assert span.attributes == {
        "rpc.system": "grpc",
        "rpc.service": "inference.GRPCInferenceService",
        "rpc.grpc.status_code": 0,
        "paceline.model.name": "m",
        "paceline.model.version": "1",
        "paceline.request.id": "r7",
        "paceline.rows": 3,
    }
    assert (span.resource["service.name"], span.resource["zone"]) == ("paceline", "a")
    assert before_ns <= span.start_ns <= span.end_ns <= time.time_ns()
    queue, compute = collector.children(span)
    assert (queue.name, compute.name) == ("queue", "compute")
    assert queue.trace == compute.trace == TRACE
    assert queue.end_ns == compute.start_ns
    assert lies_within(queue, span)
    assert lies_within(compute, span)
    assert compute.links == [collector.one("batch m").id]


async def test_batch_has_a_separate_trace_linked_to_its_requests(tmp_path: Path, collector: Collector) -> None:
    async with traced(tmp_path, collector, config=TOGETHER) as served:
        await asyncio.gather(call(served, request(1), SAMPLED), call(served, request(3)))
    batch = collector.one("batch m")
    requests = collector.named("infer m")
    assert len(requests) == 2
    assert (batch.parent, batch.kind, batch.status) == ("", INTERNAL, UNSET)
    assert batch.trace not in {span.trace for span in requests}
    assert sorted(batch.links) == sorted(span.id for span in requests)
    assert batch.attributes.pop("paceline.batch.id").endswith("-1")
    assert batch.attributes == {
        "paceline.model.name": "m",
        "paceline.model.version": "1",
        "paceline.batch.requests": 2,
        "paceline.batch.rows": 4,
        "paceline.batch.padded_rows": 4,
    }
    assert batch.events == ["COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START"]
    assert {span.links[0] for span in collector.named("compute")} == {batch.id}


async def test_unsampled_caller_has_no_spans(tmp_path: Path, collector: Collector) -> None:
    async with traced(tmp_path, collector) as served:
        await call(served, request(), UNSAMPLED)
    assert collector.spans == []


@pytest.mark.parametrize(("how", "expected"), [({"rate": 0}, 1), ({"rate": 2}, 3), ({"rate": 1, "count": 1}, 2)])
async def test_sampled_callers_are_traced_regardless_of_rate_and_count(
    tmp_path: Path, collector: Collector, how: dict[str, int], expected: int
) -> None:
    async with traced(tmp_path, collector, **how) as served:
        for _ in range(4):
            await call(served, request())
        await call(served, request(), SAMPLED)
    spans = collector.named("infer m")
    assert len(spans) == expected
    assert sum(span.trace == TRACE for span in spans) == 1


@pytest.mark.parametrize("header", ["", "00-0-0-01", "ff", "00-" + "0" * 32 + f"-{SPAN}-01", "x" * 1000])
async def test_request_with_an_invalid_trace_context_starts_a_new_trace(
    tmp_path: Path, collector: Collector, header: str
) -> None:
    async with traced(tmp_path, collector) as served:
        await call(served, request(), ("traceparent", header))
    span = collector.one("infer m")
    assert span.parent == ""
    assert span.trace != TRACE


async def test_level_off_traces_nothing_until_a_client_switches_it_on(tmp_path: Path, collector: Collector) -> None:
    async with traced(tmp_path, collector, timestamps=False) as served:
        await call(served, request(id="before"), SAMPLED)
        change = pb.TraceSettingRequest(model_name="m")
        change.settings["trace_level"].value.append("TIMESTAMPS")
        answer = await served.stub.TraceSetting(change, timeout=20)
        assert list(answer.settings["trace_mode"].value) == ["opentelemetry"]
        await call(served, request(id="after"), SAMPLED)
    assert collector.one("infer m").attributes["paceline.request.id"] == "after"


async def test_requests_of_a_stream_are_child_spans_of_the_streams_caller(tmp_path: Path, collector: Collector) -> None:
    async with traced(tmp_path, collector) as served:
        stream = served.stub.ModelStreamInfer(iter([request(id="a"), request(id="b")]), metadata=(SAMPLED,), timeout=20)
        assert [answer.infer_response.id async for answer in stream] == ["a", "b"]
    spans = collector.named("infer m")
    assert [(span.attributes["paceline.request.id"], span.parent) for span in spans] == [("a", SPAN), ("b", SPAN)]


async def test_failed_batch_is_an_error_in_its_span_and_those_of_its_requests(
    tmp_path: Path, collector: Collector
) -> None:
    model = echo_model()
    model.faults.raise_next(ExecutionError("no good"), times=1)
    async with traced(tmp_path, collector, model) as served:
        code, _ = await failure_of(call(served, request()))
        assert code is grpc.StatusCode.INTERNAL
    span, batch, compute = collector.one("infer m"), collector.one("batch m"), collector.one("compute")
    assert span.status == batch.status == compute.status == ERROR
    assert span.attributes["rpc.grpc.status_code"] == 13
    assert (batch.attributes["error.type"], batch.attributes["error.message"]) == ("ExecutionError", "no good")


async def test_request_rerun_after_its_neighbour_failed_has_spans_of_each_execution(
    tmp_path: Path, collector: Collector
) -> None:
    model = echo_model()
    model.faults.raise_when(lambda inputs: bool((inputs[0] < 0).any()), ExecutionError("negative"))
    bad = infer("m", {"a": -1 - rows_of_floats(1)}, id="bad")
    async with traced(tmp_path, collector, model, TOGETHER) as served:
        outcomes = await asyncio.gather(call(served, request(3, "good")), call(served, bad), return_exceptions=True)
        assert isinstance(outcomes[1], grpc.aio.AioRpcError)
    good = next(span for span in collector.named("infer m") if span.attributes["paceline.request.id"] == "good")
    names = [(span.name, span.status) for span in collector.children(good)]
    assert names == [("queue", UNSET), ("compute", ERROR), ("queue", UNSET), ("compute", UNSET)]
    children = collector.children(good)
    assert [span.end_ns for span in children[:-1]] == [span.start_ns for span in children[1:]]
    assert len(collector.named("batch m")) == 3


async def test_split_request_has_queue_and_compute_spans_for_each_part(tmp_path: Path, collector: Collector) -> None:
    config = 'max_batch_size: 2 parameters { key: "paceline.split_oversized" value { string_value: "true" } }'
    async with traced(tmp_path, collector, config=config) as served:
        await call(served, request(5))
    span = collector.one("infer m")
    assert sorted(child.name for child in collector.children(span)) == ["compute"] * 3 + ["queue"] * 3
    assert [batch.links for batch in collector.named("batch m")] == [[span.id]] * 3


@pytest.mark.parametrize(
    ("message", "number", "status", "error"),
    [
        (infer("nosuch", {"a": rows_of_floats(1)}), 5, UNSET, "ModelNotFound"),
        (infer("m", {"b": rows_of_floats(1)}), 3, UNSET, "InvalidRequest"),
    ],
)
async def test_refused_request_is_a_span_with_its_status_and_no_children(
    tmp_path: Path, collector: Collector, message: pb.ModelInferRequest, number: int, status: int, error: str
) -> None:
    async with traced(tmp_path, collector) as served:
        await failure_of(call(served, message, SAMPLED))
    (span,) = collector.spans
    assert (span.attributes["rpc.grpc.status_code"], span.status) == (number, status)
    assert span.attributes["error.type"] == error


async def test_request_that_times_out_in_the_queue_has_a_queue_span(tmp_path: Path, collector: Collector) -> None:
    model = echo_model()
    config = "dynamic_batching { default_queue_policy { allow_timeout_override: true } }"
    late_request = request(id="late")
    late_request.parameters["timeout"].int64_param = 1000  # for this one only: the request it waits for has no timeout
    async with traced(tmp_path, collector, model, config) as served:
        model.gate.close()
        busy = asyncio.create_task(call(served, request(id="busy")))
        await eventually_async(lambda: model.gate.entered, "an execution")
        code, _ = await failure_of(call(served, late_request))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        model.gate.open()
        await busy
    late = next(span for span in collector.named("infer m") if span.attributes["paceline.request.id"] == "late")
    assert (late.status, [child.name for child in collector.children(late)]) == (ERROR, ["queue"])


async def test_cancelled_request_ends_its_span_and_the_next_is_unaffected(tmp_path: Path, collector: Collector) -> None:
    model = echo_model()
    async with traced(tmp_path, collector, model) as served:
        model.gate.close()
        busy = asyncio.create_task(call(served, request(id="busy")))
        await eventually_async(lambda: model.gate.entered, "an execution")
        gone = served.stub.ModelInfer(request(id="gone"), timeout=20)
        await eventually_async(lambda: served.waiting("m") == 1, "a request that waits")
        gone.cancel()
        await eventually_async(lambda: served.waiting("m") == 0, "that it has left")
        model.gate.open()
        await busy
        await call(served, request(id="next"))
    spans = {span.attributes["paceline.request.id"]: span for span in collector.named("infer m")}
    assert spans["gone"].attributes["rpc.grpc.status_code"] == 1
    assert spans["gone"].status == UNSET
    assert spans["next"].attributes["rpc.grpc.status_code"] == 0


def infer_once(server: ServerProcess, *headers: tuple[str, str]) -> None:
    message = infer("echo", {"INPUT0": np.ones((1, 16), np.float32)})
    with grpc.insecure_channel(server.target) as channel:
        stub: Any = GRPCInferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        stub.ModelInfer(message, timeout=20, metadata=headers)


def test_serve_command_traces_by_flags_and_opentelemetrys_variables(tmp_path: Path, collector: Collector) -> None:
    write_identity(tmp_path)
    args = ("--trace-config", "mode=opentelemetry", "--trace-config", "level=TIMESTAMPS", "--trace-config", "rate=0")
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_SERVICE_NAME": "vision"}
    with ServerProcess(tmp_path, args=args, env=env) as server:
        infer_once(server)
        infer_once(server, SAMPLED)
    span = collector.one("infer echo")
    assert (span.trace, span.parent, span.resource["service.name"]) == (TRACE, SPAN, "vision")


def test_missing_collector_fails_no_request_and_hardly_delays_the_stop(tmp_path: Path) -> None:
    write_identity(tmp_path)
    given = ("url=http://127.0.0.1:1", "level=TIMESTAMPS", "rate=1", "bsp_schedule_delay=1")
    with ServerProcess(tmp_path, args=[part for one in given for part in ("--trace-config", one)]) as server:
        for _ in range(3):
            infer_once(server)
        began_s = time.monotonic()
        assert server.terminate() == 0
        assert time.monotonic() - began_s < 15
    assert not [line for line in server.stderr if not line.startswith("{")]
    assert any(record["logger"].startswith("opentelemetry.") for record in server.log)


async def test_call_of_a_model_is_a_child_of_the_request_it_is_made_for(tmp_path: Path, collector: Collector) -> None:
    code = np.array([[b"models['echo'].infer({'a': x})"]], object)
    write_caller(tmp_path, calls="echo")
    target = TraceConfig(settings=TraceSettings(timestamps=True, rate=1), otlp=OtlpTarget(collector.url))
    settings = Settings(paths=(tmp_path,), trace=target, allow_python_models=True)
    async with serving(tmp_path, {"echo": echo_model()}, settings=settings) as served:
        await call(served, infer("m", {"run": code, "x": rows_of_floats(1, 16)}), SAMPLED)
    outer, inner = collector.one("infer m"), collector.one("infer echo")
    assert (outer.trace, inner.trace, inner.parent) == (TRACE, TRACE, outer.id)
    assert lies_within(inner, outer)
