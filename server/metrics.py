"""Counters and histograms, in Prometheus' text format on a port of their own.

Lives here: names, labels, and the observer that feeds them. Must not: decide anything. Names are Triton's where the
meaning is the same; what Triton lacks begins with `paceline_`.
"""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from threading import Thread

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, Gauge, Histogram, generate_latest

from backends.base import Execution
from scheduler.observer import BatchReport, Drop
from server.addresses import resolve

__all__ = ["Metrics", "MetricsEndpoint", "ModelMetrics"]

_log = logging.getLogger("paceline.server.metrics")

_LABELS = ("model", "version")
_REASONS = {
    Drop.FULL_REQUESTS: "REJECTED",
    Drop.FULL_ROWS: "REJECTED",
    Drop.FULL_BYTES: "REJECTED",
    Drop.CLOSED: "REJECTED",
    Drop.EXPIRED: "REJECTED",
    Drop.UNREACHABLE: "REJECTED",
    Drop.CANCELLED: "CANCELED",
}
_ALL_REASONS = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
_ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_SILENCE_S = 10
"""How long a connection may keep a thread waiting for its request."""
_WAIT_BUCKETS_US = (100, 250, 500, 1_000, 2_500, 5_000, 10_000, 25_000, 50_000, 100_000, 250_000, 1_000_000, 10_000_000)


class Metrics:
    """The metric families of one server, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        self._counters: list[str] = []

        def counter(name: str, what: str, *labels: str) -> Gauge:
            # The library's Counter would append `_total` to names that dashboards know without it.
            self._counters.append(name)
            return Gauge(name, what, (*_LABELS, *labels), registry=self.registry)

        self.success = counter("nv_inference_request_success", "Requests executed without failure")
        self.failure = counter("nv_inference_request_failure", "Requests failed, by reason", "reason")
        self.rows = counter("nv_inference_count", "Rows executed")
        self.executions = counter("nv_inference_exec_count", "Batches executed")
        self.request_us = counter("nv_inference_request_duration_us", "Time from queueing to the end of execution")
        self.queue_us = counter("nv_inference_queue_duration_us", "Time in the queue")
        self.input_us = counter("nv_inference_compute_input_duration_us", "Time stacking inputs, per request")
        self.infer_us = counter("nv_inference_compute_infer_duration_us", "Time in the model, per request")
        self.output_us = counter("nv_inference_compute_output_duration_us", "Time splitting outputs, per request")
        self.dropped = counter("paceline_dropped_requests", "Requests that were not executed, by reason", "reason")
        self.padding = counter("paceline_padding_rows", "Rows executed to fill batches up to an allowed size")
        self.pending = Gauge(
            "nv_inference_pending_request_count", "Requests waiting to execute", _LABELS, registry=self.registry
        )
        self.lanes = Gauge("paceline_lanes", "Shape keys with requests waiting", _LABELS, registry=self.registry)
        self.batch_rows = Histogram(
            "paceline_batch_rows", "Rows per executed batch", _LABELS, registry=self.registry, buckets=_ROW_BUCKETS
        )
        self.wait_us = Histogram(
            "paceline_queue_wait_us",
            "Time a request waited, in microseconds",
            _LABELS,
            registry=self.registry,
            buckets=_WAIT_BUCKETS_US,
        )

    def model(self, name: str, version: str) -> ModelMetrics:
        """The observer for one version of a model."""
        return ModelMetrics(self, name, version)

    def text(self) -> bytes:
        """Everything, in Prometheus' text format 0.0.4."""
        text = generate_latest(self.registry).decode()
        names = "|".join(self._counters)
        return re.sub(rf"^# TYPE ({names}) gauge$", r"# TYPE \1 counter", text, flags=re.MULTILINE).encode()


