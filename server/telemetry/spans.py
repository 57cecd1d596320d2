"""Spans of requests and batches, for OpenTelemetry. The only module that knows its packages; it is imported only if the
server sends traces there.

Lives here: which spans there are, and the pipeline that exports them. Must not: decide which requests are traced
(tracing), or change what happens to one. Everything runs on the event loop except the export, on a thread of the SDK's.

A request is a span of kind SERVER, child of the one that its caller's headers name, with children `queue` and
`compute`, one of each for every time it was executed. A batch belongs to all of its requests: it is the root of a trace
of its own, with links to those that are traced, and `compute` has a link to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from threading import Timer

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON
from opentelemetry.trace import Link, Span, SpanKind, Status, StatusCode, Tracer, get_current_span, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from paceline.backends.base import Execution
from paceline.scheduler.observer import BatchReport, Drop, Observer
from paceline.scheduler.request import AnyRequest
from paceline.server.call_facts import TraceParent
from paceline.server.errors import status_of
from paceline.server.telemetry.trace_settings import OtlpTarget

_SERVICE = "inference.GRPCInferenceService"
_MAX_CHARACTERS = 2_000
_PATIENCE_S = 3.0
# Statuses for which the server is to blame. Source: OpenTelemetry's semantic conventions for gRPC.
_SERVERS_FAULT = frozenset({"UNKNOWN", "DEADLINE_EXCEEDED", "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS"})


class Spans:
    """Traces requests and batches between `start` and `close`. By model, `is_on` says whether to trace requests whose
    callers' traces are sampled, `picks` whether to trace one that belongs to no trace yet. `exporter` replaces the one
    for `target`."""

    def __init__(
        self,
        target: OtlpTarget,
        is_on: Callable[[str], bool],
        picks: Callable[[str], bool],
        exporter: SpanExporter | None = None,
    ) -> None:
        self._target = target
        self._is_on, self._picks = is_on, picks
        self._exporter = exporter
        self._propagator = TraceContextTextMapPropagator()
        self._provider: TracerProvider | None = None
        self._tracer: Tracer

    def start(self) -> None:
        """Start to export. What the target's fields leave open is up to OpenTelemetry's own environment variables."""
        target = self._target
        self._exporter = self._exporter or OTLPSpanExporter(endpoint=target.url or None)
        of_environment = OTELResourceDetector().detect()
        resource = Resource.create({SERVICE_NAME: "paceline"}).merge(of_environment).merge(Resource(target.resource))
        self._provider = TracerProvider(sampler=ALWAYS_ON, resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._exporter,
                max_queue_size=target.max_queue_size,
                schedule_delay_millis=target.schedule_delay_ms,
                max_export_batch_size=target.max_export_batch_size,
            )
        )
        self._tracer = self._provider.get_tracer("paceline")

    def close(self) -> None:
        """Export what is left, and end. Blocks, but not for long if nobody takes it."""
        if self._provider is None or self._exporter is None:
            return
        # The provider would wait for half a minute; an exporter that is shut down gives up what it was trying.
        impatience = Timer(_PATIENCE_S, self._exporter.shutdown)
        impatience.start()
        self._provider.shutdown()
        impatience.cancel()

    def begin(self, model: str, request_id: str, began_ns: int, parent: TraceParent | None) -> RequestSpan | None:
        """The span of a request that arrived at `began_ns`; None if it isn't to be traced."""
        context = (
            Context()
            if parent is None
            else self._propagator.extract({"traceparent": parent[0], "tracestate": parent[1]}, Context())
        )
        caller = get_current_span(context).get_span_context()
        is_traced = (caller.trace_flags.sampled and self._is_on(model)) if caller.is_valid else self._picks(model)
        if not is_traced:
            return None
        return RequestSpan(self._tracer, context, model, request_id, began_ns)

    def observer(self, model: str, version: str, batch_id_prefix: str, inner: Observer) -> Observer:
        """For a batcher: passes everything on to `inner`, and traces the batches of traced requests."""
        return _BatchSpans(self._tracer, model, version, batch_id_prefix, inner)


