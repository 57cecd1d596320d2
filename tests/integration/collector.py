"""A collector that receives spans over gRPC, as OpenTelemetry's packages send them, and keeps them.

Lives here: the receiver, and spans in a form that can be compared. Must not: assertions about behaviour. A test module
that imports it is skipped if the extra `otel` isn't installed.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

pytest.importorskip("opentelemetry.sdk", reason="the extra otel isn't installed")

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

__all__ = ["Collector", "Seen", "collecting"]


@dataclass(frozen=True)
class Seen:
    """One span. Times are nanoseconds since the epoch; ids are hexadecimal."""

    name: str
    trace: str
    state: str
    id: str
    parent: str
    kind: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    links: list[str]
    events: list[str]
    status: int
    resource: dict[str, Any]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):  # type: ignore[misc]
    """Receives spans on `port`."""

    def __init__(self) -> None:
        self.spans: list[Seen] = []
        self.port = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def Export(self, request: Any, context: Any) -> Any:
        for one in request.resource_spans:
            resource = _values(one.resource.attributes)
            self.spans += [_seen(span, resource) for scope in one.scope_spans for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, name: str) -> list[Seen]:
        """Sorted by start time."""
        return sorted((span for span in self.spans if span.name == name), key=lambda span: span.start_ns)

    def one(self, name: str) -> Seen:
        (span,) = self.named(name)
        return span

    def children(self, parent: Seen) -> list[Seen]:
        found = (span for span in self.spans if span.parent == parent.id)
        return sorted(found, key=lambda span: (span.start_ns, span.end_ns))


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector on a free port."""
    collector = Collector()
    server = grpc.server(ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    collector.port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield collector
    finally:
        server.stop(0).wait()


def _seen(span: Any, resource: dict[str, Any]) -> Seen:
    return Seen(
        name=span.name,
        trace=span.trace_id.hex(),
        state=span.trace_state,
        id=span.span_id.hex(),
        parent=span.parent_span_id.hex(),
        kind=span.kind,
        start_ns=span.start_time_unix_nano,
        end_ns=span.end_time_unix_nano,
        attributes=_values(span.attributes),
        links=[link.span_id.hex() for link in span.links],
        events=[event.name for event in span.events],
        status=span.status.code,
        resource=resource,
    )


def _values(attributes: Any) -> dict[str, Any]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}
