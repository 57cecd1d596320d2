"""The small HTTP server for scrapers: what it answers, which clients it survives, how fast it ends."""

from __future__ import annotations

import os
import resource
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from paceline.server.telemetry import metrics_endpoint
from paceline.server.telemetry.metrics import Metrics
from paceline.server.telemetry.metrics_endpoint import MetricsEndpoint
from tests.harness import has_ipv6
from tests.polling import eventually
from tests.ports import free_port
from tests.rlimits import limited
from tests.unit.server.counting import version


@pytest.fixture
def metrics() -> Metrics:
    metrics = Metrics()
    metrics.add(version())
    return metrics


@pytest.fixture
def endpoint(metrics: Metrics) -> Iterator[MetricsEndpoint]:
    endpoint = MetricsEndpoint(metrics, "127.0.0.1", 0)
    yield endpoint
    endpoint.close()


def get(endpoint: MetricsEndpoint, path: str = "/metrics", host: str = "127.0.0.1") -> tuple[int, str, bytes]:
    try:
        with urllib.request.urlopen(f"http://{host}:{endpoint.port}{path}", timeout=10) as response:
            return response.status, response.headers["Content-Type"], response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, "", b""


def models(text: bytes) -> list[bytes]:
    """The lines about models; those about the process differ each time."""
    return [line for line in text.splitlines() if b'model="' in line]


@pytest.mark.parametrize("path", ["/metrics", "/metrics?name=nv_inference_count"])
def test_get_metrics_returns_all_of_them_as_prometheus_text(
    endpoint: MetricsEndpoint, metrics: Metrics, path: str
) -> None:
    status, kind, body = get(endpoint, path)
    assert status == 200
    assert models(body) == models(metrics.text()) != []
    assert kind.startswith("text/plain; version=0.0.4")


@pytest.mark.parametrize("path", ["/metrics/", "/metricsx", "/v2/health/ready"])
def test_get_anything_else_is_404(endpoint: MetricsEndpoint, path: str) -> None:
    assert get(endpoint, path)[0] == 404


def test_post_is_refused_and_the_endpoint_keeps_serving(endpoint: MetricsEndpoint) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"http://127.0.0.1:{endpoint.port}/metrics", data=b"x", timeout=10)
    with caught.value:
        assert caught.value.code == 501
    assert get(endpoint)[0] == 200


def test_many_scrapes_at_once_are_all_answered(endpoint: MetricsEndpoint) -> None:
    codes: list[int] = []
    threads = [threading.Thread(target=lambda: codes.append(get(endpoint)[0])) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert codes == [200] * 16


def test_silent_scraper_does_not_hold_up_others(endpoint: MetricsEndpoint) -> None:
    with socket.create_connection(("127.0.0.1", endpoint.port), timeout=10):
        assert get(endpoint)[0] == 200


def test_scraper_that_resets_its_connection_leaves_no_traceback(
    endpoint: MetricsEndpoint, capfd: pytest.CaptureFixture[str]
) -> None:
    threads = threading.active_count()
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", endpoint.port), timeout=10) as connection:
            # A reset instead of an orderly end: the handler writes to a connection that is gone.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            connection.sendall(b"GET /metrics HTTP/1.1\r\n")
    assert get(endpoint)[0] == 200
    eventually(lambda: threading.active_count() <= threads, "the handlers' end")
    assert capfd.readouterr().err == ""


def test_connection_without_a_descriptor_waits_and_costs_nothing(endpoint: MetricsEndpoint) -> None:
    with socket.socket() as client:
        free = os.dup(client.fileno())
        os.close(free)
        client.settimeout(10)
        with limited(resource.RLIMIT_NOFILE, free):
            client.connect(("127.0.0.1", endpoint.port))
            client.sendall(b"GET / HTTP/1.0\r\n\r\n")
            began_s, used_s = time.monotonic(), time.process_time()
            eventually(lambda: time.monotonic() - began_s > 0.5, "half a second")
            assert time.process_time() - used_s < 0.25
        assert client.recv(100).startswith(b"HTTP/1.0 404")


def test_close_is_prompt_and_frees_the_port(metrics: Metrics) -> None:
    port = free_port()  # which nobody else takes meanwhile
    endpoint = MetricsEndpoint(metrics, "127.0.0.1", port)
    began = time.monotonic()
    endpoint.close()
    assert time.monotonic() - began < 30
    MetricsEndpoint(metrics, "127.0.0.1", port).close()


def test_close_with_an_open_connection_is_prompt(metrics: Metrics, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_endpoint, "_SILENCE_S", 600)
    endpoint = MetricsEndpoint(metrics, "127.0.0.1", 0)
    with socket.create_connection(("127.0.0.1", endpoint.port), timeout=10):
        began = time.monotonic()
        endpoint.close()
        assert time.monotonic() - began < 60


def test_port_in_use_is_an_oserror(metrics: Metrics, endpoint: MetricsEndpoint) -> None:
    with pytest.raises(OSError, match="Address already in use"):
        MetricsEndpoint(metrics, "127.0.0.1", endpoint.port)


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("address", ["::1", "[::1]", "::", "[::]"])
def test_ipv6_addresses_are_served_with_and_without_brackets(metrics: Metrics, address: str) -> None:
    endpoint = MetricsEndpoint(metrics, address, 0)
    assert get(endpoint, host="[::1]")[0] == 200
    endpoint.close()