class ModelMetrics:
    """Feeds the families for one model; an `Observer` of its batcher."""

    def __init__(self, metrics: Metrics, model: str, version: str) -> None:
        labels = {"model": model, "version": version}
        self._success = metrics.success.labels(**labels)
        self._failure = {reason: metrics.failure.labels(**labels, reason=reason) for reason in _ALL_REASONS}
        self._rows = metrics.rows.labels(**labels)
        self._executions = metrics.executions.labels(**labels)
        self._request_us = metrics.request_us.labels(**labels)
        self._queue_us = metrics.queue_us.labels(**labels)
        self._input_us = metrics.input_us.labels(**labels)
        self._infer_us = metrics.infer_us.labels(**labels)
        self._output_us = metrics.output_us.labels(**labels)
        self._dropped = {drop: metrics.dropped.labels(**labels, reason=drop.value) for drop in Drop}
        self._padding = metrics.padding.labels(**labels)
        self._pending = metrics.pending.labels(**labels)
        self._lanes = metrics.lanes.labels(**labels)
        self._batch_rows = metrics.batch_rows.labels(**labels)
        self._wait_us = metrics.wait_us.labels(**labels)

    def watch(self, waiting: Callable[[], int], lanes: Callable[[], int]) -> None:
        """Read the gauges from here when somebody asks."""
        self._pending.set_function(waiting)
        self._lanes.set_function(lanes)

    def on_drop(self, drop: Drop) -> None:
        self._failure[_REASONS[drop]].inc()
        self._dropped[drop].inc()

    def on_batch(self, report: BatchReport) -> None:
        requests = len(report.waits_ns)
        if report.error is not None:
            self._failure["BACKEND"].inc(report.failed)
            self._failure["CANCELED"].inc(report.cancelled)
            return
        waited_ns = sum(report.waits_ns)
        self._success.inc(requests)
        self._failure["CANCELED"].inc(report.cancelled)
        self._rows.inc(report.rows)
        self._executions.inc()
        self._padding.inc(report.padded_rows - report.rows)
        self._queue_us.inc(waited_ns // 1_000)
        self._request_us.inc((waited_ns + requests * (report.finished_ns - report.started_ns)) // 1_000)
        self._batch_rows.observe(report.rows)
        for wait_ns in report.waits_ns:
            self._wait_us.observe(wait_ns / 1_000)
        if isinstance(report.execution, Execution):
            self._input_us.inc(requests * report.execution.input_ns // 1_000)
            self._infer_us.inc(requests * report.execution.infer_ns // 1_000)
            self._output_us.inc(requests * report.execution.output_ns // 1_000)


class _HttpServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family, where = resolve(address, port)
        super().__init__(where, handler)

    def server_bind(self) -> None:
        """Without the base class's look-up of a name for the address, which waits for a name service out of reach."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def handle_error(self, request: object, client_address: object) -> None:
        """A scraper that broke off is no news; the base class would print a traceback."""
        _log.debug("the answer to %s failed", client_address, exc_info=True)


class MetricsEndpoint:
    """`GET /metrics` for scrapers, on a thread of its own. Port 0 takes a free one. Raises OSError."""

    def __init__(self, metrics: Metrics, address: str, port: int) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = _SILENCE_S

            def do_GET(self) -> None:
                if self.path.partition("?")[0] != "/metrics":
                    self.send_error(404)
                    return
                body = metrics.text()
                self.send_response(200)
                self.send_header("Content-Type", CONTENT_TYPE_PLAIN_0_0_4)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass  # a scrape every few seconds is no news

        self._server = _HttpServer(address, port, Handler)
        self._thread = Thread(target=self._server.serve_forever, args=(None,), name="metrics", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return self._server.server_port

    def close(self) -> None:
        """Stop listening. The thread sleeps until somebody connects, so that an idle server wakes for nothing."""
        stopper = Thread(target=self._server.shutdown)
        stopper.start()
        while stopper.is_alive():
            socket.create_connection((self._server.server_name, self.port), timeout=1).close()
            stopper.join(0.05)
        self._thread.join()
        self._server.server_close()
