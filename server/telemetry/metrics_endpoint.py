"""The small HTTP server of the metrics, and of the probes of orchestrators.

Lives here: sockets and paths. Must not: know any metric, or what health is.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import TCPServer
from threading import Lock, Thread
from types import MappingProxyType
from typing import Any

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from server.addresses import resolve
from server.telemetry.metrics import Metrics

__all__ = ["MetricsEndpoint"]

_log = logging.getLogger("paceline.server.metrics")

_PLAIN = "text/plain; charset=utf-8"
_SILENCE_S = 10
"""How long a connection may be silent."""
_MAX_CONNECTIONS = 64
"""Each has a thread, and a client that sends a little now and then would keep it for ever."""


class _HttpServer(ThreadingHTTPServer):
    """One connection too many ends the oldest, so that nobody can keep scrapers and probes out."""

    daemon_threads = True
    # The base class has 5: in a larger burst, the rest would wait for a second before they try again.
    request_queue_size = 128

    def __init__(self, address: str, port: int, handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family, where = resolve(address, port)
        self._lock = Lock()
        self._connections: dict[socket.socket, None] = {}  # the oldest first
        super().__init__(where, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._connections[request] = None
            oldest = next(iter(self._connections)) if len(self._connections) > _MAX_CONNECTIONS else None
            if oldest is not None:
                del self._connections[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def server_bind(self) -> None:
        """Without the base class's look-up of the address's name, which would wait for an unreachable name service."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def handle_error(self, request: object, client_address: object) -> None:
        """A scraper that broke off is no news; the base class would print a traceback."""
        _log.debug("answering %s failed", client_address, exc_info=True)


class MetricsEndpoint:
    """`GET /metrics` for scrapers, on a thread of its own. Port 0 takes a free one. Raises OSError.

    `probes`, by path: each returns "" if all is well, answered with 200, or the reason why not, answered with 503. They
    may block; each call has a thread of its own.
    """

    def __init__(
        self, metrics: Metrics, address: str, port: int, probes: Mapping[str, Callable[[], str]] = MappingProxyType({})
    ) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = _SILENCE_S

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    self._answer(200, CONTENT_TYPE_PLAIN_0_0_4, metrics.text())
                elif path in probes:
                    why_not = probes[path]()
                    text = f"{why_not or 'ok'}\n".encode(errors="backslashreplace")
                    self._answer(503 if why_not else 200, _PLAIN, text)
                else:
                    self.send_error(404)

            do_HEAD = do_GET

            def _answer(self, status: int, kind: str, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
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
        """Stop listening. The thread sleeps until somebody connects, so that an idle server doesn't wake needlessly."""
        stopper = Thread(target=self._server.shutdown)
        stopper.start()
        while stopper.is_alive():
            # It may have woken already, and then accepts no more.
            with suppress(OSError):
                socket.create_connection((self._server.server_name, self.port), timeout=1).close()
            stopper.join(0.05)
        self._thread.join()
        self._server.server_close()
