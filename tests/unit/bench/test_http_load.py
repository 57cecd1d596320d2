from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count

import pytest

from bench.http_load import load


@contextmanager
def serving(answers: Mapping[int, bytes]) -> Iterator[str]:
    """A server that answers with the body of the request, in two pieces, or with one of `answers` by the request's
    number."""
    numbers = count()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            echo = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body
            answer = answers.get(next(numbers), echo)
            self.wfile.write(answer[:-1])
            self.wfile.write(answer[-1:])

        def log_message(self, format: str, *args: object) -> None:
            pass

        def handle(self) -> None:
            with suppress(ConnectionError):  # the load has ended
                super().handle()

    class Server(ThreadingHTTPServer):
        daemon_threads = False  # they are waited for

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


async def test_every_client_keeps_asking_on_its_connection() -> None:
    found, nothing = {"answers": 0, "requests_per_s": 0.0}, ""
    with serving({}) as target:
        for seconds in (0.3, 3.0, 20.0):  # longer if this process stands still for as long
            try:
                found = await load(target, b"12345678", 4, seconds, 0.1)
            except ConnectionError as error:
                nothing = str(error)
            if found["requests_per_s"] * seconds > 4:
                break
    assert found["answers"] > found["requests_per_s"] * seconds > 4, nothing
    assert 0 < found["p50_ms"] <= found["p90_ms"] <= found["p99_ms"]


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n", "503 Service Unavailable"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nno", "expected 8 bytes, got 2"),
    ],
)
async def test_an_answer_that_is_not_right_ends_the_load(answer: bytes, reason: str) -> None:
    with serving({7: answer}) as target, pytest.raises(ConnectionError, match=reason):
        await load(target, b"12345678", 2, 5.0, 0.0)
