"""The small HTTP server of the metrics, of the probes of orchestrators, and of pages for people.

Lives here: connections and paths. Must not: know any metric, or what health is.
"""

from __future__ import annotations

import errno
import logging
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from selectors import EVENT_READ, DefaultSelector
from threading import Lock, Thread
from types import MappingProxyType

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4

from paceline.server.addresses import listen
from paceline.server.files import in_utf8
from paceline.server.telemetry.metrics import Metrics

_log = logging.getLogger("paceline.server.metrics")

_PLAIN = "text/plain; charset=utf-8"
_HTML = "text/html; charset=utf-8"
_OF_PAGES = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}
"""Headers of pages: a browser runs no script in them and gets nothing else for them, whatever their text contains."""
_SILENCE_S = 10
"""How long a connection may be silent."""
_SCARCE = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM))
_PAUSE_S = 0.1
"""Until a connection is accepted that there was no descriptor or no memory for."""
_MAX_CONNECTIONS = 64
"""Each has a thread, and a client that sends a little now and then would keep it for ever. One too many ends the
oldest, so that nobody can keep scrapers and probes out."""


class MetricsEndpoint:
    """`GET /metrics` for scrapers, on threads of its own: they answer while the event loop is busy. Listens on what
    gRPC listens on for the same address. Port 0 takes a free one. Raises OSError.

    `probes`, by path: each returns "" if all is well, answered with 200, or the reason why not, answered with 503.
    `pages` return HTML, by path. All may block; each connection has a thread of its own. `absent` says why there is
    nothing at a path.
    """

    def __init__(
        self,
        metrics: Metrics,
        address: str,
        port: int,
        probes: Mapping[str, Callable[[], str]] = MappingProxyType({}),
        pages: Mapping[str, Callable[[], str]] = MappingProxyType({}),
        absent: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        class Handler(BaseHTTPRequestHandler):
            timeout = _SILENCE_S

            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    self._answer(200, CONTENT_TYPE_PLAIN_0_0_4, metrics.text())
                elif path in probes:
                    why_not = probes[path]()
                    self._answer(503 if why_not else 200, _PLAIN, in_utf8(f"{why_not or 'ok'}\n").encode())
                elif path in pages:
                    self._answer(200, _HTML, in_utf8(pages[path]()).encode(), _OF_PAGES)
                elif path in absent:
                    self._answer(404, _PLAIN, f"{absent[path]}\n".encode())
                else:
                    self.send_error(404)

            do_HEAD = do_GET

            def _answer(
                self, status: int, kind: str, body: bytes, more: Mapping[str, str] = MappingProxyType({})
            ) -> None:
                self.send_response(status)
                for name, value in {"Content-Type": kind, "Content-Length": str(len(body)), **more}.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass  # a scrape every few seconds is no news

        self._handler = Handler
        self._lock = Lock()
        self._connections: dict[socket.socket, None] = {}  # the oldest first
        self._listening = listen(address, port)
        self._end, self._ends = socket.socketpair()
        self._selector = DefaultSelector()  # here, as it takes a descriptor
        self._thread = Thread(target=self._accept, name="metrics", daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        port: int = self._listening[0].getsockname()[1]
        return port

    def close(self) -> None:
        """Stop listening. Connections that are open end with the process, or when they have been silent for long."""
        self._end.close()
        self._thread.join()
        for listening in self._listening:
            listening.close()

    def _accept(self) -> None:
        """Sleeps until somebody connects, or `_end` is closed: an idle server doesn't wake."""
        with self._ends, self._selector as selector:
            for one in (*self._listening, self._ends):
                one.setblocking(False)
                selector.register(one, EVENT_READ)
            while self._ends not in (ready := [key.fileobj for key, _ in selector.select()]):
                for listening in ready:
                    assert isinstance(listening, socket.socket)
                    # Whoever connected may have gone again, or there is no descriptor or no thread left.
                    try:
                        self._begin(*listening.accept())
                    except OSError as error:
                        if error.errno in _SCARCE:  # it stays ready, and would be asked again at once
                            time.sleep(_PAUSE_S)
                    except RuntimeError:
                        pass

    def _begin(self, connection: socket.socket, peer: object) -> None:
        with self._lock:
            self._connections[connection] = None
            oldest = next(iter(self._connections)) if len(self._connections) > _MAX_CONNECTIONS else None
            if oldest is not None:
                del self._connections[oldest]
                with suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
        try:
            Thread(target=self._serve, args=(connection, peer), daemon=True).start()
        except RuntimeError:
            with self._lock:
                self._connections.pop(connection, None)
            connection.close()
            raise

    def _serve(self, connection: socket.socket, peer: object) -> None:
        with connection:
            try:
                self._handler(connection, peer, self)  # type: ignore[arg-type]  # which it only stores
                connection.shutdown(socket.SHUT_WR)
            except Exception:  # noqa: BLE001 - a scraper that broke off is no news
                _log.debug("answering %s failed", peer, exc_info=True)
            finally:
                with self._lock:
                    self._connections.pop(connection, None)