class RequestSpan:
    """A request that is traced. Times that come in are monotonic; those of spans are wall-clock times, by the clock's
    offset when the request arrived, so that a clock that jumps doesn't tear spans apart."""

    def __init__(self, tracer: Tracer, context: Context, model: str, request_id: str, began_ns: int) -> None:
        self._tracer = tracer
        self._model = model
        self._offset_ns = _offset_ns()
        self._taken_ns = 0
        # By part: when its last execution ended. Most requests have one part only. No part gets the id of another: none
        # goes before all are made (`server.requests.parts`). The parts themselves would lead back to this span.
        self._executed: dict[int, int] = {}
        attributes: dict[str, str | int] = {
            "rpc.system": "grpc",
            "rpc.service": _SERVICE,
            "paceline.model.name": model,
        }
        if request_id:
            attributes["paceline.request.id"] = request_id
        self.span: Span = tracer.start_span(
            "infer", context, SpanKind.SERVER, attributes, start_time=began_ns + self._offset_ns
        )
        self._own = set_span_in_context(self.span, Context())

    @property
    def trace_id(self) -> str:
        return format(self.span.get_span_context().trace_id, "032x")

    @property
    def as_parent(self) -> TraceParent:
        """What belongs to this request names it so."""
        own = self.span.get_span_context()
        return f"00-{own.trace_id:032x}-{own.span_id:016x}-{own.trace_flags:02x}", own.trace_state.to_header()

    def on_taken(self, version: str, rows: int) -> None:
        """It is queued from now on. Only now is its model's name known to exist, and fit for a span's name."""
        self._taken_ns = time.monotonic_ns()
        self.span.update_name(f"infer {self._model}")
        self.span.set_attributes({"paceline.model.version": version, "paceline.rows": rows})

    def on_execution(self, entry: AnyRequest, batch: Span, report: BatchReport) -> None:
        """It, or a part of it, was executed in `batch`."""
        part = id(entry)
        self._child("queue", self._executed.get(part, entry.arrived_ns), report.started_ns)
        self._executed[part] = report.finished_ns
        self._child("compute", report.started_ns, report.finished_ns, batch, report.error)

    def end(self, error: BaseException | None) -> None:
        """It has its answer, or ended with `error`."""
        ended_ns = time.monotonic_ns()
        if self._taken_ns and not self._executed:
            self._child("queue", self._taken_ns, ended_ns)
        number, name = 0, "OK"
        if error is not None:
            code = status_of(error)
            number, name = (13, "INTERNAL") if code is None else (code.value[0], code.name)
            _tell_error(self.span, error, is_ours=name in _SERVERS_FAULT)
        self.span.set_attribute("rpc.grpc.status_code", number)
        self.span.end(ended_ns + self._offset_ns)

    def _child(
        self, name: str, start_ns: int, end_ns: int, batch: Span | None = None, error: BaseException | None = None
    ) -> None:
        links = [Link(batch.get_span_context())] if batch is not None else []
        span = self._tracer.start_span(name, self._own, links=links, start_time=start_ns + self._offset_ns)
        if error is not None:
            _tell_error(span, error)
        span.end(end_ns + self._offset_ns)


class _BatchSpans:
    """An `Observer` in front of another."""

    def __init__(self, tracer: Tracer, model: str, version: str, batch_id_prefix: str, inner: Observer) -> None:
        self._tracer = tracer
        self._model = model
        self._version = version
        self._batch_id_prefix = batch_id_prefix
        self._inner = inner

    def on_drop(self, drop: Drop) -> None:
        self._inner.on_drop(drop)

    def on_batch(self, report: BatchReport) -> None:
        """Record the batch's span, and in the span of each of its requests how it waited and was executed."""
        self._inner.on_batch(report)
        requests = [(one, one.tag.span) for one in report.requests if one.tag is not None and one.tag.span is not None]
        if not requests:
            return
        offset_ns = _offset_ns()
        span = self._tracer.start_span(
            f"batch {self._model}",
            Context(),
            attributes={
                "paceline.model.name": self._model,
                "paceline.model.version": self._version,
                "paceline.batch.id": f"{self._batch_id_prefix}-{report.number}",
                "paceline.batch.requests": len(report.requests),
                "paceline.batch.rows": report.rows,
                "paceline.batch.padded_rows": report.padded_rows,
            },
            links=[Link(request.span.get_span_context()) for _, request in requests],
            start_time=report.started_ns + offset_ns,
        )
        if isinstance(report.execution, Execution):
            inputs_end_ns = report.started_ns + report.execution.input_ns
            span.add_event("COMPUTE_INPUT_END", timestamp=inputs_end_ns + offset_ns)
            outputs_start_ns = inputs_end_ns + report.execution.infer_ns
            span.add_event("COMPUTE_OUTPUT_START", timestamp=outputs_start_ns + offset_ns)
        if report.error is not None:
            _tell_error(span, report.error)
        for part, request in requests:
            request.on_execution(part, span, report)
        span.end(report.finished_ns + offset_ns)


def _tell_error(span: Span, error: BaseException, *, is_ours: bool = True) -> None:
    text = str(error)[:_MAX_CHARACTERS]
    span.set_attributes({"error.type": type(error).__name__, "error.message": text})
    if is_ours:
        span.set_status(Status(StatusCode.ERROR, text))


def _offset_ns() -> int:
    """What to add to a monotonic time to get the wall clock's."""
    return time.time_ns() - time.monotonic_ns()
